"""The index of the store: diskcache for accounting, the size cap and the eviction order, and for nothing else.

No value ever goes through diskcache, whose releases up to 5.6.3 unpickle what they find (CVE-2025-69872). Its database
is expendable: the files are the truth, so a broken one is thrown away and rebuilt from them.
"""

import contextlib
import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import diskcache
from diskcache.core import DBNAME

from .backend import MARK_PREFIX, SETTINGS, TIMEOUT_S, EntryCache, EntryDisk
from .eviction import Eviction
from .paths import private_dirs, remove_entry_file
from .reconcile import has_unknown_version, reconcile
from .temporary import reclaim_orphans, temporary_bytes

T = TypeVar("T")

MARK_SECONDS = 30 * 24 * 3600
PAUSE_SECONDS = 30.0
# What SQLite says when the database itself may be fine.
_CIRCUMSTANCES = (
    "locked",
    "readonly",
    "unable to open",
    "disk i/o",
    "is full",
    "protocol",
    "out of memory",
    "interrupt",
)

# One for the process and held during each operation, so that a fork never copies a connection inside a transaction.
# Nothing that looks up an entry takes it.
_LOCK = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


class IndexUnavailable(Exception):
    """The index cannot be used now (locked, read-only, not a database, no space); another time it may."""


class CapClosedError(IndexUnavailable):
    """What killed writers left behind takes the room, and cannot be removed yet."""


