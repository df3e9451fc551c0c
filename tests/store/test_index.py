import contextlib
import os
import sqlite3
import stat
import time

import pytest

from vlcache_hf.store import backend
from vlcache_hf.store import index as index_module
from vlcache_hf.store.index import CapClosedError, Index, IndexUnavailable
from vlcache_hf.store.paths import entry_key, private_dirs, stamp
from vlcache_hf.store.temporary import temporary_file

KEYS = [entry_key("kv", f"{number:064x}", "f" * 64) for number in range(6)]


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch):
    monkeypatch.setattr(backend, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(index_module, "TIMEOUT_S", 0.01)


@pytest.fixture
def make(tmp_path):
    rebuilds = []

    def index(cap=None):
        made = Index(tmp_path, cap, rebuilds.append)
        made.rebuilds = rebuilds
        return made

    return index


def temporary(root, size=100):
    private_dirs(root, "tmp")
    path = root / "tmp" / f"1-{stamp()}.tmp"
    path.write_bytes(b"x" * size)
    touch(path)
    return path


def touch(path):
    now = stamp()
    os.utime(path, ns=(now, now))


def publish(index, root, key, size=100):
    return index.make_room(size) and index.publish(temporary(root, size), key)


def present(root):
    return [number for number, key in enumerate(KEYS) if (root / key).exists()]


def lock(root):
    other = sqlite3.connect(root / "index" / "cache.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    return other


def test_opens_lazily_and_privately(tmp_path, make):
    before = os.umask(0)
    try:
        index = make()
        assert os.listdir(tmp_path) == []
        assert not index.marked("x")
        assert os.listdir(tmp_path) == []
        index.mark("x")
    finally:
        os.umask(before)
    for file in (tmp_path / "index").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "index").stat().st_mode) == 0o700


def test_the_cap_holds_exactly(tmp_path, make):
    index = make(cap=300)
    for key in KEYS[:3]:
        assert publish(index, tmp_path, key)
    assert present(tmp_path) == [0, 1, 2]
    assert index.nbytes() == 300
    assert publish(index, tmp_path, KEYS[3])
    assert present(tmp_path) == [1, 2, 3]
    assert index.nbytes() == 300


def test_a_large_entry_evicts_as_many_as_it_needs_and_no_more(tmp_path, make):
    index = make(cap=500)
    for key in KEYS[:4]:
        publish(index, tmp_path, key)
    assert publish(index, tmp_path, KEYS[4], 250)
    assert present(tmp_path) == [2, 3, 4]


def test_use_is_read_from_the_file_times(tmp_path, make):
    index = make(cap=300)
    for key in KEYS[:3]:
        publish(index, tmp_path, key)
    touch(tmp_path / KEYS[0])
    publish(index, tmp_path, KEYS[3])
    publish(index, tmp_path, KEYS[4])
    assert present(tmp_path) == [0, 3, 4]


def test_a_time_in_the_future_does_not_hang_or_pin_an_entry(tmp_path, make):
    index = make(cap=100)
    publish(index, tmp_path, KEYS[0])
    os.utime(tmp_path / KEYS[0], (2**33, 2**33))
    assert publish(index, tmp_path, KEYS[1])
    assert present(tmp_path) == [1]


def test_a_replaced_entry_is_counted_once_and_stays(tmp_path, make):
    index = make(cap=300)
    for size in (100, 120, 80):
        assert publish(index, tmp_path, KEYS[0], size)
        assert (tmp_path / KEYS[0]).stat().st_size == index.nbytes() == size


def test_what_cannot_fit_evicts_nothing(tmp_path, make):
    index = make(cap=300)
    publish(index, tmp_path, KEYS[0])
    assert not index.make_room(301)
    with temporary_file(tmp_path) as other:
        with other.open() as file:
            file.write(b"x" * 250)
        os.utime(other.path, (1, 1))  # of a writer that is slow
        assert not index.make_room(60)
        assert present(tmp_path) == [0]
        assert index.make_room(50)
        assert present(tmp_path) == []


def test_orphans_close_the_cap_only_until_they_are_safe_to_remove(tmp_path, make):
    index = make(cap=300)
    publish(index, tmp_path, KEYS[0])
    orphan = temporary(tmp_path, 250)
    for _ in range(2):
        with pytest.raises(CapClosedError, match="250 of 300 bytes"):
            index.make_room(60)
    assert present(tmp_path) == [0] and orphan.exists()
    two_minutes_ago = time.time() - 120
    os.utime(orphan, (two_minutes_ago, two_minutes_ago))
    assert publish(index, tmp_path, KEYS[1])
    assert present(tmp_path) == [0, 1] and not orphan.exists()


