"""Which entries leave the disk. A hit only sets the time of a file, which needs no lock; what the index says is put
right here, for the rows where it matters."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

from .backend import PROBATION, PROTECTED, EntryCache
from .paths import is_entry_key
from .policy import PROTECTED_SECONDS, protected_goes_first


class _Row(NamedTuple):
    rowid: int
    key: object
    used: float
    nbytes: int


class Eviction:
    """
    Removes entries one after another, inside the caller's transaction.

    Args:
        cache (`EntryCache`): the index.
        root (`Path`): the cache directory.
        cap (`int`): bytes that all entries may take together.
    """

    def __init__(self, cache: EntryCache, root: Path, cap: int) -> None:
        self._cache = cache
        self._root = root
        self._cap = cap
        self._now = time.time()
        self._looked_at: set[object] = set()
        (self._on_probation,) = cache._sql(
            "SELECT COALESCE(SUM(size), 0) FROM Cache WHERE access_count = ?", (PROBATION,)
        ).fetchone()

    def make_room(self) -> None:
        """Evicts until the entries and temporary files fit below the cap."""
        while self._cache.volume() > self._cap:
            if self._evict_one() is None:
                raise sqlite3.DatabaseError("the index counts bytes of entries that it does not have")

    def evict(self, nbytes: int) -> bool:
        """Evicts entries of `nbytes` bytes together, or all. Returns `False` when there were none."""
        freed = 0
        while freed < nbytes:
            evicted = self._evict_one()
            if evicted is None:
                break
            freed += evicted
        return freed > 0

    def _evict_one(self) -> int | None:
        """Returns the bytes of the row that went, `None` when there is none."""
        while True:
            probation, protected = self._oldest(PROBATION), self._oldest(PROTECTED)
            segment, row = PROBATION, probation
            if protected_goes_first(
                self._on_probation, self._cap, probation and probation.used, protected and protected.used, self._now
            ):
                segment, row = PROTECTED, protected
            if row is None:
                return None
            if segment == PROBATION:
                self._on_probation -= row.nbytes
            used = self._last_use(row.key)
            if used <= row.used or row.key in self._looked_at:
                self._cache.remove(row.rowid, row.key)
                return row.nbytes
            self._looked_at.add(row.key)
            self._cache.protect(row.rowid, used)

    def _oldest(self, segment: int) -> _Row | None:
        row = self._cache._sql(
            "SELECT rowid, key, access_time, size FROM Cache WHERE access_count = ? ORDER BY access_time LIMIT 1",
            (segment,),
        ).fetchone()
        return None if row is None else _Row(row[0], row[1], row[2] or 0.0, row[3])

    def _last_use(self, key: object) -> float:
        if isinstance(key, str) and is_entry_key(key):
            with contextlib.suppress(OSError):
                used = os.stat(self._root / key).st_mtime
                # Set by a clock that was wrong: it must not keep the entry until that time comes.
                return used if used < self._now + PROTECTED_SECONDS else 0.0
        return 0.0
