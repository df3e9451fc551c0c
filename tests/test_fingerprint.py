"""The weights' fingerprint: any change of any parameter or buffer changes it, and nothing else does."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests import tiny
from vlcache_hf import bits, fingerprint
from vlcache_hf.fingerprint import FingerprintError, WeightsFingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int64]
FIXTURES = [HealthCheck.function_scoped_fixture]


class Holder(nn.Module):
    """A module with one buffer."""

    def __init__(self, tensor: torch.Tensor, name: str = "weight") -> None:
        super().__init__()
        self.register_buffer(name, tensor)


def digest(module: nn.Module) -> str:
    return WeightsFingerprint().digest(module, "m")


def of(tensor: torch.Tensor) -> str:
    return digest(Holder(tensor))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, request):
    """The table of a million multipliers takes longer than all else here."""
    if "real_chunks" not in request.fixturenames:
        monkeypatch.setattr(bits, "_BLOCK", 64)


@pytest.fixture
def real_chunks():
    """Asks for the library's own chunk size."""


@pytest.fixture
def hashed(monkeypatch):
    """Keys of the tensors that were read."""
    seen: list[str] = []
    original = fingerprint._hash

    def spy(hasher, weight):
        seen.append(weight.key)
        return original(hasher, weight)

    monkeypatch.setattr(fingerprint, "_hash", spy)
    return seen


# --- one tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(count=st.integers(1, 70), at=st.integers(0, 69), bit=st.integers(0, 63))
@settings(max_examples=60, deadline=None, suppress_health_check=FIXTURES)
def test_every_bit_counts(dtype, count, at, bit):
    tensor = torch.arange(count).to(dtype)
    raw = tensor.clone().view(torch.uint8)
    size = dtype.itemsize
    raw[(at % count) * size + (bit // 8) % size] ^= 1 << (bit % 8)
    assert of(raw.view(dtype)) != of(tensor)


def test_bool_elements_count():
    mask = torch.zeros(13, dtype=torch.bool)
    found = {of(mask)}
    for i in range(13):
        other = mask.clone()
        other[i] = True
        found.add(of(other))
    assert len(found) == 14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(pair=st.lists(st.integers(0, 39), min_size=2, max_size=2, unique=True))
@settings(max_examples=60, deadline=None, suppress_health_check=FIXTURES)
def test_swapped_elements_count(dtype, pair):
    tensor = torch.arange(1, 41).to(dtype)
    other = tensor.clone()
    other[pair] = tensor[pair[::-1]]
    assert of(other) != of(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str)
@given(flipped=st.sets(st.integers(0, 63), min_size=1, max_size=64))
@settings(max_examples=80, deadline=None, suppress_health_check=FIXTURES)
def test_flipped_signs_count(dtype, flipped):
    tensor = torch.arange(1, 65).to(dtype)
    other = tensor.clone()
    other[sorted(flipped)] *= -1
    assert of(other) != of(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("column", range(8))
def test_a_negated_column_counts(dtype, column):
    """Negating a channel (here and in the next layer) is an edit that people make: it moves top bits only."""
    weight = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    other = weight.clone()
    other[:, column] *= -1
    assert of(other) != of(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@given(at=st.lists(st.integers(0, 63), min_size=2, max_size=6, unique=True), bit=st.integers(0, 7))
@settings(max_examples=80, deadline=None, suppress_health_check=FIXTURES)
def test_one_high_bit_of_several_elements_counts(dtype, at, bit):
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(1)).to(dtype)
    raw = tensor.clone().view(torch.uint8).view(64, dtype.itemsize)
    raw[at, -1] ^= 1 << bit
    assert of(raw.view(-1).view(dtype)) != of(tensor)


def test_a_large_tensor_is_read_to_its_end(real_chunks):
    """More than one chunk of the real size, in the last lane of which one bit changes."""
    tensor = torch.zeros(bits._BLOCK + 5, dtype=torch.int64)
    found = {of(tensor)}
    for at in (0, bits._BLOCK - 1, bits._BLOCK, -1):
        other = tensor.clone()
        other[at] = 1
        found.add(of(other))
    assert len(found) == 5


def test_changes_far_apart_count(monkeypatch):
    monkeypatch.setattr(bits, "_BLOCK", 16)  # many chunks
    tensor = torch.arange(400, dtype=torch.int64)
    swapped = tensor.view(-1, 16).flip(0).reshape(-1)
    moved = tensor.clone()
    moved[[0, 16]] = tensor[[16, 0]]
    shifted = tensor.roll(16)
    cancelled = tensor.clone()
    cancelled[0] += 1
    cancelled[16] -= 1
    assert len({of(t) for t in (tensor, swapped, moved, shifted, cancelled)}) == 5


def test_shape_and_dtype_count():
    tensor = torch.zeros(24)
    shapes = [(24,), (4, 6), (6, 4), (1, 24), (24, 1), (2, 3, 4)]
    found = {of(tensor.view(shape)) for shape in shapes}
    found |= {of(torch.zeros(24, dtype=dtype)) for dtype in (torch.int32, torch.bfloat16, torch.float16)}
    assert len(found) == len(shapes) + 3


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 7, 8, 9])
def test_trailing_zeros_count(count):
    tensor = torch.ones(count, dtype=torch.uint8)
    assert of(tensor) != of(torch.cat([tensor, torch.zeros(1, dtype=torch.uint8)]))


def test_layout_in_memory_does_not_count():
    tensor = torch.randn(6, 10)
    big = torch.zeros(8, 15)
    big[1:7, 3:13] = tensor
    offset = torch.cat([torch.zeros(1), tensor.reshape(-1)])[1:].view(6, 10)  # not aligned to 8 bytes
    views = (tensor.clone(), big[1:7, 3:13], tensor.t().contiguous().t(), offset)
    assert {of(view) for view in views} == {of(tensor)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.bool], ids=str)
