from __future__ import annotations

import copy
import threading

import pytest
import torch

import tiny
from vlcache_hf import attach
from vlcache_hf.store import (
    DiskStore,
    MemoryEntry,
    RamTier,
    RemoteEntry,
    RemoteStore,
    StoreReadError,
    Tiered,
    WriteBehind,
)
from vlcache_hf.store.remote_keys import PREFIX

pytest.importorskip("redis", reason="redis-py is not installed")

G, A, B, C = "a" * 64, "1" * 64, "2" * 64, "3" * 64
PATIENT = 30.0


class Machine:
    """A directory of its own at a shared server."""

    def __init__(self, folder, server, cap=None, queue_bytes=None, **kwargs):
        self.disk = DiskStore(folder, cap, **kwargs)
        self.remote = RemoteStore(server.url, PATIENT, read_only=self.disk.read_only)
        self.store = Tiered(self.disk, self.remote, queue_bytes)


@pytest.fixture
def machines(tmp_path, server):
    return [Machine(tmp_path / name, server) for name in ("one", "two")]


def put(store, name=A, value=1.0, **kwargs):
    return store.put("kv", G, name, {"k": torch.full((5, 2), value), "v": torch.ones(5, 3)}, {"x": "y"}, **kwargs)


def value(store, name=A):
    entry = store.get("kv", G, name)
    return None if entry is None else float(entry.rows("k", 0, 5)[0, 0])


def test_what_one_machine_stores_another_finds_and_keeps_once_it_has_read_it(machines):
    one, two = machines
    assert put(one.store) > 0
    assert value(one.disk) == value(one.remote) == 1.0
    entry = two.store.get("kv", G, A)
    assert isinstance(entry, RemoteEntry) and entry.fields == {"x": "y"}
    entry.rows("k", 1, 2)
    assert two.disk.get("kv", G, A) is None
    entry.rows("v", 0, 1)
    kept = two.disk.get("kv", G, A)
    assert kept.fields == {"x": "y"} and kept.rows("k", 0, 5).eq(1).all() and kept.shape("v") == (5, 3)
    two.remote.clear()
    assert value(two.store) == 1.0
    assert one.store.faults == two.store.faults == 0


def test_keeping_does_not_make_the_reader_wait(tmp_path, server):
    class Gated(DiskStore):
        gate = threading.Event()

        def put(self, *args, **kwargs):
            assert self.gate.wait(60)
            return super().put(*args, **kwargs)

    put(RemoteStore(server.url, PATIENT))
    store = Tiered(Gated(tmp_path, None), RemoteStore(server.url, PATIENT), 1000)
    entry = store.get("kv", G, A)
    for name in entry.keys():
        entry.rows(name, 0, 5)
    assert isinstance(store.get("kv", G, A), MemoryEntry) and store.names("kv", G) == [A]
    Gated.gate.set()
    store.flush()
    assert value(DiskStore(tmp_path, None)) == 1.0


def test_what_the_disk_cannot_take_is_used_and_not_kept(tmp_path, server):
    put(RemoteStore(server.url, PATIENT))
    for machine in (Machine(tmp_path / "a", server, cap=50), Machine(tmp_path / "b", server, read_only=True)):
        for _ in range(2):
            entry = machine.store.get("kv", G, A)
            assert entry.when_complete is None and [entry.rows(name, 0, 5).sum() for name in "kv"] == [10, 15]
        assert machine.disk.get("kv", G, A) is None
    assert not Machine(tmp_path / "b", server, read_only=True).store.accepts(1)
    small = Machine(tmp_path / "c", server, cap=50)
    assert small.store.accepts(1000) and put(small.store, B) > 0 and value(small.store, B) == 1.0


def test_names_discard_and_contexts_reach_both(machines):
    one, two = machines
    put(one.store, A)
    put(two.store, B)
    assert one.store.names("kv", G) == [A, B] and two.store.names("kv", G) == [B, A]
    put(one.store, C, max_in_group=2)
    assert one.remote.names("kv", G) == [C, B] and one.disk.names("kv", G) == [C, A]
    one.store.discard("kv", G, C)
    assert one.store.get("kv", G, C) is None and two.store.get("kv", G, C) is None
    one.store.mark("x")
    assert one.store.marked("x") and not two.store.marked("x")
    one.store.clear()
    assert one.store.nbytes() == 0 and one.store.names("kv", G) == [] and two.disk.names("kv", G) == [B]


def test_without_the_server_the_disk_serves(start_server, tmp_path):
    server = start_server()
    store = RamTier(WriteBehind(Machine(tmp_path, server).store, 1000), 1000)
    put(store, A)
    store.flush()
    server.kill()
    assert value(store, A) == 1.0 and put(store, B) > 0
    store.flush()
    for number in range(3):
        assert value(store, B) == 1.0 and value(store, C) is None
    other = Machine(tmp_path, server).store
    assert value(other, A) == value(other, B) == 1.0 and other.names("kv", G) == [B, A]


