"""Hashing the raw bits of tensors, on the device they are on."""

from __future__ import annotations

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
        tensors (`Mapping[str, torch.Tensor]`): what to watch; meta tensors and wrapper subclasses are passed over.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            if tensor.device.type == "meta" or hasattr(tensor, "__tensor_flatten__") or not tensor.numel():
                continue
            if not tensor.is_contiguous():
                continue
            bits = tensor.detach().view(-1).view(_INTEGERS[tensor.element_size()])
            sample = bits[:: max(1, bits.numel() // _SAMPLES)][:_SAMPLES]
            groups.setdefault((bits.device, bits.dtype), {})[key] = sample
        self._groups = [(list(group), list(group.values())) for group in groups.values()]
        self._values = [torch.cat(samples) for _, samples in self._groups]

    def changed(self) -> set[str]:
        """Keys of the tensors whose sampled values are not what they were."""
        found: set[str] = set()
        for (keys, samples), values in zip(self._groups, self._values):
            if torch.equal(torch.cat(samples), values):
                continue
            before = values.split([sample.numel() for sample in samples])
            found.update(key for key, sample, old in zip(keys, samples, before) if not torch.equal(sample, old))
        return found