def test_room_on_a_full_disk_is_made_although_the_cap_is_far(tmp_path, make):
    index = make(cap=10_000)
    assert not index.evict(100)
    for key in KEYS[:4]:
        publish(index, tmp_path, key)
    touch(tmp_path / KEYS[0])
    assert index.evict(150)
    assert present(tmp_path) == [0, 3]
    assert index.nbytes() == 200


def test_files_removed_behind_its_back_free_their_bytes(tmp_path, make):
    index = make(cap=300)
    for key in KEYS[:3]:
        publish(index, tmp_path, key)
    os.unlink(tmp_path / KEYS[0])
    publish(index, tmp_path, KEYS[3])
    assert present(tmp_path) == [1, 2, 3]
    assert index.nbytes() == 300


def test_a_failed_move_changes_nothing(tmp_path, make, monkeypatch):
    index = make(cap=1000)
    publish(index, tmp_path, KEYS[0], 100)

    def denied(*args):
        raise PermissionError(13, "in use")  # Windows, when a reader maps the old file

    with monkeypatch.context() as patch:
        patch.setattr(index_module.os, "replace", denied)
        with pytest.raises(PermissionError):
            publish(index, tmp_path, KEYS[0], 120)
        with pytest.raises(PermissionError):
            publish(index, tmp_path, KEYS[1], 120)
    assert present(tmp_path) == [0]
    assert index.nbytes() == (tmp_path / KEYS[0]).stat().st_size == 100


@pytest.mark.parametrize(
    "error", [OSError(28, "no space"), KeyboardInterrupt(), SystemExit(), sqlite3.DatabaseError()]
)
def test_an_error_after_the_move_takes_it_back(tmp_path, make, monkeypatch, error):
    index = make()
    publish(index, tmp_path, KEYS[0])

    def fail(*args, **kwargs):
        assert (tmp_path / KEYS[1]).exists()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(backend.EntryCache, "set", fail)
        with pytest.raises(IndexUnavailable if isinstance(error, sqlite3.Error) else type(error)):
            publish(index, tmp_path, KEYS[1])
    assert present(tmp_path) == [0]
    assert publish(index, tmp_path, KEYS[2])
    assert index.nbytes() == 200


def test_a_folder_pruned_by_another_process_is_made_again(tmp_path, make, monkeypatch):
    index = make()
    real, failures = os.replace, []

    def pruned(source, target):
        if not failures and str(target).endswith(KEYS[0]):
            failures.append(target)
            os.rmdir(os.path.dirname(target))
        return real(source, target)

    monkeypatch.setattr(index_module.os, "replace", pruned)
    assert publish(index, tmp_path, KEYS[0])
    assert len(failures) == 1
    assert present(tmp_path) == [0]


def test_a_lock_makes_it_unavailable_until_it_is_released(tmp_path, make):
    index, late = make(cap=300), make(cap=300)
    publish(index, tmp_path, KEYS[0])
    other = lock(tmp_path)
    for each in (index, late):
        for use in (lambda: each.make_room(1), each.nbytes, lambda: each.drop(KEYS[0]), each.clear):
            with pytest.raises(IndexUnavailable):
                use()
    assert present(tmp_path) == [0]
    assert not late.marked("x")  # not even tried again soon after a failure
    late.mark("x")
    other.close()
    for each in (index, late):
        assert each.nbytes() == 100
    assert index.rebuilds == []


def test_a_lock_between_writing_and_publishing_leaves_nothing(tmp_path, make):
    index = make()
    publish(index, tmp_path, KEYS[0])
    file = temporary(tmp_path)
    other = lock(tmp_path)
    with pytest.raises(IndexUnavailable):
        index.publish(file, KEYS[1])
    other.close()
    assert present(tmp_path) == [0]


def garbage(path):
    path.write_bytes(os.urandom(20000))


def cut(path):
    path.write_bytes(path.read_bytes()[:5000])


