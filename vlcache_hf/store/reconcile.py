"""What is looked at when the index is opened: its header, and whether it and the files agree."""

import contextlib
import os
from pathlib import Path

from diskcache.core import MODE_BINARY, MODE_RAW

from .backend import PROBATION, PROTECTED, EntryCache
from .paths import is_entry_key, walk_entries


def reconcile(cache: EntryCache, root: Path) -> None:
    """
    Drops rows that this store did not write, or that have no file, and adds files that have no row: all of them after
    a rebuild, else those of a writer that was killed between the two. Files that are added are on probation, whatever
    they were before: the next hit protects them.

    Args:
        cache (`EntryCache`): the index.
        root (`Path`): the cache directory.

    Raises:
        `ValueError`: when the index does not count what it has.
    """
    with cache.transact():
        cache._sql(
            "DELETE FROM Cache WHERE raw != 1 OR mode NOT IN (?, ?)"
            " OR access_count IS NULL OR access_count NOT IN (?, ?)",
            (MODE_BINARY, MODE_RAW, PROBATION, PROTECTED),
        )
        known = {key for (key,) in cache._sql("SELECT key FROM Cache")}
        present = set(walk_entries(root))
        cache._con.executemany(
            "DELETE FROM Cache WHERE key = ?",
            [(key,) for key in known if is_entry_key(key) and key not in present],
        )
        for key in present:
            if key not in known:
                with contextlib.suppress(FileNotFoundError):
                    cache.add(key, os.stat(root / key).st_mtime)
        (total,) = cache._sql("SELECT COALESCE(SUM(size), 0) FROM Cache").fetchone()
        if cache.reset("size") != total:
            raise ValueError(f"the index counts {cache.reset('size')!r} bytes for entries of {total!r}")


def has_unknown_version(database: Path) -> bool:
    """
    Whether the header of a database names a version that SQLite does not know. Such a database is read-only to it, as
    if its circumstances were at fault, and would stay so. Only to be asked while this process holds no lock on it.

    Args:
        database (`Path`): the file.

    Raises:
        `OSError`: when it cannot be read.
    """
    with open(database, "rb") as file:
        return any(version > 2 for version in file.read(20)[18:])
