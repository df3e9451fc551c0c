"""Hashing the raw bits of tensors, on the device they are on."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np
import torch

from .keys import Digest

_BLOCK = 1 << 20  # lanes with multipliers of their own; later blocks repeat them and are told apart by their order
_PIECE = 1 << 16  # lanes at a time: the temporaries stay in a core's cache
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_SAMPLES = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _multipliers(salt: int) -> torch.Tensor:
    """One odd 64-bit number per lane of a block."""
    index = np.arange(1, _BLOCK + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (index + np.uint64(salt)) * np.uint64(_STEP)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return torch.from_numpy((mixed | np.uint64(1)).view(np.int64))


def _fold(lanes: torch.Tensor, bits: int) -> torch.Tensor:
    """`lanes ^ (lanes >> bits)` with zeros shifted in; int64 would shift in the sign."""
    return lanes ^ ((lanes >> bits) & ((1 << (64 - bits)) - 1))


class BitsHash:
    """Two position-weighted sums of the mixed bits modulo 2^64: no rounding, the same on every device.

    A plain weighted sum would be blind to the top bits: an even number of flipped signs adds a multiple of 2^64. So
    each lane is mixed, one to one, before and after its multiplication.
    """

    def __init__(self) -> None:
        self._multipliers = (_multipliers(1), _multipliers(0x5851F42D4C957F2D))
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> str:
        """Digest of dtype, shape and bits.

        Args:
            tensor (`torch.Tensor`): dense, of any dtype, shape, stride and device.

        Raises:
            `RuntimeError`, `TypeError`: its bits cannot be read.
        """
        lanes = self._lanes(tensor)
        if lanes.device not in self._on:
            first, second = (multipliers.to(lanes.device) for multipliers in self._multipliers)
            self._on[lanes.device] = (first, second)
        first, second = self._on[lanes.device]
        partial = []
        for block in lanes.split(_BLOCK):
            for start in range(0, block.numel(), _PIECE):
                piece = block[start : start + _PIECE]
                part = slice(start, start + piece.numel())
                mixed = _fold(_fold(piece, 32) * first[part], 29)
                partial.append(torch.stack((mixed.sum(), (mixed * second[part]).sum())))
        sums = [0, 0]
        if partial:
            # one transfer for the tensor, however many pieces it has
            for pair in torch.stack(partial).tolist():
                sums = [(total * _STEP + value) & _MASK for total, value in zip(sums, pair)]
        return Digest("tensor", str(tensor.dtype), *tensor.shape, "|", *sums).hex()

    @staticmethod
    def _lanes(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().contiguous().reshape(-1)
        raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
        if raw.numel() % 8 or raw.storage_offset() % 8:
            padded = raw.new_zeros((raw.numel() + 7) // 8 * 8)
            padded[: raw.numel()] = raw
            raw = padded
        return raw.view(torch.int64)


class Canary:
    """A few values of each of many tensors, read together: shows changes that no version counter shows.

    Args:
        tensors (`Mapping[str, torch.Tensor]`):
            What to watch, without keeping it alive. Meta, complex and strided tensors and wrapper subclasses are
            passed over.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], dict[str, weakref.ref[torch.Tensor]]] = {}
        for key, tensor in tensors.items():
            if tensor.device.type == "meta" or hasattr(tensor, "__tensor_flatten__") or not tensor.numel():
                continue
            if tensor.is_contiguous() and not tensor.is_complex():
                groups.setdefault((tensor.device, tensor.dtype), {})[key] = weakref.ref(tensor)
        self._groups = list(groups.values())
        self._values = [_samples(group) for group in self._groups]

    def changed(self) -> set[str]:
        """Keys of the tensors whose sampled values are not what they were."""
        found: set[str] = set()
        for group, values in zip(self._groups, self._values):
            now = _samples(group)
            if now is not None and values is not None and torch.equal(now, values):
                continue
            # rare, so one by one; a tensor that is gone or has another shape, dtype or place has changed
            if now is None or values is None or now.shape != values.shape or now.dtype != values.dtype:
                found.update(group)
                continue
            found.update(key for key, a, b in zip(group, now.unbind(), values.unbind()) if not torch.equal(a, b))
        return found


def _samples(group: Mapping[str, weakref.ref[torch.Tensor]]) -> torch.Tensor | None:
    """Bits of evenly spaced values of some tensors, `(tensors, samples)`; `None` when they do not fit together."""
    parts = []
    for reference in group.values():
        tensor = reference()
        if tensor is None or not tensor.numel() or not tensor.is_contiguous():
            return None
        step = max(1, tensor.numel() // _SAMPLES)
        # a tensor with few values repeats its first one
        strides = (step,) if tensor.numel() >= _SAMPLES else (0,)
        parts.append(tensor.detach().as_strided((_SAMPLES,), strides, tensor.storage_offset()))
    try:
        return torch.stack(parts).view(_INTEGERS[parts[0].element_size()])
    except (RuntimeError, TypeError):  # moved to different devices or dtypes
        return None