@given(offset=st.integers(0, 9), count=st.integers(0, 20))
@settings(max_examples=40, deadline=None, suppress_health_check=FIXTURES)
def test_unaligned_views_are_read(dtype, offset, count):
    base = (torch.arange(40) % 2).to(dtype)
    assert of(base[offset : offset + count]) == of(base[offset : offset + count].clone())


def test_odd_tensors_are_read():
    tensors = [
        torch.tensor(3.0),
        torch.tensor(True),
        torch.empty(0),
        torch.empty(3, 0),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.randn(3).to(torch.float8_e4m3fn),
        torch.randn(3, dtype=torch.complex64),
        torch.ones(4).expand(3, 4),
    ]
    assert len({of(tensor) for tensor in tensors}) == len(tensors)


def test_the_thread_count_does_not_count():
    tensor = torch.randn(300_000)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = of(tensor)
        torch.set_num_threads(4)
        assert of(tensor) == one
    finally:
        torch.set_num_threads(threads)


# --- whole models


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_parameter_and_buffer_counts(architecture):
    model = tiny.stock(architecture).model
    watch = WeightsFingerprint()
    seen = {watch.digest(model, "m")}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert any("inv_freq" in name for name, _ in tensors)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in tensors:
            at = int(torch.randint(tensor.numel(), (), generator=generator))
            flat = tensor.view(-1)
            flat[at] = torch.nextafter(flat[at], torch.tensor(float("inf")))
            changed = watch.digest(model, "m")
            assert changed not in seen, name
            assert changed == digest(model), name  # what is remembered is what is there
            seen.add(changed)


def test_equal_weights_have_one_fingerprint():
    one, other = tiny.stock("qwen3_vl").model, tiny.stock("qwen3_vl").model
    assert digest(one) == digest(other) == digest(copy.deepcopy(one))
    assert digest(one) != digest(tiny.stock("qwen3_vl", seed=1).model)


def test_names_count():
    tensor = torch.randn(3)
    assert digest(Holder(tensor, "a")) != digest(Holder(tensor, "b"))


def test_swapped_layers_count():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = digest(model)
    model[0], model[1] = model[1], model[0]
    assert digest(model) != before


def test_one_dtype_counts():
    model = tiny.stock("qwen3_vl").model
    before = digest(model)
    norm = model.language_model.norm
    norm.weight = nn.Parameter(norm.weight.detach().to(torch.bfloat16))  # all ones: exact
    assert digest(model) != before


def test_tied_weights():
    tied, loose = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    loose.load_state_dict(tied.state_dict())
    watch = WeightsFingerprint()
    before = watch.digest(tied, "m")
    assert before == digest(loose)
    with torch.no_grad():
        tied[0].weight[0, 0] += 1
    assert watch.digest(tied, "m") != before
    assert watch.digest(tied, "m") == digest(tied)


def test_unchanged_weights_are_read_once(hashed):
    model = tiny.stock("qwen3_vl").model
    watch = WeightsFingerprint()
    first = watch.digest(model, "m")
    read = len(hashed)
    assert watch.digest(model, "m") == first
    assert len(hashed) == read == len([*model.parameters(), *model.buffers()])


