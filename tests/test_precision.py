"""KV stored in 8 bits: what it loses is bounded, said, and never passed on as exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from vlcache_hf import VLCache, attach
from vlcache_hf.precision import KVShape, StorageError, dequantise, stored_error
from vlcache_hf.store import DiskStore

A, B = tiny.image(1), tiny.image(2, 8, 12)
# largest relative error of one value against the largest of its head: half a step of 1/127, and of 3 bits of mantissa
STEPS = {"int8": 0.5 / 127, "fp8": 1 / 16}


def attached(path: Path, **settings: Any) -> Any:
    return attach(tiny.stock("qwen3_vl"), {"cache_dir": path, "schedule": 0.25, "storage_dtype": "int8", **settings})


def ask(model: Any, *parts: Any, **settings: Any) -> tuple[torch.Tensor, list[str]]:
    with torch.no_grad():
        output = model(**tiny.batch(tiny.prompt(*parts)), logits_to_keep=1, cache=VLCache(**settings))
    return output.logits, tiny.kinds(model)


def stored_flags(model: Any) -> list[bool]:
    return [image.stored for image in model.vlcache.last_request.images]


def test_sizes_and_names() -> None:
    plain = KVShape(layers=2, heads=3, head_dim=4, dtype=torch.bfloat16)
    assert plain.exact and plain.nbytes(10) == 2 * 2 * 3 * 4 * 10 * 2
    assert plain.shapes(10) == {f"{part}.{layer}": (10, 3, 4) for part in "kv" for layer in range(2)}
    eight = KVShape(layers=2, heads=3, head_dim=4, dtype=torch.bfloat16, storage="int8")
    assert not eight.exact and eight.nbytes(10) == 2 * 2 * 3 * 10 * (4 + 2)
    assert eight.shapes(10)["k.1.scale"] == (10, 3, 1)
    assert len(eight.shapes(10)) == 8


@pytest.mark.parametrize("storage", STEPS)
@given(
    seed=st.integers(0, 2**31), exponent=st.integers(-20, 20), dtype=st.sampled_from([torch.float32, torch.bfloat16])
)
def test_what_is_read_is_close_to_what_was_stored(storage: str, seed: int, exponent: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(5, 3, 16, generator=generator).mul(2.0**exponent).to(dtype) for _ in range(2))
    values[0] = 0.0
    shape = KVShape(1, 3, 16, dtype, storage)
    parts, error = shape.encode(0, keys, values)
    assert sum(part.nbytes for part in parts.values()) == shape.nbytes(5)
    for name, rows in (("k.0", keys), ("v.0", values)):
        got = dequantise(parts[name], parts[f"{name}.scale"], torch.float32)
        largest = rows.float().abs().amax(-1, keepdim=True)
        # the scale itself has 8 bits of mantissa
        assert ((got - rows.float()).abs() <= largest * (STEPS[storage] * 1.01 + 2**-8)).all()
    assert torch.equal(dequantise(parts["v.0"], parts["v.0.scale"], dtype)[0], values[0])
    assert 0 < error.value() < 3 * STEPS[storage]


def test_as_computed_loses_nothing() -> None:
    keys, values = torch.randn(2, 5, 3, 16)
    parts, error = KVShape(1, 3, 16, torch.float32).encode(0, keys, values)
    assert torch.equal(parts["k.0"], keys) and torch.equal(parts["v.0"], values)
    assert error.value() == 0.0


def test_the_largest_error_counts() -> None:
    error = StorageError.between((torch.ones(4), torch.full((4,), 1.1)), (torch.ones(4), torch.ones(4)))
    error.add(StorageError.between((torch.ones(4), torch.full((4,), 1.3))))
    assert error.value() == pytest.approx(0.3)
    assert stored_error({"error": "2.5e-03"}) == 2.5e-3
    assert stored_error({}) == stored_error({"error": "?"}) == 0.0


@pytest.mark.parametrize("storage", STEPS)
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_hit_of_the_same_context_is_close_and_says_that_it_is_lossy(
    storage: str, architecture: str, tmp_path: Path
) -> None:
    ours = attach(tiny.stock(architecture), {"cache_dir": tmp_path, "storage_dtype": storage})
    parts = (tiny.text(1, 4), A, tiny.text(2, 3))
    expected, kinds = ask(ours, *parts)
    assert kinds == ["miss"] and not ours.vlcache.last_request.lossy
    record = ours.vlcache.last_request.images[0]
    assert record.stored and record.storage == storage and 0 < record.storage_error < 0.1
    got, kinds = ask(ours, *parts)
    again = ours.vlcache.last_request.images[0]
    assert kinds == ["exact"] and ours.vlcache.last_request.lossy
    assert again.storage == storage and again.storage_error == pytest.approx(record.storage_error, rel=1e-2)
    assert f"{storage} (error " in str(ours.vlcache.last_request)
    difference = (got - expected).norm() / expected.norm()
    assert 1e-6 < difference < 0.5


def test_int8_is_closer_than_fp8(tmp_path: Path) -> None:
    errors = {}
    for storage in STEPS:
        ours = attached(tmp_path / storage, storage_dtype=storage)
        ask(ours, tiny.text(1, 4), A, tiny.text(2, 3))
        errors[storage] = ours.vlcache.last_request.images[0].storage_error
    assert errors["int8"] < errors["fp8"] / 2


def test_entries_of_other_precisions_are_never_met(tmp_path: Path) -> None:
    ours = attached(tmp_path)
    parts = (tiny.text(1, 4), A, tiny.text(2, 3))
    expected, _ = ask(ours, *parts)
    assert ask(ours, *parts, storage_dtype="auto")[1] == ["miss"]
    assert ask(ours, *parts, storage_dtype="fp8")[1] == ["miss"]
    # only what loses nothing is served where nothing may be lost, and it is stored so
    got, kinds = ask(ours, *parts, reuse="exact")
    assert kinds == ["exact"] and not ours.vlcache.last_request.lossy
    assert (got - expected).abs().max() < 1e-5
    assert ours.vlcache.stats().vision_calls == 1, "features are kept as computed, for all of them"


def test_what_is_computed_behind_8_bits_is_not_stored_and_then_promoted(tmp_path: Path) -> None:
    ours = attached(tmp_path)
    first, second = (tiny.text(1, 4), A, tiny.text(2, 3)), (B, tiny.text(3, 3))
    ask(ours, *first)
    assert ask(ours, *first, *second)[1] == ["exact", "miss"]
    assert stored_flags(ours) == [False, False]
    expected, kinds = ask(ours, *first, *second)  # met before: the row is computed in full, and clean
    assert kinds == ["miss", "miss"] and stored_flags(ours) == [False, True]
    assert (expected - _stock_logits(*first, *second)).abs().max() < 1e-5
    assert ask(ours, *first, *second)[1] == ["exact", "exact"]
    assert not list((tmp_path / "kv").rglob("*.tmp")) and len(list((tmp_path / "kv").rglob("*.safetensors"))) == 2


def test_a_row_is_promoted_alone(tmp_path: Path) -> None:
    ours = attached(tmp_path)
    one, two = (tiny.text(1, 4), A, tiny.text(2, 3)), (tiny.text(1, 4), A, tiny.text(2, 3), B, tiny.text(3, 3))
    rows = tiny.batch(tiny.prompt(*one), tiny.prompt(*two))
    ask(ours, *one)
    for expected in (["exact", "exact", "miss"], ["exact", "miss", "miss"], ["exact", "exact", "exact"]):
        with torch.no_grad():
            ours(**tiny.clone(rows), logits_to_keep=1)
        assert tiny.kinds(ours) == expected


def test_a_returned_cache_says_that_it_holds_a_loss(tmp_path: Path) -> None:
    ours = attached(tmp_path)
    inputs = tiny.batch(tiny.prompt(tiny.text(1, 4), A, tiny.text(2, 3)))
    taints = []
    for _ in range(2):
        with torch.no_grad():
            taints.append(ours(**tiny.clone(inputs), logits_to_keep=1, use_cache=True).cache.vlcache_tainted)
    assert taints == [False, True]


def test_reuse_of_another_context_adds_both_losses(tmp_path: Path) -> None:
    ours = attached(tmp_path)
    ask(ours, tiny.text(1, 4), A, tiny.text(2, 3))
    _, kinds = ask(ours, tiny.text(5, 6), A, tiny.text(2, 3))
    record = ours.vlcache.last_request.images[0]
    assert kinds == ["reused"] and record.lossy and record.storage == "int8" and record.storage_error > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("storage", STEPS)
def test_what_is_not_finite_is_not_stored(storage: str, bad: float, tmp_path: Path) -> None:
    shape = KVShape(1, 3, 16, torch.float32, storage)
    keys = torch.randn(5, 3, 16)
    keys[2, 1, 3] = bad
    parts, _ = shape.encode(0, keys, torch.randn(5, 3, 16))
    store = DiskStore(tmp_path, None)
    assert store.put("kv", "a" * 64, "b" * 64, parts, {}) == 0
    assert store.get("kv", "a" * 64, "b" * 64) is None


@pytest.mark.parametrize("damage", ["scale", "rows"])
def test_a_flipped_byte_in_rows_or_scales_is_a_miss(damage: str, tmp_path: Path) -> None:
    ours = attached(tmp_path)
    parts = (tiny.text(1, 4), A, tiny.text(2, 3))
    expected, _ = ask(ours, *parts)
    (file,) = (tmp_path / "kv").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    # the scales, wider, stand first
    data[header + 3 if damage == "scale" else -3] ^= 1
    file.write_bytes(data)
    got, kinds = ask(ours, *parts)
    assert kinds == ["miss"] and (got - expected).abs().max() < 1e-5
    assert ask(ours, *parts)[1] == ["exact"], "the bad entry went, and a good one took its place"


def _stock_logits(*parts: Any) -> torch.Tensor:
    with torch.no_grad():
        return tiny.stock("qwen3_vl")(**tiny.batch(tiny.prompt(*parts)), logits_to_keep=1).logits