def zero_pages(path):
    data = bytearray(path.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    path.write_bytes(data)


def later_version(path):
    data = bytearray(path.read_bytes())
    data[18] = 5
    path.write_bytes(data)


def statements(*lines):
    def damage(path):
        connection = sqlite3.connect(path, isolation_level=None)
        for line in lines:
            connection.execute(line)
        connection.close()

    return damage


BROKEN = {
    "garbage": garbage,
    "cut": cut,
    "zero pages": zero_pages,
    "a later version": later_version,  # SQLite would call it read-only for ever
    "another table": statements("DROP TABLE Cache", "CREATE TABLE Cache (key)"),
    "a view": statements("DROP TABLE Cache", "CREATE VIEW Cache AS SELECT 1"),
    "no settings": statements("DROP TABLE Settings"),
}
MISCOUNTED = {
    "no number": statements("UPDATE Settings SET value = 'many' WHERE key = 'size'"),
    "too few": statements("UPDATE Settings SET value = 5 WHERE key = 'size'"),
    "too many": statements("UPDATE Settings SET value = 500 WHERE key = 'size'"),
}


@pytest.mark.parametrize("damage", [*BROKEN, *MISCOUNTED])
def test_a_broken_index_is_rebuilt_at_the_next_start(tmp_path, make, damage):
    index = make(cap=300)
    for key in KEYS[:3]:
        publish(index, tmp_path, key)
    touch(tmp_path / KEYS[0])
    index.close()
    (BROKEN | MISCOUNTED)[damage](tmp_path / "index" / "cache.db")
    assert publish(index, tmp_path, KEYS[3])
    assert len(index.rebuilds) == 1
    assert index.nbytes() == 300
    assert present(tmp_path) == [0, 2, 3]
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize("damage", BROKEN)
def test_an_index_that_breaks_in_use_is_rebuilt(tmp_path, make, damage):
    index = make(cap=300)
    for key in KEYS[:3]:
        publish(index, tmp_path, key)
    BROKEN[damage](tmp_path / "index" / "cache.db")
    for _ in range(2):  # the use that notices may fail, the next one finds it rebuilt
        with contextlib.suppress(IndexUnavailable):
            index.make_room(100)
    assert publish(index, tmp_path, KEYS[3])
    assert index.nbytes() == make(cap=300).nbytes() == 300
    assert 3 in present(tmp_path)


def test_a_removed_index_is_noticed(tmp_path, make):
    one, two = make(cap=300), make(cap=300)
    publish(one, tmp_path, KEYS[0])
    for file in (tmp_path / "index").iterdir():
        file.unlink()
    publish(two, tmp_path, KEYS[1])
    publish(one, tmp_path, KEYS[2])
    assert one.nbytes() == two.nbytes() == 300


def test_files_without_a_row_are_found_at_the_next_start(tmp_path, make):
    index = make(cap=300)
    publish(index, tmp_path, KEYS[0])
    private_dirs(tmp_path, os.path.dirname(KEYS[1]))
    os.replace(temporary(tmp_path), tmp_path / KEYS[1])  # a writer killed before its commit
    assert index.nbytes() == 100
    assert make(cap=300).nbytes() == 200


def test_rows_of_another_mode_are_dropped(tmp_path, make):
    index = make()
    index.mark("mine")
    index.close()
    database = tmp_path / "index" / "cache.db"
    insert = "INSERT INTO Cache (key, raw, access_time, size, mode, value) VALUES (?, ?, 0, 0, ?, x'80')"
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute(insert, ("mark:pickled", 1, 4))
    connection.execute(insert, (b"\x80\x04.", 0, 4))
    connection.close()
    index = make()
    assert not index.marked("pickled")
    assert index.marked("mine")
    connection = sqlite3.connect(database)
    assert connection.execute("SELECT key FROM Cache").fetchall() == [("mark:mine",)]
    connection.close()


def test_orphans_are_reclaimed_and_live_files_are_not(tmp_path, make):
    old, young = temporary(tmp_path), temporary(tmp_path)
    folder = tmp_path / "tmp" / "1-2.index"
    folder.mkdir()
    (folder / "cache.db").write_bytes(b"x")
    for path in (old, folder):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    make().mark("x")
    assert os.listdir(tmp_path / "tmp") == [young.name]


def test_marks(tmp_path, make, monkeypatch):
    index = make(cap=300)
    assert not index.marked("a")
    index.mark("a")
    assert index.marked("a") and not index.marked("b")
    index.close()
    assert make().marked("a")
    assert index.nbytes() == 0
    start = time.time()
    monkeypatch.setattr(time, "time", lambda: start + 31 * 24 * 3600)
    assert not make().marked("a")


def test_marks_are_evicted_with_what_was_in_use_then(tmp_path, make):
    index = make(cap=300)
    index.mark("early")
    for key in KEYS[:3]:
        publish(index, tmp_path, key)
    index.mark("late")
    publish(index, tmp_path, KEYS[3])
    assert (index.marked("early"), index.marked("late")) == (False, True)


def test_clear_and_drop(tmp_path, make):
    index = make()
    for key in KEYS[:3]:
        publish(index, tmp_path, key)
    index.mark("a")
    index.drop(KEYS[0])
    index.drop(KEYS[5])
    assert (present(tmp_path), index.nbytes()) == ([1, 2], 200)
    index.clear()
    assert (present(tmp_path), index.nbytes(), index.marked("a")) == ([], 0, False)
