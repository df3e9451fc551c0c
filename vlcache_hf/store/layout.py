"""Writing an entry."""

import json
import math
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from .checksum import BlockSums, placeholder
from .entry import DTYPES, FIELD, FORMAT, HEAD, SERIAL, SUMS, head_sum

_CHUNK_BYTES = 1 << 20  # small enough for a core's cache: the check of the values then costs no second read of memory
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class NonFiniteError(Exception):
    """A tensor to be stored holds NaN or infinity."""


@dataclass
class Layout:
    """
    How an entry will lie in its file.

    Args:
        header (`dict[str, Any]`): the JSON header, with room for the checksums.
        tensors (`dict[str, torch.Tensor]`): in the order in which they follow.
        size (`int`): bytes of the whole file.
    """

    header: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    size: int = 0

    def start_of_file(self) -> bytes:
        """The bytes before the first tensor."""
        text = json.dumps(self.header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def lay_out(kind: str, group: str, name: str, tensors: dict[str, torch.Tensor], fields: dict[str, str]) -> Layout:
    """
    Lays out the file of an entry.

    Args:
        kind, group, name (`str`): the key, repeated in the header.
        tensors (`dict[str, torch.Tensor]`): CPU tensors of any shape and stride.
        fields (`dict[str, str]`): metadata of the caller.

    Raises:
        `ValueError`: for a dtype, device or metadata that cannot be stored.
    """
    metadata = {"format": FORMAT, "kind": kind, "group": group, "name": name, SERIAL: uuid.uuid4().hex}
    metadata[HEAD] = placeholder(1)
    metadata.update({FIELD + key: value for key, value in fields.items()})
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
        metadata[SUMS + key] = placeholder(tensor.nbytes)
    layout = Layout(header, {key: tensors[key] for key in order})
    layout.size = len(layout.start_of_file()) + end
    return layout


def write_entry(file: BinaryIO, layout: Layout) -> None:
    """
    Writes the file of an entry.

    Args:
        file (`BinaryIO`): new and empty.
        layout (`Layout`): from `lay_out`; its header gets the checksums, which are made in the same pass.

    Raises:
        `NonFiniteError`: when a value is NaN or infinite.
        `OSError`: when the file cannot be written.
    """
    file.write(layout.start_of_file())
    for key, tensor in layout.tensors.items():
        sums = BlockSums()
        for chunk in _chunks(tensor.detach()):
            if chunk.is_floating_point() and not _finite(chunk):
                raise NonFiniteError
            # One element may claim any stride and still count as contiguous, except for a view as bytes.
            flat = chunk.as_strided(chunk.shape, (1,))
            data = flat.view(torch.uint8).numpy().data
            sums.update(data)
            file.write(data)
        layout.header["__metadata__"][SUMS + key] = sums.hex()
    specs = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in layout.tensors.items()}
    layout.header["__metadata__"][HEAD] = head_sum(layout.header["__metadata__"], specs)
    file.seek(0)
    file.write(layout.start_of_file())


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
    if chunk.dtype.itemsize == 1:
        chunk = chunk.to(torch.float32)  # there are no sums of 8 bits
    wide = torch.float64 if chunk.dtype == torch.float64 else torch.float32
    return math.isfinite(chunk.sum(dtype=wide).item()) or bool(torch.isfinite(chunk).all())