def test_a_server_that_dies_while_an_entry_is_read(start_server, tmp_path):
    server = start_server()
    put(RemoteStore(server.url, PATIENT))
    machine = Machine(tmp_path, server)
    entry = machine.store.get("kv", G, A)
    entry.rows("k", 0, 5)
    server.kill()
    with pytest.raises(StoreReadError):
        entry.rows("v", 0, 5)
    machine.store.discard("kv", G, A)
    assert machine.disk.names("kv", G) == [] and machine.store.faults == 1


def test_copies(machines):
    one, _ = machines
    put(one.store)
    assert value(copy.deepcopy(one.store)) == 1.0


# --- models

INPUTS = tiny.batch(tiny.prompt(tiny.text(1, 4), tiny.image(1), tiny.text(2, 5)))


def model(folder, server, **kwargs):
    settings = {"cache_dir": folder, "schedule": 0.1, "remote": server.url, "remote_timeout_s": PATIENT, **kwargs}
    return attach(tiny.stock("qwen3_vl"), settings)


def vision_calls(ours):
    return ours.vlcache.stats().vision_calls


@pytest.mark.parametrize("tiers", [{}, {"write_behind": True, "max_ram_bytes": 1 << 30}], ids=["plain", "all tiers"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_second_machine_hits_what_the_first_has_computed(tmp_path, server, architecture, tiers):
    expected = tiny.generate(tiny.stock(architecture), INPUTS)
    settings = {"schedule": 0.1, "remote": server.url, "remote_timeout_s": PATIENT, **tiers}
    one, two, three = (
        attach(tiny.stock(architecture), {"cache_dir": tmp_path / name, **settings})
        for name in ("one", "two", "three")
    )
    assert torch.equal(tiny.generate(one, INPUTS), expected) and tiny.kinds(one) == ["miss"]
    one.vlcache.flush()
    for _ in range(2):
        assert torch.equal(tiny.generate(two, INPUTS), expected)
        assert tiny.kinds(two) == ["exact"] and vision_calls(two) == 0
    two.vlcache.flush()
    with server.client() as client:
        client.flushall()  # the KV is on the second machine's disk now
    again = attach(tiny.stock(architecture), {"cache_dir": tmp_path / "two", **settings})
    assert torch.equal(tiny.generate(again, INPUTS), expected) and tiny.kinds(again) == ["exact"]
    assert torch.equal(tiny.generate(three, INPUTS), expected) and tiny.kinds(three) == ["miss"]
    assert all(ours.vlcache.stats().faults == 0 for ours in (one, two, three, again))


def test_namespaces_do_not_share(tmp_path, server):
    one, two = (model(tmp_path / name, server, namespace=name) for name in ("one", "two"))
    tiny.generate(one, INPUTS)
    tiny.generate(two, INPUTS)
    assert tiny.kinds(two) == ["miss"] and vision_calls(two) == 1


def test_a_server_that_is_killed_and_started_again_between_requests(start_server, tmp_path):
    server = start_server()
    expected = tiny.generate(tiny.stock("qwen3_vl"), INPUTS)
    assert torch.equal(tiny.generate(model(tmp_path / "one", server), INPUTS), expected)
    server.kill()
    two = model(tmp_path / "two", server)
    assert torch.equal(tiny.generate(two, INPUTS), expected) and tiny.kinds(two) == ["miss"]
    server.start()
    assert torch.equal(tiny.generate(two, INPUTS), expected) and tiny.kinds(two) == ["exact"]
    assert torch.equal(tiny.generate(model(tmp_path / "three", server), INPUTS), expected)


@pytest.mark.parametrize("field", ["tensors", "meta"])
def test_entries_spoiled_on_the_server_are_computed_anew(tmp_path, server, field):
    expected = tiny.generate(tiny.stock("qwen3_vl"), INPUTS)
    tiny.generate(model(tmp_path / "one", server), INPUTS)
    with server.client() as client:
        for key in client.keys(PREFIX + "*}:" + "[0-9a-f]" * 64):
            for name in client.hkeys(key):
                if field == "meta" or name != b"meta":
                    client.hset(key, name, b"\0" + client.hget(key, name)[1:])
    two = model(tmp_path / "two", server)
    assert torch.equal(tiny.generate(two, INPUTS), expected) and tiny.kinds(two) == ["miss"]
    assert two.vlcache.stats().faults >= 1
    three = model(tmp_path / "three", server)
    assert torch.equal(tiny.generate(three, INPUTS), expected) and tiny.kinds(three) == ["exact"]
