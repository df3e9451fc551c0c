import math
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from vlcache_hf.store import StoreReadError
from vlcache_hf.store import entry as entry_module
from vlcache_hf.store import layout as layout_module
from vlcache_hf.store.checksum import BLOCK_BYTES, Verified
from vlcache_hf.store.entry import BadEntryError, open_entry
from vlcache_hf.store.layout import NonFiniteError, lay_out, write_entry

KEY = ("kv", "a" * 64, "b" * 64)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8]


def write(path, tensors, fields=None, key=KEY):
    layout = lay_out(*key, tensors, fields or {})
    path.unlink(missing_ok=True)
    with open(path, "xb") as file:
        write_entry(file, layout)
    assert path.stat().st_size == layout.size
    return path


def random(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def same_bits(a, b):
    def bits(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).flatten().view(torch.uint8).tolist()

    return a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(tmp_path, dtype):
    tensors = {"k.0": random((7, 2, 4), dtype), "odd": torch.ones(3, dtype=torch.uint8), "none": random((0, 4), dtype)}
    path = write(tmp_path / "e", tensors, {"grid": "1,2,3", "": "empty"})
    entry = open_entry(path, *KEY)
    assert entry.fields == {"grid": "1,2,3", "": "empty"}
    assert entry.keys() == sorted(tensors)
    assert entry.nbytes == sum(t.nbytes for t in tensors.values())
    for name, tensor in tensors.items():
        assert entry.shape(name) == tuple(tensor.shape)
        assert entry.dtype(name) == tensor.dtype
        assert same_bits(entry.tensor(name), tensor)
    assert entry.bytes_read == entry.nbytes


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    dtype=st.sampled_from(DTYPES),
    flip=st.booleans(),
    step=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_and_stride(tmp_path_factory, shape, dtype, flip, step, seed):
    tensor = random(shape, dtype, seed)
    if tensor.ndim:
        if flip:
            tensor = tensor.permute(*reversed(range(tensor.ndim)))
        tensor = tensor[..., ::step]
    path = write(tmp_path_factory.mktemp("entry") / "e", {"t": tensor, "other": torch.zeros(1, dtype=torch.bool)})
    assert same_bits(open_entry(path, *KEY).tensor("t"), tensor)


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[:1].expand(2000, -1)])
def test_tensors_larger_than_a_chunk(tmp_path, make):
    tensor = make(torch.arange(2000 * 400, dtype=torch.float32).view(2000, 400))
    assert torch.equal(open_entry(write(tmp_path / "e", {"t": tensor}), *KEY).tensor("t"), tensor)


def test_special_bits_survive(tmp_path):
    bits = torch.tensor([0, 1, -32768, 0x7F7F, 0x0080, 0x007F], dtype=torch.int16)  # zeros, subnormals, the largest
    path = write(tmp_path / "e", {"t": bits.view(torch.bfloat16)})
    assert open_entry(path, *KEY).tensor("t").view(torch.int16).tolist() == bits.tolist()


def test_files_are_plain_safetensors(tmp_path):
    tensors = {"a": random((3, 5), torch.bfloat16), "b": random((2,), torch.float64)}
    loaded = load_file(write(tmp_path / "e", tensors))
    assert {name: same_bits(loaded[name], tensor) for name, tensor in tensors.items()} == {"a": True, "b": True}


def test_rows_are_views_that_read_only_themselves(tmp_path):
    tensor = random((1000, 2, 64), torch.bfloat16)
    entry = open_entry(write(tmp_path / "e", {"k": tensor}), *KEY)
    rows = entry.rows("k", 10, 20)
    assert torch.equal(rows, tensor[10:20])
    assert entry.bytes_read == 10 * 2 * 64 * 2
    assert rows.data_ptr() == entry.tensor("k").data_ptr() + 10 * 2 * 64 * 2
    assert entry.rows("k", 5, 5).shape == (0, 2, 64)
    assert entry.rows("k", 1000, 1000).shape == (0, 2, 64)


