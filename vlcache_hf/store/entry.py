"""Reading an entry: a safetensors file whose metadata repeats the key that it was stored under."""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from .checksum import Verified, bad_blocks, blocks, placeholder

FORMAT = "3"
FIELD = "field."  # the caller's fields, kept apart from the store's own
SUMS = "sums."  # checksums by tensor
HEAD = "head"  # checksum of all else that the header says
SERIAL = "serial"  # never given twice: file systems do give an inode twice
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NONE: frozenset[int] = frozenset()


class StoreReadError(Exception):
    """A stored tensor could not be read, or is not there. Callers treat it as a miss."""


class BadEntryError(Exception):
    """The file is not the entry that its path promises; it will not get better and should go."""


class Entry:
    """
    Read access to the tensors of one stored entry.

    The file stays mapped as long as the entry or a tensor read from it lives, also after it was evicted, and only the
    pages that are used are read. Tensors are views of that mapping: copy before writing to them.

    Args:
        handle: an open `safetensors.safe_open`.
        metadata (`dict[str, str]`): the metadata in the file's header.
        checked (`dict[str, set[int]]`, *optional*): blocks of its tensors that this process has found good.

    Attributes:
        fields (`dict[str, str]`): the fields given to `DiskStore.put`.
        nbytes (`int`): bytes of all tensors.
        bytes_read (`int`): bytes of the tensors and rows handed out so far.
    """

    def __init__(self, handle: Any, metadata: dict[str, str], checked: dict[str, set[int]] | None = None):
        self._handle = handle
        self.fields = _starting_with(FIELD, metadata)
        self.bytes_read = 0
        self._sums = _starting_with(SUMS, metadata)
        self._checked = {} if checked is None else checked
        self._specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name in handle.keys():
            spec = handle.get_slice(name)
            code = spec.get_dtype()
            if code not in DTYPES:
                raise BadEntryError(f"tensor {name!r} has the unknown dtype {code!r}")
            shape, dtype = tuple(spec.get_shape()), DTYPES[code]
            if len(self._sums.get(name, "-")) != len(placeholder(math.prod(shape) * dtype.itemsize)):
                raise BadEntryError(f"tensor {name!r} has no checksums, or those of another size")
            self._specs[name] = (shape, dtype)
        # a flipped byte could make I32 of F32, with no checksum of the values against it
        if metadata.get(HEAD) != head_sum(metadata, self._specs):
            raise BadEntryError("the checksum of its header does not fit")
        self.nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._specs.values())

    def keys(self) -> list[str]:
        """Names of the tensors, sorted."""
        return sorted(self._specs)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`, without reading it. Raises `StoreReadError` when there is none."""
        return self._spec(name)[0]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of tensor `name`, without reading it. Raises `StoreReadError` when there is none."""
        return self._spec(name)[1]

    def tensor(self, name: str) -> torch.Tensor:
        """
        The whole tensor, as a view of the mapped file.

        Args:
            name (`str`): one of `keys()`.

        Returns:
            `torch.Tensor`: on the CPU, of `shape(name)` and `dtype(name)`.

        Raises:
            `StoreReadError`: when there is no such tensor, the file cannot be read, or a checksum does not fit.
        """
        whole = self._view(name)
        self._check(name, whole, 0, whole.nbytes)
        return self._count(whole)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """
        Rows `[start, stop)` of the first dimension, as a view of the mapped file: other rows are not read.

        Args:
            name (`str`): one of `keys()`.
            start (`int`): first row, at least 0.
            stop (`int`): row after the last, `start <= stop <= shape(name)[0]`.

        Returns:
            `torch.Tensor`: on the CPU, of shape `(stop - start, *shape(name)[1:])`.

        Raises:
            `StoreReadError`: when there is no such tensor or row, the file cannot be read, or a checksum does not fit.
        """
        shape = self.shape(name)
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise StoreReadError(f"rows {start}:{stop} are not in tensor {name!r} of shape {shape}.")
        # The view of the whole tensor touches none of its pages; slicing it gives what `get_slice` would.
        whole = self._view(name)
        row = whole.nbytes // shape[0] if shape[0] else 0
        self._check(name, whole, start * row, stop * row)
        return self._count(whole[start:stop])

    def ready(self, name: str, start: int, stop: int) -> bool:
        """
        Whether `rows` of these needs no check, which would read them from the disk.

        Args:
            name (`str`), start (`int`), stop (`int`): as for `rows`.
        """
        if name not in self._specs:
            return False
        shape, dtype = self._specs[name]
        row = math.prod(shape[1:]) * dtype.itemsize
        return self._checked.get(name, _NONE).issuperset(blocks(start * row, stop * row))

    def _check(self, name: str, whole: torch.Tensor, start: int, stop: int) -> None:
        checked = self._checked.setdefault(name, set())
        bad = next(bad_blocks(whole, start, stop, self._sums[name], checked), None)
        if bad is not None:
            raise StoreReadError(f"the checksum of block {bad} of tensor {name!r} does not fit")

    def _view(self, name: str) -> torch.Tensor:
        self._spec(name)
        try:
            return self._handle.get_tensor(name)
        except Exception as exc:
            raise StoreReadError(f"tensor {name!r} could not be read: {exc}") from exc

    def _spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        if name not in self._specs:
            raise StoreReadError(f"there is no tensor {name!r}, only {self.keys()}.")
        return self._specs[name]

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes_read += tensor.nbytes
        return tensor


def head_sum(metadata: dict[str, str], specs: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    """Checksum of what a header says.

    Args:
        metadata (`dict[str, str]`): its metadata; an older checksum in it does not count.
        specs (`dict[str, tuple]`): shape and dtype of each tensor.
    """
    parts: list[Any] = [sorted((key, value) for key, value in metadata.items() if key != HEAD)]
    parts += [sorted((name, list(shape), str(dtype)) for name, (shape, dtype) in specs.items())]
    return xxhash.xxh3_64(json.dumps(parts).encode()).hexdigest()


def _starting_with(prefix: str, metadata: dict[str, str]) -> dict[str, str]:
    return {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}


def open_entry(path: Path, kind: str, group: str, name: str, verified: Verified | None = None) -> Entry:
    """
    Opens an entry and checks that it is the one asked for.

    Args:
        path (`Path`): the file.
        kind, group, name (`str`): what its header must repeat.
        verified (`Verified`, *optional*): remembers which bytes have been checked.

    Raises:
        `FileNotFoundError`: when there is no file.
        `BadEntryError`: when the file is not a complete entry of this format, kind, group and name.
        `OSError`, `RuntimeError`: when it cannot be opened for another reason, which may pass.
    """
    for _ in range(3):
        before = identity(path)
        try:
            handle = safe_open(path, framework="pt", device="cpu")
            metadata = handle.metadata() or {}
        except SafetensorError as exc:
            error: Exception = BadEntryError(str(exc))
        except (FileNotFoundError, RuntimeError) as exc:
            # safe_open says the one of every failure to open, torch the other of every failure to map; when the file
            # has just been removed, looking at it below says so
            error = OSError(f"could not be opened: {exc}")
        else:
            # The header is read and the data mapped by two opens: they must have met the same file.
            if identity(path)[:3] == before[:3]:  # a hit of another process only moves the time
                _check(metadata, {"format": FORMAT, "kind": kind, "group": group, "name": name})
                checked = None if verified is None else verified.of(before, metadata.get(SERIAL, ""))
                return Entry(handle, metadata, checked)
            error = OSError("was replaced while it was opened")
        if identity(path)[:3] == before[:3]:
            break
    raise error


def identity(path: Path) -> tuple[int, int, int, int]:
    """Device, inode, size and modification time of a file. Raises `BadEntryError` when it is not a regular one."""
    info = os.lstat(path)
    if not stat.S_ISREG(info.st_mode):  # opening a pipe would wait for ever
        raise BadEntryError("not a regular file")
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _check(metadata: dict[str, str], expected: dict[str, str]) -> None:
    for label, value in expected.items():
        if metadata.get(label) != value:
            raise BadEntryError(f"its header says {label} {metadata.get(label)!r} instead of {value!r}")
