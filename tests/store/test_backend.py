import os
import pickle
import sqlite3

import diskcache
import pytest

from vlcache_hf.store import backend
from vlcache_hf.store.backend import SETTINGS, EntryCache, EntryDisk

KEY = f"kv/aa/{'a' * 64}/{'b' * 64}.safetensors"
OTHER = f"kv/aa/{'a' * 64}/{'c' * 64}.safetensors"


class Payload:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def root(tmp_path):
    (tmp_path / KEY).parent.mkdir(parents=True)
    (tmp_path / KEY).write_bytes(b"12345")
    (tmp_path / OTHER).write_bytes(b"123")
    return tmp_path


def open_cache(root):
    return EntryCache(str(root / "index"), timeout=1, disk=EntryDisk, **SETTINGS)


def plant(root, key, mode, value, filename=None, raw=1):
    cache = open_cache(root)
    sql = "INSERT INTO Cache (key, raw, store_time, access_time, size, mode, filename, value) VALUES (?,?,0,0,0,?,?,?)"
    cache._sql(sql, (key, raw, mode, filename, value))
    cache.close()


def test_sizes_are_those_of_the_files_and_removal_removes_them(root):
    cache = open_cache(root)
    cache.set(KEY, None)
    cache.set(OTHER, None)
    assert cache.volume() == 8
    assert cache.delete(KEY)
    assert cache.volume() == 3
    assert not (root / KEY).exists()
    assert (root / OTHER).exists()


def test_only_keys_and_marks_can_be_stored(root):
    cache = open_cache(root)
    for key in (("a", "tuple"), 7, b"bytes", None, "../outside", f"kv/aa/{'a' * 64}/x"):
        with pytest.raises(TypeError):
            cache.set(key, 1)
    with pytest.raises(TypeError):
        cache.push("value")
    with pytest.raises(FileNotFoundError):
        cache.set(KEY.replace("b" * 64, "d" * 64), None)
    assert len(cache) == 0


def test_nothing_pickles_or_unpickles(root, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    bomb = pickle.dumps(Payload(tmp_path / "boom"))
    (root / "index").mkdir()
    (root / "index" / "bomb.val").write_bytes(bomb)
    plant(root, "mark:value", diskcache.core.MODE_PICKLE, sqlite3.Binary(bomb))
    plant(root, "mark:file", diskcache.core.MODE_PICKLE, None, "bomb.val")
    plant(root, sqlite3.Binary(bomb), diskcache.core.MODE_PICKLE, sqlite3.Binary(bomb), raw=0)
    for module_function in ("load", "loads", "dump", "dumps"):
        monkeypatch.setattr(diskcache.core.pickle, module_function, refuse)
    cache = open_cache(root)
    assert cache.get("mark:value") is None
    assert cache.get("mark:file") is None
    assert cache.pop("mark:value") is None
    with pytest.raises(OSError, match="not a key"):
        list(cache)
    with pytest.raises(OSError, match="not a key"):
        list(cache.iterkeys())
    cache.set("mark:mine", Payload(tmp_path / "boom"))  # stored as a flag, not as itself
    assert cache.get("mark:mine") == 1
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("mode", [diskcache.core.MODE_BINARY, diskcache.core.MODE_TEXT, diskcache.core.MODE_RAW])
def test_values_in_files_are_not_read(root, mode):
    (root / "index").mkdir()
    (root / "index" / "some.val").write_bytes(b"text")
    plant(root, "mark:x", mode, None, "some.val")
    assert open_cache(root).get("mark:x") is None


@pytest.mark.parametrize("filename", ["../precious", "/{root}/precious", "../kv/aa/../../precious", "precious"])
def test_no_planted_path_is_removed(root, filename):
    filename = filename.format(root=root)
    (root / "index").mkdir()
    for folder in (root, root / "index"):
        (folder / "precious").write_bytes(b"x")
    plant(root, "mark:x", diskcache.core.MODE_RAW, 1, filename)
    plant(root, "mark:y", diskcache.core.MODE_RAW, 1, sqlite3.Binary(b"bytes"))
    cache = open_cache(root)
    assert cache.delete("mark:x")
    cache.clear()
    assert (root / "precious").exists() and (root / "index" / "precious").exists()
    assert len(cache) == 0


def test_planted_settings_are_not_used(root):
    cache = open_cache(root)
    planted = {
        "sqlite_journal_mode": "wal",
        "sqlite_writable_schema": 1,
        "sqlite_user_version = 77; --": 1,
        "disk_remove": "x",
        "disk_min_file_size": 0,
        "volume": 7,
        "cull_limit": 10,
        "eviction_policy": "none",
    }
    cache._sql(
        "INSERT OR REPLACE INTO Settings VALUES " + ",".join(["(?, ?)"] * len(planted)), sum(planted.items(), ())
    )
    cache.close()
    cache = open_cache(root)
    cache.set(KEY, None)
    assert cache.volume() == 5
    assert cache.cull_limit == 0
    assert cache.eviction_policy == "least-recently-used"
    pragmas = [
        cache._sql(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "writable_schema", "user_version")
    ]
    assert pragmas == ["truncate", 0, 0]
    cache.delete(KEY)
    assert not (root / KEY).exists()


def test_a_locked_database_does_not_block_for_a_minute(root, monkeypatch):
    monkeypatch.setattr(backend, "TIMEOUT_S", 0.01)
    open_cache(root).close()
    waits = []
    monkeypatch.setattr(diskcache.core.time, "sleep", waits.append)
    other = sqlite3.connect(root / "index" / "cache.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        open_cache(root)
    assert waits == []  # diskcache's own loop, 60 seconds long
    other.close()


def test_a_row_goes_with_its_file_and_no_other(root):
    cache = open_cache(root)
    for key, used in ((KEY, 5.0), (OTHER, 6.0)):
        cache.add(key, used)
    rows = dict(cache._sql("SELECT key, rowid FROM Cache").fetchall())
    cache.protect(rows[OTHER], 7.0)
    assert cache._sql("SELECT key, access_count, access_time FROM Cache ORDER BY rowid").fetchall() == [
        (KEY, 0, 5.0),
        (OTHER, 1, 7.0),
    ]
    cache.remove(rows[KEY], KEY)
    assert (cache.volume(), (root / KEY).exists(), (root / OTHER).exists()) == (3, False, True)
    with pytest.raises(sqlite3.DatabaseError, match="contradicts"):
        cache.remove(rows[KEY], KEY)
