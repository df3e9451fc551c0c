"""An entry on a server: what its description says, and tensors that are fetched when they are needed."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from .checksum import BlockSums, bad_blocks, placeholder
from .entry import DTYPES, BadEntryError, StoreReadError
from .layout import NonFiniteError
from .remote_keys import FORMAT

MAX_DESCRIPTION_BYTES = 4 << 20
MAX_TENSOR_BYTES = 512 << 20  # the largest value that a server keeps unless it is told otherwise
MAX_ENTRY_BYTES = 64 << 30
_MAX_TENSORS = 4096
_MAX_DIMENSIONS = 8
_SUM_BYTES = 16
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_CHUNK_BYTES = 1 << 20  # see `layout`


@dataclass(frozen=True)
class TensorSpec:
    """
    A tensor of an entry.

    Args:
        dtype (`torch.dtype`): one that the store keeps.
        shape (`tuple[int, ...]`): its shape.
        sums (`str`): checksums of its blocks, in order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    sums: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def receive(self, fetch: Callable[[memoryview], bool]) -> torch.Tensor:
        """The tensor, read from a server.

        Args:
            fetch (`Callable[[memoryview], bool]`): fills the memory, or returns `False` when there is nothing.

        Raises:
            `StoreReadError`: there are no bytes, or they are not those that were stored.
        """
        raw = torch.empty(self.nbytes, dtype=torch.uint8)
        if self.nbytes and not fetch(raw.numpy().data):
            raise StoreReadError(f"nothing instead of {self.nbytes} bytes")
        bad = next(bad_blocks(raw, 0, self.nbytes, self.sums, set()), None)
        if bad is not None:
            raise StoreReadError(f"the checksum of block {bad} does not fit")
        return raw.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Description:
    """
    What is stored beside the tensors of an entry.

    Args:
        kind, group, name (`str`): its key.
        fields (`dict[str, str]`): metadata of the caller.
        tensors (`dict[str, TensorSpec]`): by name.
    """

    kind: str
    group: str
    name: str
    fields: dict[str, str]
    tensors: dict[str, TensorSpec]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors.values())

    def encode(self) -> bytes:
        """As JSON behind its checksum: a flipped byte could make I32 of F32, and no checksum of the values would tell.

        Raises:
            `ValueError`: a field is not a string.
        """
        if not all(isinstance(item, str) for pair in self.fields.items() for item in pair):
            raise ValueError(f"fields must map strings to strings, got {self.fields!r}.")
        tensors = {
            name: {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "nbytes": spec.nbytes, "sums": spec.sums}
            for name, spec in self.tensors.items()
        }
        key = {"format": FORMAT, "kind": self.kind, "group": self.group, "name": self.name}
        return sealed(json.dumps({**key, "fields": self.fields, "tensors": tensors}, separators=(",", ":")).encode())


def sealed(content: bytes) -> bytes:
    """`content` behind its checksum."""
    return xxhash.xxh3_64(content).hexdigest().encode() + content


def decode_description(data: object, kind: str, group: str, name: str) -> Description:
    """
    Reads a description, of which nothing is believed.

    Args:
        data (`object`): what the server sent.
        kind, group, name (`str`): what it must repeat.

    Raises:
        `BadEntryError`: it is not the description of that entry, or one that could not be true.
    """
    try:
        if not isinstance(data, bytes) or len(data) > MAX_DESCRIPTION_BYTES:
            raise BadEntryError("its description is bad: it is no text, or too long")
        _require(data == sealed(data[_SUM_BYTES:]), "its checksum does not fit")
        content: Any = json.loads(data[_SUM_BYTES:])
        _require(isinstance(content, dict), "it is no object")
        for label, value in (("format", FORMAT), ("kind", kind), ("group", group), ("name", name)):
            _require(content.get(label) == value, f"it has another {label}")
        fields, tensors = content.get("fields"), content.get("tensors")
        _require(isinstance(fields, dict) and isinstance(tensors, dict), "it lacks fields or tensors")
        _require(all(isinstance(value, str) for value in fields.values()), "a field is no string")
        _require(len(tensors) <= _MAX_TENSORS, "it has too many tensors")
        found = Description(kind, group, name, fields, {key: _spec(spec) for key, spec in tensors.items()})
        _require(found.nbytes <= MAX_ENTRY_BYTES, "the entry is too large")
        # names given twice, numbers that are only equal to the right ones, more than we know
        _require(found.encode() == data, "it is not as it would have been written")
        return found
    except (ValueError, RecursionError) as exc:  # what json raises
        raise BadEntryError(f"its description is bad: {type(exc).__name__}") from exc