def test_only_the_changed_tensor_is_read_again(hashed):
    model = tiny.stock("qwen3_vl").model
    watch = WeightsFingerprint()
    watch.digest(model, "m")
    hashed.clear()
    with torch.no_grad():
        model.language_model.norm.weight.mul_(2)
    watch.digest(model, "m")
    assert hashed == ["m.language_model.norm.weight"]


def test_replaced_parameters_are_seen():
    model = nn.Linear(4, 4)
    watch = WeightsFingerprint()
    before = watch.digest(model, "m")
    model.weight = nn.Parameter(model.weight.detach() + 1)
    assert watch.digest(model, "m") == digest(model) != before


def test_an_address_that_is_used_again_is_not_taken_for_the_old_tensor():
    """Python and the allocator hand out ids and addresses anew."""
    watch, seen = WeightsFingerprint(), set()
    module = Holder(torch.zeros(64))
    for value in range(50):
        module.weight = None
        gc.collect()
        module.weight = torch.full((64,), float(value))
        seen.add(watch.digest(module, "m"))
        assert watch.digest(module, "m") == of(torch.full((64,), float(value)))
    assert len(seen) == 50


def test_data_that_points_elsewhere_is_seen():
    model = nn.Linear(4, 4)
    watch = WeightsFingerprint()
    before = watch.digest(model, "m")
    keep = model.weight.data  # the old memory stays taken
    model.weight.data = keep + 1
    assert watch.digest(model, "m") == digest(model) != before


def test_edits_through_data_are_seen_after_refresh():
    model = nn.Linear(4, 4)
    watch = WeightsFingerprint()
    before = watch.digest(model, "m")
    model.weight.data.add_(1)
    watch.refresh()
    assert watch.digest(model, "m") == digest(model) != before


def test_load_state_dict_is_seen():
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    watch = WeightsFingerprint()
    before = watch.digest(model, "m")
    model.load_state_dict(other.state_dict())
    assert watch.digest(model, "m") == digest(other) != before


def test_an_optimizer_step_is_seen():
    model = nn.Linear(4, 4)
    watch = WeightsFingerprint()
    before = watch.digest(model, "m")
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert watch.digest(model, "m") == digest(model) != before


def test_casting_a_model_there_and_back_is_seen():
    model = tiny.stock("qwen3_vl").model
    watch = WeightsFingerprint()
    before = watch.digest(model, "m")
    model.to(torch.bfloat16)
    half = watch.digest(model, "m")
    model.to(torch.float32)
    assert len({before, half, watch.digest(model, "m")}) == 3


def test_inference_tensors_are_read():
    with torch.inference_mode():
        tensor = torch.arange(8.0)
    module = Holder(tensor)
    assert tensor.is_inference()
    watch = WeightsFingerprint()
    assert watch.digest(module, "m") == of(torch.arange(8.0)) == watch.digest(module, "m")


def test_edits_of_inference_tensors_are_seen():
    """They have no version counter; that is a reason to look, not to trust."""
    with torch.inference_mode():
        module = Holder(torch.arange(8.0))
        watch = WeightsFingerprint()
        before = watch.digest(module, "m")
        module.weight[3] += 1
        assert watch.digest(module, "m") == digest(module) != before


def test_weights_without_values_have_no_fingerprint():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(FingerprintError, match="weight"):
        digest(model)


def test_unreadable_weights_have_no_fingerprint():
    module = nn.Module()
    module.register_buffer("weight", torch.eye(3).to_sparse())
    with pytest.raises(FingerprintError, match="weight"):
        digest(module)


def test_fingerprints_of_two_modules_in_one_watch_do_not_mix():
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    watch = WeightsFingerprint()
    first, second = watch.digest(one, "one"), watch.digest(other, "other")
    assert first == digest(one) and second == digest(other)
    assert watch.digest(one, "one") == first


def test_packed_bytes_with_other_scales_differ():
    """bitsandbytes keeps the scales beside the packed bytes."""

    class State:
        def __init__(self, absmax):
            self.absmax = absmax

    def packed(scale):
        module = nn.Module()
        module.weight = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
        module.weight.quant_state = State(torch.full((2,), scale))
        return module

    assert digest(packed(1.0)) == digest(packed(1.0))
    assert digest(packed(1.0)) != digest(packed(2.0))
