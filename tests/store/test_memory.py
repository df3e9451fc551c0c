from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import subprocess
import sys
import threading

import pytest
import torch

from streams import pinning
from vlcache_hf.store import DiskStore, MemoryEntry, RamTier, StoreReadError
from vlcache_hf.store.layer import TierOver

G, A, B, C, D, E, F = ("a" * 64, *(str(number) * 64 for number in range(1, 7)))
ENTRY = 40  # bytes


class Nothing(TierOver):
    """Says that it has stored, and has nothing."""

    def __init__(self, below):
        super().__init__(below, 0)

    def get(self, *key):
        return None

    def put(self, *args):
        return 1

    def touch(self, *key):
        pass


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
    assert value(tier, A) == 1.0
    tier.flush()
    assert tier.ram_bytes == 0
    assert value(tier, A) == 1.0
    tier.flush()
    assert tier.ram_bytes == ENTRY
    for file in disk.cache_dir.rglob("*.safetensors"):
        file.unlink()
    assert value(tier, A) == 1.0
    assert value(disk, A) is None


@pytest.mark.parametrize("works", [True, False])
def test_copies_are_pinned_for_cuda_unless_locked_memory_is_short(disk, monkeypatch, works):
    put(disk, A, 3.0)
    tier = RamTier(disk, 1000)
    assert value(tier, A) == 3.0
    asked = pinning(monkeypatch, works)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert value(tier, A) == 3.0
    tier.flush()
    assert tier.ram_bytes == ENTRY
    assert asked == [(5, 2)]
    assert value(tier, A) == 3.0 and len(asked) == 1


class Slow(DiskStore):
    """Entries whose copies wait for a gate."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gate, self.asked = threading.Semaphore(0), threading.Semaphore(0)

    def get(self, *key):
        entry = super().get(*key)
        return None if entry is None else Gated(entry, self)


class Gated(MemoryEntry):
    def __init__(self, entry, store):
        super().__init__({name: entry.rows(name, 0, entry.shape(name)[0]) for name in entry.keys()}, entry.fields)
        self.store = store

    def rows(self, name, start, stop):
        if threading.current_thread() is not threading.main_thread():
            self.store.asked.release()
            assert self.store.gate.acquire(timeout=60)
        return super().rows(name, start, stop)


def test_nobody_waits_for_a_copy(tmp_path):
    disk = Slow(tmp_path, None)
    put(disk, A)
    tier = RamTier(disk, 1000)
    for _ in range(4):
        assert value(tier, A) == 1.0 and tier.ram_bytes == 0
    disk.gate.release()
    tier.flush()
    assert tier.ram_bytes == ENTRY
    assert not disk.gate.acquire(blocking=False)  # once is enough


@pytest.mark.parametrize("change", ["put", "discard", "clear"])
def test_a_copy_of_what_is_gone_is_not_kept(tmp_path, change):
    disk = Slow(tmp_path, None)
    put(disk, A)
    tier = RamTier(disk, 1000)
    assert value(tier, A) == value(tier, A) == 1.0
    assert disk.asked.acquire(timeout=60)
    if change == "put":
        put(tier, A, 2.0)
    elif change == "discard":
        tier.discard("kv", G, A)
    else:
        tier.clear()
    disk.gate.release(5)
    tier.flush()
    assert value(tier, A) == (2.0 if change == "put" else None)
    assert tier.ram_bytes == (ENTRY if change == "put" else 0)


@pytest.mark.parametrize(
    "fails, error",
    [("vlcache_hf.store.memory.in_memory", "not enough memory"), ("threading.Thread.start", "can't start new thread")],
)
def test_a_copy_that_fails_is_no_trouble(disk, monkeypatch, fails, error):
    put(disk, A)
    tier = RamTier(disk, 1000)

    def fail(*args):
        raise RuntimeError(error)

    with monkeypatch.context() as patch:
        patch.setattr(fails, fail)
        for _ in range(3):
            assert value(tier, A) == 1.0
            tier.flush()
    assert tier.ram_bytes == 0
    assert value(tier, A) == 1.0
    tier.flush()
    assert tier.ram_bytes == ENTRY


EXIT = """
import sys, time, torch
from vlcache_hf.store import MemoryEntry, RamTier

class Slow(MemoryEntry):
    def rows(self, *args):
        time.sleep(0.05)
        print("copied", flush=True)
        return super().rows(*args)

class Below:
    def get(self, *key):
        return Slow({"k": torch.ones(5, 2)}, {})

