"""diskcache, reduced to what an index may do here: no pickle, no foreign settings, no long waits, no stray paths."""

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import DEFAULT_SETTINGS, ENOVAL, METADATA, MODE_BINARY, MODE_RAW

from .paths import is_entry_key, remove_entry_file

TIMEOUT_S = 1.0
MARK_PREFIX = "mark:"
# What diskcache's column `access_count` says of an entry here: whether it was used again after it was stored.
PROBATION, PROTECTED = 0, 1

# Every setting is given, so that those found in a database are never used.
SETTINGS = {
    **DEFAULT_SETTINGS,
    "eviction_policy": "least-recently-used",
    "size_limit": 2**62,
    "cull_limit": 0,  # diskcache would remove ten rows at a time; the index removes one, and stops in time
    "sqlite_journal_mode": "truncate",  # WAL needs shared memory, which network file systems do not have
    "sqlite_mmap_size": 0,  # a mapped database that someone truncates would kill the process
    "sqlite_synchronous": 0,  # nothing is lost with a database that can be rebuilt
}


class EntryDisk(diskcache.Disk):
    """
    Tells diskcache about entry files that are there already, and removes them for it. It cannot pickle or unpickle,
    and believes no path that it did not derive from a key.
    """

    def __init__(self, directory: str, **settings: Any):
        super().__init__(directory)
        self._root = Path(directory).parent

    def put(self, key: object) -> tuple[str, bool]:
        if not isinstance(key, str):
            raise TypeError(f"keys are strings, got {type(key).__name__}.")
        return key, True

    def get(self, key: object, raw: object) -> str:
        if not raw or not isinstance(key, str):
            raise OSError("not a key of this store")
        return key

    def store(self, value: object, read: bool, key: object = None) -> tuple[int, int, str | None, int | None]:
        if isinstance(key, str) and is_entry_key(key):
            return os.stat(self._root / key).st_size, MODE_BINARY, key, None
        if isinstance(key, str) and key.startswith(MARK_PREFIX):
            return 0, MODE_RAW, None, 1
        raise TypeError(f"{key!r} is not a key of this store.")

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> object:
        if mode != MODE_RAW or not isinstance(value, int):
            raise OSError("not a value of this store")  # which diskcache takes for a missing item
        return value

    def filename(self, key: object = None, value: object = None) -> tuple[str, str]:
        raise TypeError("diskcache writes no files here.")

    def remove(self, file_path: object) -> None:
        if isinstance(file_path, str) and is_entry_key(file_path):
            remove_entry_file(self._root, file_path)


class EntryCache(diskcache.Cache):
    """A diskcache that waits one second at most, and takes no orders from the settings in its database."""

    temporary = 0  # bytes that count against the cap besides the entries

    def __init__(self, directory: str, **settings: Any):
        super().__init__(directory, **settings)
        self._sql("CREATE INDEX IF NOT EXISTS Cache_segments ON Cache (access_count, access_time, size)")

    @property
    def _timeout(self) -> float:
        return TIMEOUT_S

    @_timeout.setter
    def _timeout(self, value: float) -> None:
        """diskcache sets 0 while it opens, and then retries each statement for 60 seconds by itself."""

    @property
    def _sql_retry(self) -> Callable[..., Any]:
        return self._sql

    def reset(self, key: str, value: Any = ENOVAL, update: bool = True) -> Any:
        if value is ENOVAL:
            return super().reset(key)
        if key.startswith("sqlite_") and key in SETTINGS:
            self._sql(f"PRAGMA {key[7:]} = {SETTINGS[key]}").fetchall()
        elif not key.startswith(("sqlite_", "disk_")) and (key in SETTINGS or key in METADATA):
            return super().reset(key, value, update)
        return value

    def volume(self) -> int:
        """Bytes of entries and temporary files. The database itself (about 300 bytes an entry) is not counted, so that
        a cap means what it says to whoever sets it."""
        return self.reset("size") + self.temporary

    def add(self, key: str, used: float) -> None:
        """
        Adds the row of a file that is there, on probation.

        Args:
            key (`str`): from `entry_key`; has no row.
            used (`float`): the time of the file. A later one there means that the entry was used.
        """
        self.set(key, None)
        self._sql("UPDATE Cache SET access_time = ? WHERE key = ?", (used, key))

    def protect(self, rowid: int, used: float) -> None:
        """
        Moves a row to those that were used again after they were stored, or back to their end.

        Args:
            rowid (`int`): of the row.
            used (`float`): when it was.
        """
        self._sql("UPDATE Cache SET access_count = ?, access_time = ? WHERE rowid = ?", (PROTECTED, used, rowid))

    def remove(self, rowid: int, key: object) -> None:
        """
        Removes a row and its file, inside the caller's transaction: a file removed after it could be one that another
        process has just put there. The file goes first, because on a full disk the database needs its room.

        Args:
            rowid (`int`): of the row.
            key (`object`): what the row says.

        Raises:
            `sqlite3.DatabaseError`: when there is no such row, although one was found.
        """
        self.disk.remove(key)
        if self._sql("DELETE FROM Cache WHERE rowid = ?", (rowid,)).rowcount != 1:
            raise sqlite3.DatabaseError(
                "the index contradicts itself"
            )  # whoever looks for victims would do so for ever