def test_rows_are_ready_once_their_blocks_were_checked(tmp_path):
    rows = BLOCK_BYTES // 1024
    tensor = random((5 * rows // 2, 256), torch.float32)  # two blocks and a half
    path = write(tmp_path / "e", {"k": tensor, "none": torch.ones(0, 3), "scalar": torch.tensor(1.0)})
    verified = Verified()
    entry = open_entry(path, *KEY, verified)
    parts = [(0, 1), (0, rows), (rows, 2 * rows), (2 * rows, len(tensor)), (rows - 1, rows + 1), (0, len(tensor))]

    def ready(other=entry):
        return [other.ready("k", *part) for part in parts]

    assert ready() == [False] * 6
    entry.rows("k", 3, 4)
    assert ready() == [True, True, False, False, False, False]
    entry.rows("k", rows, rows + 1)
    assert ready() == [True, True, True, False, True, False]
    entry.rows("k", len(tensor) - 1, len(tensor))
    assert ready() == ready(open_entry(path, *KEY, verified)) == [True] * 6
    assert ready(open_entry(path, *KEY)) == [False] * 6
    assert entry.ready("none", 0, 0) and not entry.ready("v", 0, 1), "what is not there is found out by reading it"


def test_rows_can_be_read_in_several_threads(tmp_path):
    names = [f"k.{number}" for number in range(40)]
    tensors = {name: torch.full((8, 64), float(number)) for number, name in enumerate(names)}
    entry = open_entry(write(tmp_path / "e", tensors), *KEY, Verified())
    wrong = []

    def read(seed):
        for step in range(400):
            number = (7 * step + seed) % len(names)
            if not torch.equal(entry.rows(names[number], 2, 5), tensors[names[number]][2:5]):
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and all(entry.ready(name, 0, 8) for name in names)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc")
def test_a_row_reads_no_other_page(tmp_path):
    path = write(tmp_path / "entry-to-map", {"k": torch.ones(4096, 4096)})
    entry = open_entry(path, *KEY)
    before = resident_kib("entry-to-map")
    assert entry.rows("k", 2000, 2001).sum().item() == 4096
    assert resident_kib("entry-to-map") - before <= 4096  # 64 MiB in all; the kernel maps what it has nearby


def resident_kib(name):
    total, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split()[0]:
                inside = name in line
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1])
    return total


def test_tensors_outlive_the_file_and_the_entry(tmp_path):
    tensor = random((50, 8), torch.float32)
    path = write(tmp_path / "e", {"k": tensor})
    entry = open_entry(path, *KEY)
    rows = entry.rows("k", 3, 9)
    path.unlink()
    write(path, {"k": torch.zeros(50, 8)})
    assert torch.equal(entry.tensor("k"), tensor)
    del entry
    assert torch.equal(rows, tensor[3:9])


@pytest.mark.parametrize("start, stop", [(-1, 2), (2, 1), (0, 6), (6, 6)])
def test_rows_out_of_range(tmp_path, start, stop):
    entry = open_entry(write(tmp_path / "e", {"k": torch.ones(5, 2), "scalar": torch.tensor(1.0)}), *KEY)
    with pytest.raises(StoreReadError, match=f"rows {start}:{stop}"):
        entry.rows("k", start, stop)
    with pytest.raises(StoreReadError, match="scalar"):
        entry.rows("scalar", 0, 1)
    assert entry.bytes_read == 0