tier = RamTier(Below(), 10000)
for number in range(40):
    for _ in range(2):
        tier.get("kv", "a" * 64, f"{number:064x}")
"""


def test_the_exit_does_not_wait_for_what_nobody_will_use():
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", EXIT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.count("copied") < 40


def test_what_takes_no_bytes_is_left_to_the_tier_below(disk):
    tier = RamTier(disk, 1000)
    assert tier.put("src", G, A, {}, {"grid": "1"}) > 0
    for _ in range(3):
        assert tier.get("src", G, A).fields["grid"] == "1"
        tier.flush()
    assert not tier._probation and not tier._protected


def test_rows_in_memory_are_always_ready():
    assert MemoryEntry({"k": torch.ones(3, 2)}, {}).ready("k", 0, 3)


def test_the_least_recently_used_entry_goes_first(disk):
    tier = RamTier(disk, 2 * ENTRY)
    put(tier, A, 1.0)
    put(tier, B, 2.0)
    assert value(tier, A) == 1.0
    put(tier, C, 3.0)
    assert tier.ram_bytes == 2 * ENTRY
    disk.clear()
    assert [value(tier, name) for name in (A, B, C)] == [1.0, None, 3.0]


def test_what_is_asked_for_now_and_then_survives_a_stream(disk):
    now = [0.0]
    tier = RamTier(Nothing(disk), 30 * ENTRY, clock=lambda: now[0])
    hot = [f"{number:064x}" for number in range(10)]
    for name in hot:
        put(tier, name)
        assert value(tier, name) == 1.0
    for number in range(10, 2010):
        now[0] += 1
        put(tier, f"{number:064x}")
        if number % 20 == 0:
            assert value(tier, hot[number // 20 % 10]) == 1.0
    assert tier.ram_bytes == 30 * ENTRY
    assert [value(tier, name) for name in hot] == [1.0] * 10
    assert [value(tier, f"{number:064x}") for number in (1989, 1990)] == [None, 1.0]


def test_a_new_working_set_takes_the_place_of_one_from_yesterday(disk):
    now = [0.0]
    tier = RamTier(Nothing(disk), 3 * ENTRY, clock=lambda: now[0])
    for name in (A, B, C):
        put(tier, name)
        assert value(tier, name) == 1.0
    put(tier, D)  # there is always room for a new one
    assert [value(tier, name) for name in (A, B)] == [None, 1.0]
    now[0] = 24 * 3600 - 1.0
    put(tier, E)
    assert [value(tier, name) for name in (B, C, D, E)] == [1.0, 1.0, None, 1.0]
    now[0] *= 3
    for name in (A, E, F):
        put(tier, name)
    assert [value(tier, name) for name in (A, B, C, D, E, F)] == [1.0, None, None, None, 1.0, 1.0]


def test_a_large_new_entry_gets_in_whatever_is_protected(disk):
    tier = RamTier(Nothing(disk), 2 * ENTRY)
    for name in (A, B):
        put(tier, name)
        assert value(tier, name) == 1.0
    assert tier.put("kv", G, C, {"k": torch.full((10, 2), 3.0)}, {})
    assert [value(tier, name) for name in (A, B, C)] == [None, None, 3.0]
    assert tier.ram_bytes == 2 * ENTRY


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("busy", [False, True])
def test_a_child_starts_with_what_is_whole(disk, busy):
    tier = RamTier(disk, 1000)
    put(tier, A)
    held, done = threading.Event(), threading.Event()

    def hold():
        with tier._lock if busy else contextlib.nullcontext():
            held.set()
            assert done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        good = tier.ram_bytes == (0 if busy else ENTRY) and value(tier, A) == 1.0
        put(tier, B)
        os._exit(0 if good and value(tier, B) == 1.0 else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done.set()
    thread.join()
    assert code == 0
    assert tier.ram_bytes == ENTRY and value(tier, A) == 1.0


class Unsaid:
    """A lock that a waiter has just been given: it is taken, and does not know so yet."""

    def locked(self):
        return False

    def __enter__(self):
        threading.Event().wait()

    def __exit__(self, *args):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_does_not_wait_for_a_thread_that_just_came_through(disk):
    tier = RamTier(disk, 1000)
    put(tier, A)
    lock, tier._lock = tier._lock, Unsaid()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if value(tier, A) == 1.0 and tier.ram_bytes == ENTRY else 1)
    tier._lock = lock
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