def _spec(content: Any) -> TensorSpec:
    _require(isinstance(content, dict), "a tensor is no object")
    code, shape, sums = content.get("dtype"), content.get("shape"), content.get("sums")
    _require(isinstance(code, str) and code in DTYPES, "a dtype is unknown")
    _require(isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS, "a shape is no shape")
    _require(all(type(size) is int and 0 <= size <= MAX_TENSOR_BYTES for size in shape), "a shape is no shape")
    spec = TensorSpec(DTYPES[code], tuple(shape), sums)
    # an empty tensor has strides too, which must not overflow
    extent = math.prod(max(1, size) for size in shape) * spec.dtype.itemsize
    _require(extent <= MAX_TENSOR_BYTES and content.get("nbytes") == spec.nbytes, "a size is wrong")
    _require(isinstance(sums, str) and len(sums) == len(placeholder(spec.nbytes)), "checksums are missing")
    return spec


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise BadEntryError(f"its description is bad: {otherwise}")


def pack(tensor: torch.Tensor) -> tuple[memoryview, TensorSpec]:
    """
    Prepares a tensor for sending.

    Args:
        tensor (`torch.Tensor`): dense, on the CPU. Copied only if it is not contiguous.

    Returns:
        `tuple[memoryview, TensorSpec]`: its bytes, and what describes them.

    Raises:
        `NonFiniteError`: when a value is NaN or infinite.
        `ValueError`: when it cannot be stored.
    """
    if tensor.dtype not in _CODES or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(f"a tensor is {tensor.dtype} on {tensor.device}; only dense CPU tensors are kept.")
    if tensor.nbytes > MAX_TENSOR_BYTES:
        raise ValueError(f"a tensor has {tensor.nbytes} bytes; a server takes {MAX_TENSOR_BYTES}.")
    # One element may claim any stride and still count as contiguous, except for a view as bytes.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    sums = BlockSums()
    if not flat.numel():
        return memoryview(b""), TensorSpec(tensor.dtype, tuple(tensor.shape), "")
    for chunk in flat.split(_CHUNK_BYTES // tensor.dtype.itemsize):
        # a sum shows NaN and infinity faster than a look at each value does, but may overflow by itself
        if chunk.is_floating_point() and not math.isfinite(chunk.sum(dtype=torch.float64).item()):
            if not bool(torch.isfinite(chunk).all()):
                raise NonFiniteError
        sums.update(chunk.view(torch.uint8).numpy().data)
    return flat.view(torch.uint8).numpy().data, TensorSpec(tensor.dtype, tuple(tensor.shape), sums.hex())


class RemoteEntry:
    """
    Read access to an entry on a server. Each tensor is fetched once, when rows of it are first asked for.

    Args:
        description (`Description`): what it holds.
        fetch (`Callable[[str, TensorSpec], torch.Tensor]`): gets a tensor, or raises `StoreReadError`.

    Attributes:
        nbytes (`int`): bytes of all tensors.
        bytes_read (`int`): bytes of the tensors fetched so far.
        when_complete (`Callable[[dict[str, torch.Tensor]], None]`, *optional*): called once with all tensors, when the
            last one has been fetched.
    """

    def __init__(self, description: Description, fetch: Callable[[str, TensorSpec], torch.Tensor]) -> None:
        self._description = description
        self._fetch = fetch
        self._tensors: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()
        self.nbytes = description.nbytes
        self.bytes_read = 0
        self.when_complete: Callable[[dict[str, torch.Tensor]], None] | None = None

    @property
    def fields(self) -> Mapping[str, str]:
        return self._description.fields

    def keys(self) -> list[str]:
        return sorted(self._description.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._spec(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._spec(name).dtype

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        shape = self._spec(name).shape
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise StoreReadError(f"rows {start}:{stop} are not in tensor {name!r} of shape {shape}.")
        return self._whole(name)[start:stop]

    def ready(self, name: str, start: int, stop: int) -> bool:
        return name in self._tensors

    def _whole(self, name: str) -> torch.Tensor:
        done = None
        with self._lock:  # whoever comes second waits, and fetches nothing
            if name not in self._tensors:
                spec = self._spec(name)
                self._tensors[name] = self._fetch(name, spec)
                self.bytes_read += spec.nbytes
                if len(self._tensors) == len(self._description.tensors):
                    done, self.when_complete = self.when_complete, None
        if done is not None:
            done(dict(self._tensors))
        return self._tensors[name]

    def _spec(self, name: str) -> TensorSpec:
        try:
            return self._description.tensors[name]
        except KeyError:
            raise StoreReadError(f"there is no tensor {name!r}, only {self.keys()}.") from None