def test_unknown_tensor_and_failed_read(tmp_path, monkeypatch):
    entry = open_entry(write(tmp_path / "e", {"k": torch.ones(5, 2)}), *KEY)
    for read in (entry.tensor, entry.shape, entry.dtype, lambda name: entry.rows(name, 0, 1)):
        with pytest.raises(StoreReadError, match="no tensor 'v'"):
            read("v")

    class Broken:
        def get_tensor(self, name):
            raise RuntimeError("input/output error")

    monkeypatch.setattr(entry, "_handle", Broken())
    with pytest.raises(StoreReadError, match="input/output error"):
        entry.rows("k", 0, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_non_finite_values_are_refused(tmp_path, value, dtype):
    tensor = torch.ones(600, 1000, dtype=dtype)
    tensor[-1, -1] = value
    with pytest.raises(NonFiniteError):
        write(tmp_path / "e", {"k": tensor})


def test_sums_that_overflow_are_not_refused(tmp_path):
    tensor = torch.full((1000,), torch.finfo(torch.float32).max)
    assert torch.equal(open_entry(write(tmp_path / "e", {"k": tensor}), *KEY).tensor("k"), tensor)


def test_what_cannot_be_stored():
    with pytest.raises(ValueError, match="only dense CPU tensors"):
        lay_out(*KEY, {"k": torch.ones(2, device="meta")}, {})
    with pytest.raises(ValueError, match="only dense CPU tensors"):
        lay_out(*KEY, {"k": torch.ones(2, dtype=torch.complex64)}, {})
    with pytest.raises(ValueError, match="strings"):
        lay_out(*KEY, {}, {"n": 1})


@pytest.mark.parametrize("position, other", [(0, "vit"), (1, "c" * 64), (2, "c" * 64)])
def test_another_key_is_bad(tmp_path, position, other):
    key = [*KEY]
    key[position] = other
    path = write(tmp_path / "e", {"k": torch.ones(2)}, key=key)
    with pytest.raises(BadEntryError, match="instead of"):
        open_entry(path, *KEY)


def test_another_format_and_foreign_files_are_bad(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(layout_module, "FORMAT", "0")
        write(tmp_path / "old", {"k": torch.ones(2)})
    save_file({"k": torch.ones(2)}, tmp_path / "foreign")
    os.mkfifo(tmp_path / "pipe")
    os.symlink(tmp_path / "foreign", tmp_path / "link")
    os.mkdir(tmp_path / "folder")
    for name in ("old", "foreign", "pipe", "link", "folder"):
        with pytest.raises(BadEntryError):
            open_entry(tmp_path / name, *KEY)
    with pytest.raises(FileNotFoundError):
        open_entry(tmp_path / "none", *KEY)


def test_fields_cannot_pose_as_the_key(tmp_path):
    other = ("kv", "a" * 64, "c" * 64)
    path = write(tmp_path / "e", {"k": torch.ones(2)}, {"name": KEY[2], "format": "9"}, key=other)
    assert open_entry(path, *other).fields == {"name": KEY[2], "format": "9"}
    with pytest.raises(BadEntryError):
        open_entry(path, *KEY)


def test_a_file_replaced_while_it_is_opened_is_opened_again(tmp_path, monkeypatch):
    path = write(tmp_path / "e", {"k": torch.zeros(4)}, {"v": "old"})
    newer = write(tmp_path / "n", {"k": torch.ones(4)}, {"v": "newer, and longer"})
    real = entry_module.safe_open

    def replace_then_open(*args, **kwargs):
        handle = real(*args, **kwargs)
        if newer.exists():
            os.replace(newer, path)
        return handle

    monkeypatch.setattr(entry_module, "safe_open", replace_then_open)
    entry = open_entry(path, *KEY)
    assert entry.fields == {"v": "newer, and longer"}
    assert entry.tensor("k").tolist() == [1, 1, 1, 1]


def test_failing_to_open_is_neither_missing_nor_bad(tmp_path, monkeypatch):
    path = write(tmp_path / "e", {"k": torch.ones(2)})

    def no_descriptors(*args, **kwargs):
        raise FileNotFoundError("No such file or directory")  # what safe_open says of EMFILE

    monkeypatch.setattr(entry_module, "safe_open", no_descriptors)
    with pytest.raises(OSError, match="could not be opened") as caught:
        open_entry(path, *KEY)
    assert not isinstance(caught.value, FileNotFoundError)
