from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from vlcache_hf.store import DiskStore, WriteBehind

G, A, B, C = "a" * 64, "1" * 64, "2" * 64, "3" * 64
ENTRY = 40  # bytes


class Gated(DiskStore):
    """A store whose writes wait for a gate."""

    gate: threading.Event
    started: threading.Event

    def put(self, *args, **kwargs):
        self.started.set()
        assert self.gate.wait(30)
        return super().put(*args, **kwargs)


@pytest.fixture
def disk(tmp_path):
    store = Gated(tmp_path, None)
    store.gate, store.started = threading.Event(), threading.Event()
    yield store
    store.gate.set()


def put(store, name, value=1.0, **kwargs):
    return store.put("kv", G, name, {"k": torch.full((5, 2), value)}, {}, **kwargs)


def value(store, name):
    entry = store.get("kv", G, name)
    return None if entry is None else float(entry.rows("k", 0, 5)[0, 0])


def test_put_returns_before_anything_is_written_and_reads_see_it(disk):
    store = WriteBehind(disk, 1000)
    assert put(store, A) == ENTRY
    assert disk.started.wait(30)
    assert value(store, A) == 1.0 and store.names("kv", G) == [A]
    assert DiskStore(disk.cache_dir, None).get("kv", G, A) is None
    disk.gate.set()
    store.flush()
    assert value(disk, A) == value(store, A) == 1.0
    assert store.names("kv", G) == [A]


def test_a_full_queue_accepts_nothing_and_counts(disk):
    store = WriteBehind(disk, 2 * ENTRY)
    assert store.accepts(ENTRY) and put(store, A) == ENTRY
    assert store.accepts(ENTRY) and put(store, B) == ENTRY
    assert not store.accepts(ENTRY)
    assert store.dropped == 1
    disk.gate.set()
    store.flush()
    assert [value(disk, name) for name in (A, B)] == [1.0, 1.0]
    assert store.accepts(ENTRY) and put(store, C) == ENTRY and store.dropped == 1


def test_what_was_accepted_is_taken_however_large(disk):
    store = WriteBehind(disk, 1)
    assert store.accepts(ENTRY) and store.accepts(ENTRY)
    assert put(store, A) == put(store, B) == ENTRY
    assert not store.accepts(ENTRY)
    disk.gate.set()
    store.flush()
    assert [value(disk, name) for name in (A, B)] == [1.0, 1.0]


def test_without_a_thread_nothing_is_stored(disk, monkeypatch):
    store = WriteBehind(disk, 1000)

    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert put(store, A) == 0 and store.dropped == 1 and value(store, A) is None
        store.flush()
    disk.gate.set()
    assert put(store, A) == ENTRY
    store.flush()
    assert value(disk, A) == 1.0


def test_discard_reaches_what_is_being_written(disk):
    store = WriteBehind(disk, 1000)
    put(store, A)
    put(store, B)
    assert disk.started.wait(30)
    store.discard("kv", G, A)
    store.discard("kv", G, B)
    assert value(store, A) is None and store.names("kv", G) == []
    disk.gate.set()
    store.flush()
    store.close()
    assert [value(disk, name) for name in (A, B)] == [None, None]


def test_the_last_of_two_puts_wins(disk):
    store = WriteBehind(disk, 1000)
    put(store, A, 1.0)
    assert disk.started.wait(30)
    put(store, A, 2.0)
    assert value(store, A) == 2.0
    disk.gate.set()
    store.flush()
    assert value(disk, A) == 2.0


def test_what_the_disk_cannot_take_is_refused_at_once(tmp_path):
    store = WriteBehind(DiskStore(tmp_path, 10), 1000)
    assert put(store, A) == 0 and not store.accepts(11)


def test_contexts_per_image_hold_behind_too(disk):
    disk.gate.set()
    store = WriteBehind(disk, 1000)
    for name in (A, B, C):
        put(store, name, max_in_group=2)
    store.flush()
    assert disk.names("kv", G) == [C, B]


def test_clear_leaves_nothing_and_copies_start_empty(disk):
    store = WriteBehind(disk, 1000)
    put(store, A)
    other = copy.deepcopy(store)
    assert value(other, A) is None
    disk.gate.set()
    store.clear()
    assert value(store, A) is None and store.nbytes() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_is_not_stopped_by_what_another_thread_was_doing(disk):
    store = WriteBehind(disk, 1000)
    put(store, A)
    assert disk.started.wait(30)
    held, done = threading.Event(), threading.Event()

    def hold():
        with store._changed:
            held.set()
            assert done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        disk.gate.set()
        empty = value(store, A) is None
        put(store, B)
        store.flush()
        os._exit(0 if empty and value(disk, B) == 1.0 else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done.set()
    thread.join()
    disk.gate.set()
    store.flush()
    assert code == 0
    assert sorted(disk.names("kv", G)) == [A, B]


SCRIPT = """
import os, sys, torch
from vlcache_hf.store import DiskStore, WriteBehind
store = WriteBehind(DiskStore(sys.argv[1], None), 10**9)
store.put("kv", "a" * 64, "1" * 64, {"k": torch.ones(1000, 1000)}, {})
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        found = store.get("kv", "a" * 64, "1" * 64)
        store.put("kv", "a" * 64, "2" * 64, {"k": torch.ones(5, 2)}, {})
        store.flush()
        os._exit(0)
    print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("how", ["exit", "fork"])
def test_the_queue_is_written_at_exit_and_a_fork_does_not_hang(tmp_path, how):
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), how],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    names = ["1" * 64] if how == "exit" else ["1" * 64, "2" * 64]
    assert sorted(DiskStore(tmp_path, None).names("kv", "a" * 64)) == names
    if how == "fork":
        assert done.stdout.split() == ["0"]
