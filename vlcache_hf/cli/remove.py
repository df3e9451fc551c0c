"""Removing entries from a cache directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from .common import bar, note, plural
from .entries import Found


def remove(root: Path, entries: Sequence[Found], unused_only: bool = False) -> tuple[set[Found], list[Found]]:
    """Removes entries from disk and index, as the library would.

    Args:
        root (`Path`): the cache directory.
        entries (`Sequence[Found]`): what to remove.
        unused_only (`bool`): leave those alone that were used since they were found.

    Returns:
        `tuple[set[Found], list[Found]]`: those that are gone, and those that could not be removed.
    """
    from ..store import DiskStore

    store = DiskStore(root, None)
    gone: set[Found] = set()
    left: list[Found] = []
    for entry in bar(entries, desc="removing", unit="entry"):
        path = root / entry.key
        with contextlib.suppress(OSError):
            if unused_only and os.lstat(path).st_mtime != entry.used:
                continue
        store.discard(entry.kind, entry.group, entry.name)
        if os.path.lexists(path):
            left.append(entry)
        else:
            gone.add(entry)
    store.close()
    return gone, left


def report_left(left: Sequence[Found], root: Path) -> None:
    """Says on stderr that some entries could not be removed."""
    if left:
        note(
            f"Error: {plural(len(left), 'entry')} could not be removed, for instance {str(root / left[0].key)!r}. "
            "Run as the owner of the directory, where it can be written."
        )