class Index:
    """
    Accounting of the entries below one directory, shared with other threads and processes. Opens at its first use.

    Args:
        root (`Path`): the cache directory, absolute.
        cap (`int`, *optional*): bytes that all entries and temporary files may take together; `None` for no limit.
        on_rebuild (`Callable[[Exception], None]`): told why, when a broken index is replaced.

    All methods raise `IndexUnavailable` when the index cannot be used now, and those that make room `CapClosedError`.
    """

    def __init__(self, root: Path, cap: int | None, on_rebuild: Callable[[Exception], None]):
        self._root = root
        self._cap = cap
        self._on_rebuild = on_rebuild
        self._folder = root / "index"
        self._database = self._folder / DBNAME
        self._cache: EntryCache | None = None
        self._opened: tuple[int, int] | None = None
        self._broken: Exception | None = None
        self._paused_until = 0.0

    def make_room(self, nbytes: int) -> bool:
        """Evicts until a file of `nbytes` more fits below the cap. Returns `False` when it cannot fit now."""

        def operation(cache: EntryCache) -> bool:
            private_dirs(self._root, "tmp")
            with cache.transact():
                return self._make_room(cache, nbytes)

        return self._run(operation)

    def evict(self, nbytes: int) -> bool:
        """Evicts entries of `nbytes` bytes together, or all, although the cap allows them. Returns `False` when there
        were none."""

        def operation(cache: EntryCache) -> bool:
            with cache.transact():
                return Eviction(cache, self._root, cap=cache.reset("size")).evict(nbytes)

        return self._run(operation)

    def publish(self, temporary: Path, key: str) -> bool:
        """
        Makes a complete file visible as the entry `key`, or leaves nothing of it visible.

        Args:
            temporary (`Path`): the file, in the temporary folder of the same cache directory.
            key (`str`): from `entry_key`.

        Returns:
            `bool`: `False` when it does not fit below the cap now.

        Raises:
            `OSError`: when the file cannot be moved.
        """
        path = self._root / key

        def operation(cache: EntryCache) -> bool:
            placed = False
            try:
                with cache.transact():
                    # An update of the row would make diskcache remove the "old" file, which has the same name.
                    cache._sql("DELETE FROM Cache WHERE key = ?", (key,))
                    placed = self._make_room(cache, 0)  # the temporary file itself is counted already
                    if placed:
                        self._place(temporary, key)
                        counted, info = cache.reset("size"), os.stat(path)
                        cache.add(key, info.st_mtime)
                        # triggers in the database count: a flipped byte there would lift the cap in silence
                        if cache.reset("size") - counted != info.st_size:
                            raise sqlite3.DatabaseError("the index does not count what is stored")
                    else:
                        remove_entry_file(self._root, key)
            except BaseException:
                if placed and not os.path.lexists(temporary):
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                raise
            return placed

        return self._run(operation)

    def drop(self, key: str) -> None:
        """Removes the row and the file of `key`."""
        self._run(lambda cache: cache.delete(key))

    def mark(self, key: str) -> None:
        """Remembers `key` for 30 days, or until the entries that were stored at this time are evicted."""
        if not self._paused():
            self._run(lambda cache: cache.set(MARK_PREFIX + key, 1, expire=MARK_SECONDS))

    def marked(self, key: str) -> bool:
        """Whether `key` was marked."""
        if self._paused() or not self._database.exists():
            return False
        return self._run(lambda cache: cache.get(MARK_PREFIX + key)) is not None

    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self._run(lambda cache: cache.reset("size"))

    def clear(self) -> None:
        """Removes all entries and marks."""
        self._run(lambda cache: cache.clear())

    def close(self) -> None:
        """Closes the database; the next use opens it again."""
        with _LOCK:
            self._close()

    def _run(self, operation: Callable[[EntryCache], T]) -> T:
        with _LOCK:
            try:
                return operation(self._open())
            except diskcache.Timeout as exc:
                self._pause()
                raise IndexUnavailable("its database is locked or read-only") from exc
            except sqlite3.Error as exc:
                self._close()
                if _is_broken(exc):
                    self._broken = exc  # the next use rebuilds
                else:
                    self._pause()
                raise IndexUnavailable(str(exc)) from exc
            except (ValueError, TypeError, KeyError, AttributeError) as exc:
                # what Python makes of a damaged database, for instance text that is not UTF-8
                self._close()
                self._broken = exc
                raise IndexUnavailable(str(exc)) from exc
            except BaseException as exc:
                # An interrupt can hit between BEGIN and the code that would roll back.
                if not isinstance(exc, OSError | IndexUnavailable):
                    self._close()
                raise

    def _pause(self) -> None:
        # Marks are asked for while a user waits: do not make every request wait for a lock that nobody releases.
        self._paused_until = time.monotonic() + PAUSE_SECONDS

    def _paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def _open(self) -> EntryCache:
        if self._cache is not None:
            with contextlib.suppress(OSError):
                if _file_id(self._database) == self._opened and not has_unknown_version(self._database):
                    return self._cache
            self._close()  # someone removed, replaced or damaged the database
        private_dirs(self._root, "index")
        private_dirs(self._root, "tmp")
        if self._broken is None:
            try:
                return self._connect()
            except (sqlite3.Error, ValueError, TypeError, KeyError, AttributeError) as exc:
                if isinstance(exc, sqlite3.Error) and not _is_broken(exc):
                    raise
                self._broken = exc
        # Moved first, in one step: nobody must meet half of it, or lose a new one to a slow removal.
        grave = self._root / "tmp" / f"{os.getpid()}-{uuid.uuid4().hex}.index"
        os.replace(self._folder, grave)
        shutil.rmtree(grave, ignore_errors=True)
        private_dirs(self._root, "index")
        cache = self._connect()
        self._on_rebuild(self._broken)
        self._broken = None
        return cache

    def _connect(self) -> EntryCache:
        # An empty file is an empty database: SQLite would create it readable by others.
        os.close(os.open(self._database, os.O_RDWR | os.O_CREAT, 0o600))
        opened = _file_id(self._database)
        if has_unknown_version(self._database):
            raise sqlite3.DatabaseError("its header names an unknown version")
        with contextlib.closing(sqlite3.connect(self._database, TIMEOUT_S, isolation_level=None)) as probe:
            probe.execute("BEGIN IMMEDIATE")  # one wait, where diskcache would wait for each of its statements
            probe.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            probe.execute("ROLLBACK")
        cache = EntryCache(str(self._folder), timeout=TIMEOUT_S, disk=EntryDisk, **SETTINGS)
        try:
            reclaim_orphans(self._root)
            cache.expire()
            reconcile(cache, self._root)
        except BaseException:
            # A COMMIT that fails leaves its transaction open: the lock would be held until the garbage is collected.
            with contextlib.suppress(sqlite3.Error):
                cache.close()
            raise
        # Set last, so that a failure on the way opens again.
        self._cache, self._opened = cache, opened
        return cache

    def _close(self) -> None:
        cache, self._cache = self._cache, None
        if cache is not None:
            with contextlib.suppress(sqlite3.Error):
                cache.close()

    def _make_room(self, cache: EntryCache, nbytes: int) -> bool:
        if self._cap is None:
            return True
        cache.temporary = nbytes + temporary_bytes(self._root)
        orphans = 0
        if cache.volume() > self._cap:
            orphans = reclaim_orphans(self._root)  # this process may have opened the index long ago
            cache.temporary = nbytes + temporary_bytes(self._root)
        if cache.temporary > self._cap:
            if cache.temporary - orphans <= self._cap:
                raise CapClosedError(f"{orphans} of {self._cap} bytes, until they are safe to remove")
            return False
        if cache.volume() > self._cap:
            Eviction(cache, self._root, self._cap).make_room()
        return True

    def _place(self, temporary: Path, key: str) -> None:
        for attempt in range(3):
            private_dirs(self._root, os.path.dirname(key))
            try:
                os.replace(temporary, self._root / key)
                return
            except FileNotFoundError:  # another process removed the folder, then empty
                if attempt == 2:
                    raise


def _file_id(path: Path) -> tuple[int, int]:
    info = os.stat(path)
    return info.st_dev, info.st_ino


def _is_broken(exc: sqlite3.Error) -> bool:
    """Whether the database's content is at fault, and not its circumstances."""
    if not isinstance(exc, sqlite3.DatabaseError):
        return False
    return not any(text in str(exc).lower() for text in _CIRCUMSTANCES)
