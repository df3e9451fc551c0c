"""The precision in which KV is stored: as computed, or in 8 bits with a scale per token and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

AS_COMPUTED = "auto"
_SCALE = torch.bfloat16  # the range of fp32 in two bytes; values are divided by the rounded scale, so nothing is lost
_TINY = torch.finfo(_SCALE).tiny
# dtype and largest magnitude
_EIGHT_BITS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
STORAGE_DTYPES = (AS_COMPUTED, *_EIGHT_BITS)


@dataclass(frozen=True)
class KVShape:
    """What one token of a stored image looks like.

    Args:
        layers (`int`): decoder layers.
        heads (`int`): KV heads.
        head_dim (`int`): size of a head.
        dtype (`torch.dtype`): compute dtype, for estimates of size.
        storage (`str`, *optional*, defaults to `"auto"`): `"auto"` stores rows as computed; `"int8"` and `"fp8"`
            (E4M3) store 8 bits per value and a bfloat16 scale per token and head, which loses something.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    storage: str = AS_COMPUTED

    @property
    def exact(self) -> bool:
        """Whether what is read is bit for bit what was computed."""
        return self.storage == AS_COMPUTED

    def nbytes(self, tokens: int) -> int:
        """Bytes of an entry: 2 x layers x kv_heads x T x (head_dim x itemsize, and the scale of stored 8 bits)."""
        row = self.head_dim * self.dtype.itemsize if self.exact else self.head_dim + _SCALE.itemsize
        return 2 * self.layers * self.heads * tokens * row

    def names(self, layer: int) -> tuple[str, ...]:
        """Names of the tensors of a layer: keys, values, and their scales where there are any."""
        plain = (f"k.{layer}", f"v.{layer}")
        return plain if self.exact else (*plain, f"k.{layer}.scale", f"v.{layer}.scale")

    def shapes(self, tokens: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors of an entry."""
        wide, narrow = (tokens, self.heads, self.head_dim), (tokens, self.heads, 1)
        return {
            name: shape
            for layer in range(self.layers)
            for name, shape in zip(self.names(layer), 2 * [wide] + 2 * [narrow])
        }

    def encode(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], StorageError]:
        """The tensors that are stored for one layer, where they were computed, and what they lose.

        Args:
            layer (`int`): the layer.
            keys (`torch.Tensor` of shape `(T, kv_heads, head_dim)`): keys before RoPE.
            values (`torch.Tensor` of shape `(T, kv_heads, head_dim)`): values.
        """
        if self.exact:
            parts: Sequence[torch.Tensor] = (keys, values)
            error = StorageError()
        else:
            (stored_k, scale_k), (stored_v, scale_v) = (_quantise(rows, self.storage) for rows in (keys, values))
            parts = (stored_k, stored_v, scale_k, scale_v)
            error = StorageError.between(
                (keys, dequantise(stored_k, scale_k, torch.float32)),
                (values, dequantise(stored_v, scale_v, torch.float32)),
            )
        return dict(zip(self.names(layer), parts)), error


class StorageError:
    """Relative error of stored rows, `|x - stored x| / |x|`: the largest over layers, keys and values.

    Kept as tensors until it is asked for, so that a prefill on a GPU does not wait for it layer by layer.
    """

    def __init__(self, squares: Sequence[torch.Tensor] = ()) -> None:
        self._squares = list(squares)

    @classmethod
    def between(cls, *pairs: tuple[torch.Tensor, torch.Tensor]) -> StorageError:
        """Of pairs of rows, true and stored."""
        squares = []
        for true, stored in pairs:
            true = true.float()
            squares.append((true - stored).square().sum() / true.square().sum().clamp_min(_TINY))
        return cls(squares)

    def add(self, other: StorageError) -> None:
        self._squares += other._squares

    def value(self) -> float:
        return max((float(square) for square in self._squares), default=0.0) ** 0.5


def dequantise(stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows from 8 bits and scales.

    Args:
        stored (`torch.Tensor` of shape `(n, kv_heads, head_dim)`): int8 or fp8.
        scale (`torch.Tensor` of shape `(n, kv_heads, 1)`): scales.
        dtype (`torch.dtype`): of the result.
    """
    return (stored.to(torch.float32) * scale.to(torch.float32)).to(dtype)


def _quantise(rows: torch.Tensor, storage: str) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, largest = _EIGHT_BITS[storage]
    wide = rows.to(torch.float32)
    # a NaN or an infinity shows in the scale, for which the store refuses the entry
    scale = (wide.abs().amax(-1, keepdim=True) / largest).clamp_min(_TINY).to(_SCALE)
    scaled = (wide / scale.to(torch.float32)).clamp(-largest, largest)
    return (scaled.round() if storage == "int8" else scaled).to(dtype), scale


def stored_error(fields: Mapping[str, str]) -> float:
    """The relative error that an entry says it has; 0 for one that is stored as computed.

    Args:
        fields (`Mapping[str, str]`): fields of the entry.
    """
    try:
        return float(fields.get("error", 0.0))
    except ValueError:
        return 0.0
