"""Files that are being written, and those that killed writers left behind.

A writer holds a lock on its file from its creation until the file is published or removed. The system drops the lock
with the process, so a file that can be locked has no writer. Where files cannot be locked, age has to tell.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .paths import ORPHAN_SECONDS

try:
    import fcntl
except ImportError:  # Windows, where an open file can also not be renamed
    fcntl = None  # type: ignore[assignment]

GRACE_SECONDS = 60  # covers the moment between the creation of a file and its lock

# Descriptors that hold a lock, with the device and inode of their file.
_LOCKED: dict[int, tuple[int, int]] = {}


class Temporary:
    """A file that only its owner can read, and that will become an entry, or nothing.

    Args:
        path (`Path`): where it is, until it is published.
        descriptor (`int`): open for writing.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The file, to be written once. Raises `OSError` when not all of it could be written."""
        with os.fdopen(self._descriptor, "wb", closefd=fcntl is None) as file:
            yield file
        if fcntl is not None:
            # Network file systems tell of a full disk only when a descriptor is closed; the one with the lock stays.
            os.close(os.dup(self._descriptor))


@contextlib.contextmanager
def temporary_file(root: Path) -> Iterator[Temporary]:
    """A new file in the temporary folder of a cache directory. It is gone afterwards, unless it was published.

    Args:
        root (`Path`): the cache directory.

    Raises:
        `OSError`: when it cannot be created.
    """
    path = root / "tmp" / f"{os.getpid()}-{uuid.uuid4().hex}.tmp"
    descriptor = None
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        if fcntl is not None:
            _lock(descriptor)
            _LOCKED[descriptor] = _identity(os.fstat(descriptor))
        yield Temporary(path, descriptor)
    finally:
        with contextlib.suppress(OSError):  # also when the user interrupts; not there when it was published
            os.unlink(path)
        if descriptor is not None and fcntl is not None:
            _LOCKED.pop(descriptor, None)
            with contextlib.suppress(OSError):
                os.close(descriptor)  # last: while the file is there, it is locked


def temporary_bytes(root: Path) -> int:
    """Bytes of the files being written, or left behind, by all processes. Raises `OSError` without their folder."""
    total = 0
    with os.scandir(root / "tmp") as files:
        for file in files:
            with contextlib.suppress(OSError):
                total += file.stat(follow_symlinks=False).st_size
    return total


def reclaim_orphans(root: Path) -> int:
    """
    Removes temporary files whose writer is gone.

    A lock that another machine cannot see (a network file system mounted with local locks) protects a file only while
    it is written to at least once a minute. A writer that loses its file that way stores nothing.

    Args:
        root (`Path`): the cache directory.

    Returns:
        `int`: bytes of those that seem to have no writer either, but were written to too lately to be sure.

    Raises:
        `OSError`: without the temporary folder.
    """
    young = 0
    with os.scandir(root / "tmp") as files:
        for file in files:
            with contextlib.suppress(OSError):
                info = file.stat(follow_symlinks=False)
                age = time.time() - info.st_mtime
                if stat.S_ISDIR(info.st_mode):  # a broken index on its way out
                    if age > ORPHAN_SECONDS:
                        shutil.rmtree(file.path, ignore_errors=True)
                elif info.st_size or age > GRACE_SECONDS:  # trying its lock must not keep its writer from taking it
                    young += _reclaim(file.path, info, age)
    return young


def is_orphan(path: Path) -> bool:
    """
    Whether the writer of a temporary file is gone, as `reclaim_orphans` sees it.

    Args:
        path (`Path`): in the temporary folder.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as held:
        info = os.lstat(path)
        age = time.time() - info.st_mtime
        if stat.S_ISDIR(info.st_mode) or (not info.st_size and age <= GRACE_SECONDS):
            return age > ORPHAN_SECONDS
        locked = _try_lock(str(path), info, held)
        return locked is not False and (age > ORPHAN_SECONDS or (bool(locked) and abs(age) > GRACE_SECONDS))
    return False


def _reclaim(path: str, info: os.stat_result, age: float) -> int:
    """Removes a file if it is an orphan; returns its bytes if it is one that has to wait."""
    with contextlib.ExitStack() as held:
        locked = _try_lock(path, info, held)
        if locked is False:
            return 0
        if age > ORPHAN_SECONDS or (locked and abs(age) > GRACE_SECONDS):  # a time in the future is a wrong clock's
            os.unlink(path)  # while it is locked, and its name is never given again
            return 0
        return info.st_size if locked or age > GRACE_SECONDS else 0


def _try_lock(path: str, info: os.stat_result, held: contextlib.ExitStack) -> bool | None:
    """Whether a file could be locked, and is until `held` ends; `None` when it cannot be told."""
    if fcntl is None or not stat.S_ISREG(info.st_mode):  # a pipe or a device must not even be opened
        return None
    try:
        # For writing, because network file systems want that for an exclusive lock.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False  # it was published or removed
    except OSError:
        return None
    held.callback(os.close, descriptor)
    opened = os.fstat(descriptor)
    if not stat.S_ISREG(opened.st_mode) or opened.st_mtime_ns != info.st_mtime_ns:
        return False  # written to, or replaced (an inode may be given again): somebody is alive
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _lock(descriptor: int) -> None:
    # Where there are no locks, the age of the file has to do: then nobody else gets one either.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _let_go_in_child() -> None:
    """A child that outlives its parent would keep the parent's files locked. Its copies of the descriptors are pointed
    elsewhere rather than closed: the threads that use them are gone, but not the objects that would close them."""
    if not _LOCKED:
        return
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor, file in _LOCKED.items():
            with contextlib.suppress(OSError):
                if _identity(os.fstat(descriptor)) == file:
                    os.dup2(nowhere, descriptor, inheritable=False)
        os.close(nowhere)
    _LOCKED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
