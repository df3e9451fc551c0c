"""The tiers of the store as they are by default, under a model."""

from __future__ import annotations

import threading

import pytest
import torch

import tiny
from vlcache_hf import VLCache, VLCacheConfig, attach
from vlcache_hf.runtime import open_store
from vlcache_hf.store import DiskStore, RamTier, WriteBehind

INPUTS = tiny.batch(tiny.prompt(tiny.text(1, 4), tiny.image(1), tiny.text(2, 5)))
OTHER = tiny.batch(tiny.prompt(tiny.text(3, 7), tiny.image(1), tiny.text(2, 5)))
TIERS = {"write_behind": True, "max_ram_bytes": 10**8}


def load(tmp_path, **settings):
    return attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "schedule": 0.25, **TIERS, **settings})


def same(model, inputs=INPUTS, **kwargs):
    with torch.no_grad():
        expected, got = (
            which(**tiny.clone(inputs), logits_to_keep=1, **kwargs if which is model else {}).logits
            for which in (tiny.stock("qwen3_vl"), model)
        )
    assert torch.allclose(got, expected, atol=1e-5)
    return tiny.kinds(model)


def test_the_tiers_stack(tmp_path):
    ours = load(tmp_path)
    store = ours.vlcache.store
    assert isinstance(store, RamTier) and isinstance(store.below, WriteBehind)
    assert isinstance(store.below.below, DiskStore)
    plain = load(tmp_path, write_behind=False, max_ram_bytes=0)
    assert isinstance(open_store(plain.vlcache.config), DiskStore)


@pytest.mark.parametrize("ram, queue", [(0, 256 << 20), (10**8, 256 << 20), (10**9, 10**9)])
def test_more_than_one_entry_may_wait_whatever_is_kept_in_memory(tmp_path, ram, queue):
    store = open_store(VLCacheConfig(cache_dir=tmp_path, write_behind=True, max_ram_bytes=ram))
    behind = store.below if ram else store
    assert isinstance(behind, WriteBehind) and behind.max_bytes == queue


def test_an_image_larger_than_the_queue_is_stored_whole_while_the_disk_is_busy(tmp_path, monkeypatch):
    monkeypatch.setattr("vlcache_hf.runtime.MIN_QUEUE_BYTES", 1)
    ours = load(tmp_path, max_ram_bytes=0)
    put, started, gate = DiskStore.put, threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        started.set()
        assert gate.wait(60)
        return put(*args, **kwargs)

    monkeypatch.setattr(DiskStore, "put", slow)
    assert same(ours) == ["miss"] and started.wait(60)
    gate.set()
    ours.vlcache.flush()
    assert [len(list((tmp_path / kind).rglob("*.safetensors"))) for kind in ("vit", "kv")] == [1, 1]


def test_what_waits_to_be_written_is_a_hit_and_lands_on_disk(tmp_path, monkeypatch):
    ours = load(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "put", lambda *args, **kwargs: 0)  # the disk takes nothing
        assert same(ours) == ["miss"]
        assert same(ours) == ["exact"]
    ours = load(tmp_path)
    assert same(ours) == ["miss"]
    ours.vlcache.flush()
    assert len(list((tmp_path / "kv").rglob("*.safetensors"))) == 1
    assert ours.vlcache.last_request.images[0].stored
    assert same(load(tmp_path)) == ["exact"]


def test_entries_in_memory_do_not_change(tmp_path):
    ours = load(tmp_path)
    for _ in range(3):
        assert same(ours) in (["miss"], ["exact"])
        with torch.no_grad():
            ours(**tiny.clone(OTHER), logits_to_keep=1, cache=VLCache(read_only=True))
    ours.vlcache.flush()
    assert same(ours) == ["exact"]
    assert same(load(tmp_path)) == ["exact"]


def test_third_meetings_and_contexts_per_image_hold(tmp_path):
    ours = load(tmp_path, contexts_per_image=2)
    with torch.no_grad():
        ours(**tiny.clone(INPUTS), logits_to_keep=1)
        ours(**tiny.clone(OTHER), logits_to_keep=1)
    assert tiny.kinds(ours) == ["reused"]
    assert same(ours, OTHER) == ["miss"]
    assert same(ours, OTHER) == ["exact"]
    ours.vlcache.flush()
    assert len(list((tmp_path / "kv").rglob("*.safetensors"))) == 2


def test_clear_empties_every_tier(tmp_path):
    ours = load(tmp_path)
    same(ours)
    ours.vlcache.clear()
    assert same(ours) == ["miss"]


@pytest.mark.parametrize("floor, stored", [(0, True), (2**62, False)])
def test_a_nearly_full_disk_is_left_alone(tmp_path, floor, stored):
    ours = load(tmp_path, min_free_bytes=floor)
    same(ours)
    ours.vlcache.flush()
    assert ours.vlcache.last_request.images[0].stored is stored
    assert bool(list(tmp_path.rglob("*.safetensors"))) is stored
