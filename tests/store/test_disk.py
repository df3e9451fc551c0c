import copy
import logging
import math
import os
import pickle
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from vlcache_hf.store import DiskStore, backend
from vlcache_hf.store import disk as disk_module
from vlcache_hf.store import entry as entry_module
from vlcache_hf.store import index as index_module
from vlcache_hf.store import layout as layout_module
from vlcache_hf.store.paths import entry_key, is_full

G, H = "a" * 64, "b" * 64
NAMES = [f"{number:064x}" for number in range(8)]


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch):
    monkeypatch.setattr(backend, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(index_module, "TIMEOUT_S", 0.01)


@pytest.fixture
def store(tmp_path):
    return DiskStore(tmp_path / "store", None)


def tensors(number=0, rows=64):
    return {"k": torch.full((rows, 16), float(number)), "v": torch.full((rows, 16), -float(number)).to(torch.bfloat16)}


def put(store, number, group=G, **kwargs):
    return store.put("kv", group, NAMES[number], tensors(number), {"number": str(number)}, **kwargs)


def read(store, number, group=G):
    entry = store.get("kv", group, NAMES[number])
    if entry is None:
        return None
    assert entry.fields == {"number": str(number)}
    assert torch.equal(entry.tensor("v"), tensors(number)["v"])
    return int(entry.rows("k", 3, 4)[0, 0])


def present(store, group=G):
    return sorted(NAMES.index(name) for name in store.names("kv", group))


def path_of(store, number, group=G):
    return store.cache_dir / entry_key("kv", group, NAMES[number])


def leftovers(store):
    return [path for path in (store.cache_dir / "tmp").iterdir()] if (store.cache_dir / "tmp").exists() else []


def entry_files(store):
    return [path for kind in ("kv", "vit") for path in (store.cache_dir / kind).rglob("*") if path.is_file()]


def lock(store):
    other = sqlite3.connect(store.cache_dir / "index" / "cache.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    return other


def raiser(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_put_get_discard(store):
    assert store.get("kv", G, NAMES[1]) is None
    size = put(store, 1)
    assert size == path_of(store, 1).stat().st_size == store.nbytes()
    assert read(store, 1) == 1
    assert store.get("vit", G, NAMES[1]) is None
    assert store.get("kv", H, NAMES[1]) is None
    store.discard("kv", G, NAMES[1])
    assert (read(store, 1), store.nbytes(), store.faults) == (None, 0, 0)
    assert leftovers(store) == []


def test_nothing_is_touched_before_the_first_use(tmp_path):
    store = DiskStore(tmp_path / "deep" / "store", 100)
    assert store.get("kv", G, NAMES[0]) is None
    assert (store.names("kv", G), store.marked("x"), store.nbytes()) == ([], False, 0)
    store.discard("kv", G, NAMES[0])
    store.clear()
    store.close()
    assert os.listdir(tmp_path) == []
    assert store.faults == 0


def test_malformed_arguments(store):
    for use in (store.get, store.discard, lambda *key: store.put(*key, {}, {})):
        with pytest.raises(ValueError, match="name must be"):
            use("kv", G, "../x")
    with pytest.raises(ValueError, match="group must be"):
        store.names("kv", "x")
    with pytest.raises(ValueError, match="max_disk_bytes"):
        DiskStore("x", -1)


def test_a_put_replaces(store):
    put(store, 1)
    store.put("kv", G, NAMES[1], {"other": torch.ones(3)}, {})
    entry = store.get("kv", G, NAMES[1])
    assert (entry.keys(), entry.fields) == (["other"], {})
    assert store.nbytes() == path_of(store, 1).stat().st_size


@pytest.mark.parametrize("damage", ["empty", "8 bytes", "half", "n - 1", "garbage", "longer", "swapped", "pickle"])
def test_damaged_entries_are_misses_and_go(store, caplog, damage, tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    for number in (0, 1, 2):
        put(store, number)
    data, other = path_of(store, 1).read_bytes(), path_of(store, 0).read_bytes()
    damaged = {
        "empty": b"",
        "8 bytes": data[:8],
        "half": data[: len(data) // 2],
        "n - 1": data[:-1],
        "garbage": bytes(range(256)) * 4,
        "longer": data + b"x",
        "swapped": other,
        "pickle": pickle.dumps(Payload()),
    }[damage]
    for number in (1, 2):
        path_of(store, number).unlink()
        path_of(store, number).write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        assert read(store, 1) is None
        assert read(store, 2) is None
    assert store.faults == 2
    assert [record.name for record in caplog.records] == ["vlcache_hf.store.disk"]
    assert present(store) == [0]
    assert store.nbytes() == path_of(store, 0).stat().st_size
    assert put(store, 1) > 0 and read(store, 1) == 1
    assert not (tmp_path / "boom").exists()


def test_an_older_format_is_a_miss(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(layout_module, "FORMAT", "0")
        put(store, 1)
    assert read(store, 1) is None
    assert present(store) == []


@pytest.mark.parametrize("error", [OSError(24, "EMFILE"), PermissionError(13, "EACCES"), RuntimeError("mmap failed")])
def test_trouble_that_may_pass_discards_nothing(store, monkeypatch, caplog, error):
    put(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(entry_module, "safe_open", raiser(error))
        assert read(store, 1) is None
        assert read(store, 1) is None
    assert (store.faults, len(caplog.records)) == (2, 1)
    assert read(store, 1) == 1


def test_planted_pickles_are_not_run(store, tmp_path, monkeypatch):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    bomb = pickle.dumps(Payload())
    put(store, 1)
    store.mark("mine")
    store.close()
    connection = sqlite3.connect(store.cache_dir / "index" / "cache.db", isolation_level=None)
    key = entry_key("kv", G, NAMES[1])
    connection.execute("UPDATE Cache SET mode = 4, value = ?, filename = NULL WHERE key = ?", (bomb, key))
    connection.execute("UPDATE Cache SET mode = 4, value = ? WHERE key = 'mark:mine'", (bomb,))
    connection.close()
    folder = path_of(store, 1).parent
    for path in (path_of(store, 2), folder / "x.pkl", folder / "x.val", store.cache_dir / "x.pt"):
        path.write_bytes(bomb)
    (store.cache_dir / "index" / "00").mkdir()
    (store.cache_dir / "index" / "00" / "x.val").write_bytes(bomb)
    for function in ("load", "loads"):
        monkeypatch.setattr(pickle, function, raiser(AssertionError("unpickled")))
    assert read(store, 1) == 1
    assert read(store, 2) is None
    assert not store.marked("mine")
    assert put(store, 3) and put(store, 1)
    store.mark("mine")
    assert store.marked("mine")
    store.clear()
    assert not (tmp_path / "boom").exists()
    assert store.faults == 1  # the pickle in place of an entry


def test_the_cap_and_the_order_of_use(tmp_path):
    size = put(DiskStore(tmp_path / "measure", None), 0)
    store = DiskStore(tmp_path / "store", 3 * size)
    for number in range(5):
        assert put(store, number) == size
        assert read(store, 0) == 0
        assert sum(path.stat().st_size for path in entry_files(store)) <= 3 * size
    assert present(store) == [0, 3, 4]
    assert [NAMES.index(name) for name in store.names("kv", G)] == [0, 4, 3]
    assert store.nbytes() == 3 * size
    assert DiskStore(tmp_path / "store", size).put("kv", H, NAMES[0], tensors(), {"number": "0"}) == size
    assert (present(store), present(store, H)) == ([], [0])


def test_what_exceeds_the_cap_is_refused_before_any_work(tmp_path):
    size = put(DiskStore(tmp_path / "measure", None), 0)
    store = DiskStore(tmp_path / "store", size)
    assert store.accepts(size) and not store.accepts(size + 1)
    assert DiskStore(tmp_path, None).accepts(2**50)
    assert not DiskStore(tmp_path, None, read_only=True).accepts(0)
    put(store, 0)
    assert store.put("kv", G, NAMES[1], tensors(1, rows=65), {}) == 0
    assert read(store, 0) == 0
    tight = DiskStore(tmp_path / "tight", size - 1)
    assert (put(tight, 0), tight.cache_dir.exists(), tight.faults) == (0, False, 0)


def test_an_entry_larger_than_the_cap_is_warned_of_once_with_both_sizes(tmp_path, caplog):
    store = DiskStore(tmp_path / "store", 1000)
    for nbytes in (1001, 2000):
        assert not store.accepts(nbytes)
    assert put(store, 0) == 0
    (record,) = caplog.records
    for part in ("1,001 bytes", "(1,000)", "max_disk_bytes", "VLCACHE_MAX_DISK_BYTES"):
        assert part in record.getMessage()
    assert not DiskStore(tmp_path, 0).accepts(1) and not DiskStore(tmp_path, 10, read_only=True).accepts(11)
    assert (len(caplog.records), store.faults) == (1, 0)


def test_what_is_asked_for_now_and_then_survives_a_stream(tmp_path):
    def tiny_put(name):
        return store.put("kv", G, f"{name:064x}", {"k": torch.full((4,), float(name))}, {})

    size = DiskStore(tmp_path / "measure", None).put("kv", G, f"{0:064x}", {"k": torch.zeros(4)}, {})
    store = DiskStore(tmp_path / "store", 30 * size)
    hot = range(10)
    for name in hot:
        assert tiny_put(name) == size and store.get("kv", G, f"{name:064x}") is not None
    for name in range(10, 2010):
        assert tiny_put(name) == size
        if name % 20 == 0:
            wanted = name // 20 % 10
            assert store.get("kv", G, f"{wanted:064x}").tensor("k")[0] == wanted
    left = sorted(int(name, 16) for name in store.names("kv", G))
    assert left == [*hot, *range(1990, 2010)]
    assert store.nbytes() == 30 * size


def test_max_in_group_keeps_the_most_recently_used(store):
    put(store, 0, group=H)
    for number in range(4):
        put(store, number, max_in_group=3)
        assert read(store, 0) == 0
    assert present(store) == [0, 2, 3]
    put(store, 1, max_in_group=1)
    assert (present(store), present(store, H)) == ([1], [0])
    assert store.nbytes() == sum(path.stat().st_size for path in entry_files(store))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_values_are_not_stored(store, value):
    bad = tensors(1)
    bad["v"][-1, -1] = value
    assert store.put("kv", G, NAMES[1], bad, {}) == 0
    assert (present(store), leftovers(store), store.faults) == ([], [], 0)


ERRORS = [
    OSError(28, "ENOSPC"),
    OSError(122, "EDQUOT"),
    OSError(27, "EFBIG"),
    OSError(30, "EROFS"),
    PermissionError(13),
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", ["write", "utime", "replace"])
def test_a_failed_put_leaves_nothing(store, monkeypatch, caplog, where, error):
    for number in (0, 2, 3):
        put(store, number)
    for left in ([2, 3], [3]) if is_full(error) else ([0, 2, 3], [0, 2, 3]):
        with monkeypatch.context() as patch:
            fail_at(patch, where, error)
            assert put(store, 1) == 0
            assert leftovers(store) == []
            assert present(store) == left
    assert (store.faults, len(caplog.records)) == (2, 1)
    assert put(store, 1) > 0 and read(store, 1) == 1


@pytest.mark.parametrize("error", [error for error in ERRORS if is_full(error)])
@pytest.mark.parametrize("where", ["_finite", "publish"])
def test_a_full_disk_is_emptied_by_one_entry_and_tried_again_once(store, monkeypatch, caplog, where, error):
    for number in range(4):
        put(store, number)
    assert read(store, 0) == 0  # not the one to go
    owner = layout_module if where == "_finite" else index_module.Index
    real, failed = getattr(owner, where), []

    def full(*args):
        if not failed:
            failed.append(leftovers(store))
            raise error
        return real(*args)

    monkeypatch.setattr(owner, where, full)
    assert put(store, 4) > 0 and read(store, 4) == 4
    assert len(failed[0]) == 1 and leftovers(store) == []
    assert present(store) == [0, 2, 3, 4]
    assert (store.faults, caplog.records) == (0, [])
    assert store.nbytes() == sum(path.stat().st_size for path in entry_files(store))


def test_a_full_disk_of_the_index_is_emptied_too(store, monkeypatch):
    for number in range(3):
        put(store, number)
    real, failed = backend.EntryCache.set, []

    def full(*args, **kwargs):
        if not failed:
            failed.append(args)
            raise sqlite3.OperationalError("database or disk is full")
        return real(*args, **kwargs)

    monkeypatch.setattr(backend.EntryCache, "set", full)
    assert put(store, 3) > 0
    assert (present(store), leftovers(store), store.faults) == ([1, 2, 3], [], 0)


def test_nothing_is_tried_twice_when_nothing_can_go(store, monkeypatch):
    tried = []

    def full(*args):
        tried.append(args)
        raise OSError(28, "ENOSPC")

    monkeypatch.setattr(layout_module, "_finite", full)
    assert put(store, 0) == 0
    assert (len(tried), leftovers(store), store.faults) == (1, [], 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["write", "utime", "replace", "index"])
def test_an_interrupt_leaves_nothing(store, monkeypatch, where, error):
    put(store, 0)
    with monkeypatch.context() as patch:
        fail_at(patch, where, error())
        with pytest.raises(error):
            put(store, 1)
    assert (leftovers(store), present(store)) == ([], [0])
    assert put(store, 1) > 0 and read(store, 1) == 1


def fail_at(patch, where, error):
    if where == "write":  # half of the file is there by then
        real, count = layout_module._finite, []

        def fail_second(chunk):
            count.append(chunk)
            if len(count) >= 2:
                raise error
            return real(chunk)

        patch.setattr(layout_module, "_finite", fail_second)
    elif where == "utime":
        patch.setattr(disk_module.os, "utime", raiser(error))
    elif where == "replace":
        patch.setattr(index_module.os, "replace", raiser(error))
    else:
        patch.setattr(backend.EntryCache, "set", raiser(error))


def test_a_full_disk(store, tmp_path):
    put(store, 0)
    script = """
import resource, signal, sys
import torch
from vlcache_hf.store import DiskStore
store = DiskStore(sys.argv[1], None)
store.mark("open")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
print(store.put("kv", "a" * 64, "f" * 64, {"k": torch.zeros(200_000)}, {}), store.faults)
print(store.put("kv", "a" * 64, "e" * 64, {"k": torch.zeros(100)}, {}) > 0, store.faults)
"""
    assert run(script, store.cache_dir).split() == ["0", "1", "True", "1"]
    assert leftovers(store) == []
    assert len(store.names("kv", G)) == 2


def test_what_cannot_be_stored_does_not_raise(store):
    assert store.put("kv", G, NAMES[0], {"k": torch.ones(2, dtype=torch.complex64)}, {}) == 0
    assert store.put("kv", G, NAMES[0], {"k": "text"}, {}) == 0
    assert store.put("kv", G, NAMES[0], {"k": torch.ones(2)}, {"n": 1}) == 0
    assert (store.faults, present(store)) == (3, [])


def test_a_locked_index_still_serves(store, tmp_path, caplog):
    put(store, 0)
    late = DiskStore(store.cache_dir, None)
    other = lock(store)
    for each in (store, late):
        assert read(each, 0) == 0
        assert each.faults == 0
        assert each.names("kv", G) == [NAMES[0]]
        assert put(each, 1) == 0
        assert put(each, 1) == 0
        assert not each.marked("x")
        each.mark("x")
        assert each.nbytes() == path_of(store, 0).stat().st_size
        assert each.faults == 2
    assert len(caplog.records) == 2
    store.discard("kv", G, NAMES[0])
    assert read(store, 0) is None
    assert leftovers(store) == []
    other.close()
    assert put(store, 1) and put(late, 2)
    assert present(store) == [1, 2]
    # what was discarded meanwhile counts until somebody opens the index, as `late` just did
    assert store.nbytes() == sum(path.stat().st_size for path in entry_files(store))


@pytest.mark.parametrize("content", [b"", b"garbage" * 1000])
def test_a_broken_or_missing_index_still_serves(store, content):
    put(store, 0)
    store.close()
    database = store.cache_dir / "index" / "cache.db"
    database.write_bytes(content)
    store = DiskStore(store.cache_dir, None)
    assert read(store, 0) == 0
    assert put(store, 1) > 0
    assert store.nbytes() == sum(path.stat().st_size for path in entry_files(store))
    assert store.faults == (1 if content else 0)
    store.close()
    database.unlink()
    assert read(store, 0) == 0
    assert store.nbytes() == sum(path.stat().st_size for path in entry_files(store))


def test_read_only_serves_and_changes_nothing(store):
    put(store, 0)
    put(store, 1)
    store.mark("x")
    store.close()
    bad = path_of(store, 1)
    bad.write_bytes(b"bad")

    def state():
        return sorted((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in store.cache_dir.rglob("*"))

    before = state()
    reader = DiskStore(store.cache_dir, 10, read_only=True)
    assert (read(reader, 0), read(reader, 1), put(reader, 2)) == (0, None, 0)
    reader.mark("y")
    reader.discard("kv", G, NAMES[0])
    reader.clear()
    assert (reader.marked("x"), reader.nbytes(), present(reader)) == (
        False,
        path_of(store, 0).stat().st_size + 3,
        [0, 1],
    )
    assert state() == before


@pytest.mark.skipif(os.name == "nt" or not hasattr(os, "geteuid"), reason="needs POSIX permissions")
def test_a_folder_that_cannot_be_written():
    # not below pytest's folders, which only their owner may enter
    folder = Path(tempfile.mkdtemp(prefix="vlcache-test-"))
    folder.chmod(0o755)
    try:
        check_unwritable(DiskStore(folder / "cache", None))
    finally:
        shutil.rmtree(folder)


def check_unwritable(store):
    put(store, 0)
    store.close()
    script = """
import os, sys
import torch
from vlcache_hf.store import DiskStore
if os.geteuid() == 0:  # permissions do not stop root
    os.setgid(65534); os.setuid(65534)
for where in sys.argv[1:]:
    store = DiskStore(where, None)
    entry = store.get("kv", "a" * 64, "0" * 64)
    print(entry and int(entry.tensor("k").sum()), store.put("kv", "a" * 64, "f" * 64, {"k": torch.zeros(9)}, {}))
    store.mark("x")
    print(store.marked("x"), store.nbytes() > 0, store.faults > 0)
"""
    inside = [*store.cache_dir.rglob("*"), store.cache_dir]
    try:
        for path in inside:
            os.chmod(path, 0o555 if path.is_dir() else 0o444)
        out = run(script, store.cache_dir, "/proc/none", "/nonexistent/x", store.cache_dir / "index" / "cache.db")
    finally:
        for path in reversed(inside):
            os.chmod(path, 0o700)
    none = "None 0\nFalse False True\n"
    assert out == "0 0\nFalse True True\n" + 3 * none
    assert present(store) == [0]


def test_permissions_do_not_depend_on_the_umask(tmp_path):
    store = DiskStore(tmp_path / "store", None)
    before = os.umask(0)
    try:
        put(store, 0)
        store.mark("x")
    finally:
        os.umask(before)
    for path in [store.cache_dir, *store.cache_dir.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_names_of_files(store):
    put(store, 0)
    store.put("vit", G, NAMES[0], tensors(), {})
    for path in store.cache_dir.rglob("*"):
        below = path.relative_to(store.cache_dir).as_posix()
        assert len(below) < 150
        assert set(below) <= set("0123456789abcdefghijklmnopqrstuvwxyz._-/")


@pytest.mark.parametrize("name", ["with space", "ünïcödé-图", "dot.", "$VLCACHE_TEST/x", "quote'\"%"])
def test_odd_names_of_the_folder(tmp_path, monkeypatch, name):
    monkeypatch.setenv("VLCACHE_TEST", str(tmp_path / "expanded"))
    store = DiskStore(tmp_path / name if "$" not in name else name, None)
    put(store, 0)
    store.mark("x")
    assert (read(store, 0), store.marked("x"), store.faults) == (0, True, 0)
    assert sorted(os.listdir(store.cache_dir)) == ["index", "kv", "tmp"]


def test_copies_are_stores_on_the_same_folder(store):
    put(store, 0)
    for other in (copy.deepcopy(store), pickle.loads(pickle.dumps(store)), copy.copy(store)):
        assert (other.cache_dir, other.max_disk_bytes, other.read_only) == (store.cache_dir, None, False)
        assert read(other, 0) == 0
        assert put(other, 1) > 0
    assert read(store, 1) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork(store):
    put(store, 0)
    child = os.fork()
    if child == 0:
        good = read(store, 0) == 0 and put(store, 1) > 0 and store.faults == 0
        os._exit(0 if good else 1)
    assert put(store, 2) > 0
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [read(store, number) for number in (0, 1, 2)] == [0, 1, 2]
    assert store.nbytes() == sum(path.stat().st_size for path in entry_files(store))


def test_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "TIMEOUT_S", 60)
    size = put(DiskStore(tmp_path / "measure", None), 0)
    store = DiskStore(tmp_path / "store", 4 * size)
    wrong = []

    def work(seed):
        for step in range(40):
            number = (seed * 3 + step) % len(NAMES)
            put(store, number)
            if read(store, number) not in (number, None):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, store.faults, leftovers(store)) == ([], 0, [])
    assert store.nbytes() == sum(path.stat().st_size for path in entry_files(store)) <= 4 * size


def test_marks(store):
    assert not store.marked("x")
    store.mark("x")
    store.mark("x")
    assert store.marked("x") and DiskStore(store.cache_dir, 10).marked("x") and not store.marked("y")


def test_clear_leaves_foreign_files(store):
    put(store, 0)
    store.mark("x")
    foreign = store.cache_dir / "kv" / "readme.txt"
    foreign.write_text("mine")
    store.clear()
    assert (entry_files(store), store.nbytes(), store.marked("x")) == ([foreign], 0, False)


WORKER = """
import sys
import torch
from vlcache_hf.store import DiskStore
from vlcache_hf.store import backend, index
backend.TIMEOUT_S = index.TIMEOUT_S = 60
store = DiskStore(sys.argv[1], int(sys.argv[2]))
first = int(sys.argv[3])
wrong = stored = 0
for number in [*range(first, first + 20), *range(first, first + 20)]:
    name = f"{number % 24:064x}"
    entry = store.get("kv", "a" * 64, name)
    if entry is None:
        stored += store.put("kv", "a" * 64, name, {"k": torch.full((64, 16), float(number % 24))}, {}) > 0
    else:
        wrong += not bool((entry.tensor("k") == number % 24).all())
print(wrong, stored > 0, store.faults)
"""


def run(script, *args, **kwargs):
    process = start(script, *args, **kwargs)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def start(script, *args, cwd=None, seed="0"):
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(disk_module.__file__).parents[2]),
        "PYTHONHASHSEED": seed,
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.slow
def test_processes_share_entries_and_the_cap(tmp_path):
    size = DiskStore(tmp_path / "measure", None).put("kv", G, H, {"k": torch.ones(64, 16)}, {})
    folder = tmp_path / "store"
    processes = []
    for number in range(4):  # all start cold on one folder
        cwd = tmp_path / f"cwd{number}"
        cwd.mkdir()
        processes.append(start(WORKER, folder, 10 * size, number * 3, cwd=cwd, seed=str(number)))
    for process in processes:
        out, err = process.communicate()
        assert out.split() == ["0", "True", "0"], err
    store = DiskStore(folder, 10 * size)
    assert leftovers(store) == []
    assert store.nbytes() == sum(path.stat().st_size for path in entry_files(store)) == 10 * size
    assert all(store.get("kv", G, name) is not None for name in store.names("kv", G))


def test_another_process_finds_what_this_one_stored(store, tmp_path):
    put(store, 3)
    store.mark("x")
    script = """
import sys
from vlcache_hf.store import DiskStore
store = DiskStore(sys.argv[1], None)
print(int(store.get("kv", "a" * 64, f"{3:064x}").tensor("k")[0, 0]), store.marked("x"))
"""
    assert run(script, store.cache_dir, cwd="/", seed="77").split() == ["3", "True"]


KILLED = """
import os, signal, sys
import torch
from vlcache_hf.store import DiskStore, layout
layout._finite = lambda chunk: os.kill(os.getpid(), signal.SIGKILL)
DiskStore(sys.argv[1], None).put("kv", "a" * 64, "f" * 64, {"k": torch.ones(1000)}, {})
"""


def test_a_killed_writer_leaves_only_what_is_reclaimed_soon(store, caplog):
    size = put(store, 0)
    process = start(KILLED, store.cache_dir)
    process.communicate()
    assert process.returncode == -9
    (orphan,) = leftovers(store)
    assert (store.names("kv", G), store.nbytes()) == ([NAMES[0]], size)
    with open(orphan, "ab") as file:
        file.truncate(size)
    small = DiskStore(store.cache_dir, size)
    for faults in (1, 2):
        assert put(small, 1) == 0  # so young, it could be one that its writer is about to lock
        assert (small.faults, read(small, 0)) == (faults, 0)
    (record,) = caplog.records
    assert "killed writers" in record.getMessage() and "a minute old" in record.getMessage()
    two_minutes_ago = time.time() - 120
    os.utime(orphan, (two_minutes_ago, two_minutes_ago))
    assert put(small, 1) == size
    assert (leftovers(small), present(small), small.nbytes()) == ([], [1], size)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_locks_that_other_threads_hold_are_free_in_a_child(store):
    put(store, 0)
    held, done = threading.Event(), threading.Event()

    def hold():
        with store._verified._lock, store._troubles._lock:
            held.set()
            assert done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        path_of(store, 1).write_bytes(b"bad")
        good = read(store, 0) == 0 and read(store, 1) is None and store.faults == 1
        os._exit(0 if good else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done.set()
    thread.join()
    assert code == 0
    assert (read(store, 0), store.faults) == (0, 0)


def test_import_touches_no_disk(tmp_path):
    script = "import os, vlcache_hf.store; print(os.listdir())"
    assert run(script, cwd=tmp_path) == "[]\n"
