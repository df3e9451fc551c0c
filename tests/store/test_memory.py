from __future__ import annotations

import copy
import pickle

import pytest
import torch

from vlcache_hf.store import DiskStore, MemoryEntry, RamTier, StoreReadError

G, A, B, C = "a" * 64, "1" * 64, "2" * 64, "3" * 64
ENTRY = 40  # bytes


@pytest.fixture
def disk(tmp_path):
    return DiskStore(tmp_path, None)


def put(store, name, value=1.0):
    return store.put("kv", G, name, {"k": torch.full((5, 2), value)}, {"grid": name[:1]})


def value(store, name):
    entry = store.get("kv", G, name)
    return None if entry is None else float(entry.rows("k", 0, 5)[0, 0])


def test_what_was_stored_is_served_without_the_disk(disk):
    tier = RamTier(disk, 1000)
    tensor = torch.ones(5, 2)
    assert tier.put("kv", G, A, {"k": tensor}, {"grid": "1"}) > 0
    for file in disk.cache_dir.rglob("*.safetensors"):
        file.unlink()
    entry = tier.get("kv", G, A)
    assert entry.rows("k", 1, 3).data_ptr() == tensor[1:].data_ptr()  # no copy was made
    assert entry.fields == {"grid": "1"} and entry.keys() == ["k"]
    assert entry.shape("k") == (5, 2) and entry.dtype("k") == torch.float32
    assert tier.ram_bytes == ENTRY


def test_what_was_read_is_kept_at_the_second_use(disk):
    put(disk, A)
    tier = RamTier(disk, 1000)
    assert value(tier, A) == 1.0 and tier.ram_bytes == 0
    assert value(tier, A) == 1.0 and tier.ram_bytes == ENTRY
    for file in disk.cache_dir.rglob("*.safetensors"):
        file.unlink()
    assert value(tier, A) == 1.0
    assert value(disk, A) is None


def test_the_least_recently_used_entry_goes_first(disk):
    tier = RamTier(disk, 2 * ENTRY)
    put(tier, A, 1.0)
    put(tier, B, 2.0)
    assert value(tier, A) == 1.0
    put(tier, C, 3.0)
    assert tier.ram_bytes == 2 * ENTRY
    disk.clear()
    assert [value(tier, name) for name in (A, B, C)] == [1.0, None, 3.0]


def test_an_entry_larger_than_the_tier_is_not_kept(disk):
    tier = RamTier(disk, ENTRY - 1)
    put(tier, A)
    assert tier.ram_bytes == 0 and value(tier, A) == 1.0


def test_a_hit_in_memory_is_a_use_on_disk(disk):
    tier = RamTier(disk, 1000)
    put(tier, A)
    put(tier, B)
    assert disk.names("kv", G) == [B, A]
    assert value(tier, A) == 1.0
    assert disk.names("kv", G) == tier.names("kv", G) == [A, B]


def test_discard_and_clear_reach_both(disk):
    tier = RamTier(disk, 1000)
    put(tier, A)
    tier.discard("kv", G, A)
    assert value(tier, A) is None and tier.ram_bytes == 0
    put(tier, B)
    tier.clear()
    assert value(tier, B) is None and tier.ram_bytes == 0 and tier.nbytes() == 0


def test_what_the_disk_refuses_is_not_kept(tmp_path):
    tier = RamTier(DiskStore(tmp_path, 10), 1000)
    assert put(tier, A) == 0
    assert tier.ram_bytes == 0 and value(tier, A) is None
    assert tier.put("kv", G, A, {"k": torch.full((1, 1), float("nan"))}, {}) == 0


def test_copies_share_the_disk_and_no_memory(disk):
    tier = RamTier(disk, 1000)
    put(tier, A)
    for other in (copy.deepcopy(tier), pickle.loads(pickle.dumps(tier))):
        assert other.ram_bytes == 0 and value(other, A) == 1.0


def test_wrong_names_and_rows_are_read_errors():
    entry = MemoryEntry({"k": torch.ones(3, 2)}, {})
    with pytest.raises(StoreReadError, match="no tensor 'v'"):
        entry.rows("v", 0, 1)
    with pytest.raises(StoreReadError, match="rows 2:4"):
        entry.rows("k", 2, 4)
