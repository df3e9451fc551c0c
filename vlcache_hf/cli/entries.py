"""What lies in a cache directory, read without changing anything in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Found:
    """The file of an entry.

    Args:
        key (`str`): its path below the cache directory.
        nbytes (`int`): size of the file.
        used (`float`): time of the last use, in seconds since the epoch.
    """

    key: str
    nbytes: int
    used: float

    @property
    def kind(self) -> str:
        return self.key.split("/")[0]

    @property
    def group(self) -> str:
        return self.key.split("/")[2]

    @property
    def name(self) -> str:
        return self.key.split("/")[3].split(".")[0]


@dataclass(frozen=True)
class Details:
    """What the header of an entry says.

    Args:
        model (`str`): label of the model that made it.
        tokens (`int`, *optional*): number of its tokens.
        grid (`str`): the image's patches in time, height and width.
        stored_by (`str`): which version of the library wrote it.
        problem (`str`, *optional*): why the header cannot be trusted.
    """

    model: str = UNKNOWN
    tokens: int | None = None
    grid: str = ""
    stored_by: str = ""
    problem: str | None = None


def scan(root: Path) -> list[Found]:
    """All entries below `root`, in no order; none where it does not exist."""
    from ..store.paths import walk_entries

    found = []
    for key in walk_entries(root):
        with contextlib.suppress(OSError):  # evicted meanwhile
            info = os.lstat(root / key)
            found.append(Found(key, info.st_size, info.st_mtime))
    return found


def describe(root: Path, entries: Iterable[Found]) -> list[tuple[Found, Details]]:
    """Reads the headers of entries, and none of their tensors. Entries that are gone by now are left out."""
    described = ((entry, _details(root, entry)) for entry in entries)
    return [(entry, header) for entry, header in described if header is not None]


def _details(root: Path, entry: Found) -> Details | None:
    from ..store.entry import open_entry

    try:
        opened = open_entry(root / entry.key, entry.kind, entry.group, entry.name)
    except FileNotFoundError:
        return None
    except Exception as error:  # of whatever kind: people are to see it in its place
        return Details(problem=f"{type(error).__name__}: {error}")
    names = opened.keys()
    return details(opened.fields, opened.shape(names[0]) if names else ())


def details(fields: Mapping[str, str], shape: tuple[int, ...]) -> Details:
    """What an entry says of itself.

    Args:
        fields (`Mapping[str, str]`): what was stored beside its tensors.
        shape (`tuple[int, ...]`): that of its first tensor.
    """
    count = fields.get("tokens", "")
    # entries of the first version of the library have a grid only
    tokens = int(count) if re.fullmatch("[0-9]{1,12}", count) else shape[0] if shape else None
    return Details(fields.get("model") or UNKNOWN, tokens, fields.get("grid", ""), fields.get("stored_by", ""))


def check(root: Path, entry: Found, progress: Callable[[int], Any]) -> None:
    """Checks the header of an entry, and every block of every tensor against its checksum.

    The blocks are read as files are: a disk that fails under a mapped file would kill the process.

    Args:
        root (`Path`): the cache directory.
        entry (`Found`): the entry.
        progress (`Callable[[int], Any]`): told how many bytes were read, again and again.

    Raises:
        `BadEntryError`: the entry is not what it should be.
        `OSError`: it cannot be read (`FileNotFoundError`: it is gone).
    """
    import xxhash

    from ..store.checksum import BLOCK_BYTES
    from ..store.entry import SUMS, BadEntryError, open_entry

    path = root / entry.key
    opened = open_entry(path, entry.kind, entry.group, entry.name)
    with open(path, "rb") as file:
        try:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
            sums_of = header["__metadata__"]
            tensors = {name: (header[name]["data_offsets"], sums_of[SUMS + name]) for name in opened.keys()}
        except (ValueError, KeyError, TypeError) as error:
            raise BadEntryError(f"its header cannot be read: {error}") from None
        for name, ((begin, end), sums) in sorted(tensors.items(), key=lambda item: item[1][0]):
            file.seek(start + begin)
            for block, at in enumerate(range(begin, end, BLOCK_BYTES)):
                data = file.read(min(BLOCK_BYTES, end - at))
                if xxhash.xxh3_64(data).hexdigest() != sums[16 * block : 16 * block + 16]:
                    raise BadEntryError(f"the checksum of block {block} of tensor {name!r} does not fit")
                progress(len(data))


def temporary_files(root: Path) -> list[tuple[Path, int, float]]:
    """Path, bytes and time of the last write of what is being written, or was left behind by killed writers."""
    found = []
    with contextlib.suppress(OSError), os.scandir(root / "tmp") as files:
        for file in files:
            with contextlib.suppress(OSError):
                info = file.stat(follow_symlinks=False)
                nbytes = info.st_size
                if stat.S_ISDIR(info.st_mode):  # a broken index on its way out
                    nbytes = sum(part.stat().st_size for part in os.scandir(file.path))
                found.append((Path(file.path), nbytes, info.st_mtime))
    return found


def orphans(root: Path) -> list[tuple[Path, int, float]]:
    """The temporary files whose writer is gone: a living one holds a lock of its file."""
    from ..store.temporary import is_orphan

    return [file for file in temporary_files(root) if is_orphan(file[0])]
