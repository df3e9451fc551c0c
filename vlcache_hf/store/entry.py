"""One entry on disk: a safetensors file whose metadata repeats the key that it was stored under."""

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

FORMAT = "1"
_FIELD = "field."  # the caller's fields, kept apart from the store's own
_CHUNK_BYTES = 1 << 20  # small enough for a core's cache: the check of the values then costs no second read of memory
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class StoreReadError(Exception):
    """A stored tensor could not be read, or is not there. Callers treat it as a miss."""


class BadEntryError(Exception):
    """The file is not the entry that its path promises; it will not get better and should go."""


class NonFiniteError(Exception):
    """A tensor to be stored holds NaN or infinity."""


class Entry:
    """
    Read access to the tensors of one stored entry.

    The file stays mapped as long as the entry or a tensor read from it lives, also after it was evicted, and only the
    pages that are used are read. Tensors are views of that mapping: copy before writing to them.

    Args:
        handle: an open `safetensors.safe_open`.
        fields (`dict[str, str]`): the fields given to `DiskStore.put`.

    Attributes:
        fields (`dict[str, str]`): the fields given to `DiskStore.put`.
        nbytes (`int`): bytes of all tensors.
        bytes_read (`int`): bytes of the tensors and rows handed out so far.
    """

    def __init__(self, handle: Any, fields: dict[str, str]):
        self._handle = handle
        self.fields = fields
        self.bytes_read = 0
        self._specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name in handle.keys():
            spec = handle.get_slice(name)
            code = spec.get_dtype()
            if code not in _DTYPES:
                raise BadEntryError(f"tensor {name!r} has the unknown dtype {code!r}")
            self._specs[name] = (tuple(spec.get_shape()), _DTYPES[code])
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
            `StoreReadError`: when there is no such tensor or the file cannot be read.
        """
        return self._count(self._view(name))

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
            `StoreReadError`: when there is no such tensor or row, or the file cannot be read.
        """
        shape = self.shape(name)
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise StoreReadError(f"rows {start}:{stop} are not in tensor {name!r} of shape {shape}.")
        # The view of the whole tensor touches none of its pages; slicing it gives what `get_slice` would.
        return self._count(self._view(name)[start:stop])

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


def open_entry(path: Path, kind: str, group: str, name: str) -> Entry:
    """
    Opens an entry and checks that it is the one asked for.

    Args:
        path (`Path`): the file.
        kind, group, name (`str`): what its header must repeat.

    Raises:
        `FileNotFoundError`: when there is no file.
        `BadEntryError`: when the file is not a complete entry of this format, kind, group and name.
        `OSError`, `RuntimeError`: when it cannot be opened for another reason, which may pass.
    """
    for _ in range(3):
        before = _identity(path)
        try:
            handle = safe_open(path, framework="pt", device="cpu")
            metadata = handle.metadata() or {}
        except SafetensorError as exc:
            error: Exception = BadEntryError(str(exc))
        except FileNotFoundError as exc:
            error = OSError(f"could not be opened: {exc}")  # safe_open says so of every failure to open
        else:
            # The header is read and the data mapped by two opens: they must have met the same file.
            if _identity(path) == before:
                _check(metadata, {"format": FORMAT, "kind": kind, "group": group, "name": name})
                start = len(_FIELD)
                return Entry(handle, {k[start:]: v for k, v in metadata.items() if k.startswith(_FIELD)})
            error = OSError("was replaced while it was opened")
        if _identity(path) == before:
            break
    raise error


def _identity(path: Path) -> tuple[int, int, int]:
    info = os.lstat(path)
    if not stat.S_ISREG(info.st_mode):  # opening a pipe would wait for ever
        raise BadEntryError("not a regular file")
    return info.st_dev, info.st_ino, info.st_size


def _check(metadata: dict[str, str], expected: dict[str, str]) -> None:
    for label, value in expected.items():
        if metadata.get(label) != value:
            raise BadEntryError(f"its header says {label} {metadata.get(label)!r} instead of {value!r}")


def encode_header(
    kind: str, group: str, name: str, tensors: dict[str, torch.Tensor], fields: dict[str, str]
) -> tuple[bytes, list[torch.Tensor], int]:
    """
    Lays out the file of an entry.

    Args:
        kind, group, name (`str`): the key, repeated in the header.
        tensors (`dict[str, torch.Tensor]`): CPU tensors of any shape and stride.
        fields (`dict[str, str]`): metadata of the caller.

    Returns:
        `tuple[bytes, list[torch.Tensor], int]`: the first bytes of the file, the tensors in the order in which they
        follow, and the bytes of the whole file.

    Raises:
        `ValueError`: for a dtype, device or metadata that cannot be stored.
    """
    metadata = {"format": FORMAT, "kind": kind, "group": group, "name": name}
    metadata.update({_FIELD + key: value for key, value in fields.items()})
    if not all(isinstance(item, str) for pair in metadata.items() for item in pair):
        raise ValueError(f"fields must map strings to strings, got {fields!r}.")
    header: dict[str, Any] = {"__metadata__": metadata}
    # Widest elements first keeps each tensor aligned to its element size.
    order = sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))
    end = 0
    for key in order:
        tensor = tensors[key]
        if tensor.dtype not in _CODES or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise ValueError(f"tensor {key!r} is {tensor.dtype} on {tensor.device}; only dense CPU tensors are kept.")
        start, end = end, end + tensor.nbytes
        header[key] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start_of_file = len(text).to_bytes(8, "little") + text
    return start_of_file, [tensors[key] for key in order], len(start_of_file) + end


def write_entry(path: Path, start_of_file: bytes, tensors: list[torch.Tensor]) -> None:
    """
    Writes a new file that only its owner can read. The caller removes it when this raises.

    Args:
        path (`Path`): must not exist.
        start_of_file (`bytes`), tensors (`list[torch.Tensor]`): from `encode_header`.

    Raises:
        `NonFiniteError`: when a value is NaN or infinite.
        `OSError`: when the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(start_of_file)
        for tensor in tensors:
            for chunk in _chunks(tensor.detach()):
                if chunk.is_floating_point() and not _finite(chunk):
                    raise NonFiniteError
                # One element may claim any stride and still count as contiguous, except for a view as bytes.
                flat = chunk.as_strided(chunk.shape, (1,))
                file.write(flat.view(torch.uint8).numpy().data)


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Contiguous flat pieces of `tensor` in row-major order; a strided tensor is never copied as a whole."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(max(1, _CHUNK_BYTES // tensor.dtype.itemsize))
    else:
        rows = max(1, _CHUNK_BYTES * tensor.shape[0] // tensor.nbytes)
        for piece in tensor.split(rows):
            yield piece.contiguous().view(-1)


def _finite(chunk: torch.Tensor) -> bool:
    # A NaN or an infinity always shows in the sum, which is several times faster than looking at each value; a sum of
    # finite values that overflows is cleared up by the slow way.
    wide = torch.float64 if chunk.dtype == torch.float64 else torch.float32
    return math.isfinite(chunk.sum(dtype=wide).item()) or bool(torch.isfinite(chunk).all())
