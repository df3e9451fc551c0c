"""Names and places of what the store keeps on disk."""

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".safetensors"
# keys and values, features, and what is known of images before they are processed
KINDS = ("kv", "vit", "src")
ORPHAN_SECONDS = 3600  # without a write, until a temporary file counts as left behind where no lock can tell
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"(?:kv|vit|src)/([0-9a-f]{2})/(\1[0-9a-f]{62})/([0-9a-f]{64})\.safetensors")
_last_stamp = 0


def entry_key(kind: str, group: str, name: str) -> str:
    """
    The key of an entry, which is also its path below the cache directory.

    Args:
        kind (`str`): one of `KINDS`.
        group (`str`): 64 lowercase hexadecimal characters, for instance the digest of an image.
        name (`str`): 64 lowercase hexadecimal characters, for instance the digest of a context.

    Returns:
        `str`: at most 148 characters of `[0-9a-z._/-]`, with `/` between folders on every platform.

    Raises:
        `ValueError`: when one of them is something else, so that no key ever leaves the cache directory.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}.")
    for label, value in (("group", group), ("name", name)):
        if not isinstance(value, str) or not _DIGEST.fullmatch(value):
            raise ValueError(f"{label} must be 64 lowercase hexadecimal characters, got {value!r}.")
    return f"{kind}/{group[:2]}/{group}/{name}{SUFFIX}"


def is_entry_key(key: object) -> bool:
    """Whether `key`, which may come from an untrusted index, has exactly the form that `entry_key` gives."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def is_digest(value: str) -> bool:
    """Whether `value` is a 256-bit digest in lowercase hexadecimal."""
    return _DIGEST.fullmatch(value) is not None


def private_dirs(root: Path, below: str) -> None:
    """
    Creates `root` and the folders `below` it that are missing, readable by their owner only, whatever the umask.

    Args:
        root (`Path`): the cache directory. Parents of it are created with the permissions that are usual there.
        below (`str`): relative path with `/` between folders; `""` for none.

    Raises:
        `OSError`: when a folder cannot be created.
    """
    folder = root
    os.makedirs(root.parent, exist_ok=True)
    for part in ("", *below.split("/")):
        folder = folder / part
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            continue
        os.chmod(folder, 0o700)


def remove_entry_file(root: Path, key: str) -> None:
    """Removes the file of `key` and the folders which that leaves empty. What cannot be removed stays."""
    path = root / key
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(path.parent)
        os.rmdir(path.parent.parent)


def walk_entries(root: Path) -> Iterator[str]:
    """Keys of all entry files below `root`, in no order. Folders that cannot be read are skipped."""
    for kind in KINDS:
        for shard in _listdir(root / kind):
            for group in _listdir(root / kind / shard):
                for file in _listdir(root / kind / shard / group):
                    key = f"{kind}/{shard}/{group}/{file}"
                    if is_entry_key(key):
                        yield key


def _listdir(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is, or will be. 0 when that cannot be told."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return 0


def is_full(exc: Exception) -> bool:
    """Whether an error of the system, or of SQLite, says that no space is left, or none for this user."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT) if isinstance(exc, OSError) else "is full" in str(exc)


def stamp() -> int:
    """A modification time in nanoseconds since the epoch, later than every earlier one of this process: file systems
    take their own times from a clock that ticks every few milliseconds, too coarse to tell uses apart."""
    global _last_stamp
    _last_stamp = max(time.time_ns(), _last_stamp + 1)
    return _last_stamp
