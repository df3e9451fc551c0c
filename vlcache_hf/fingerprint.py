"""A fingerprint of a model's weights that changes when any parameter or buffer changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .keys import Digest

_CHUNK_LANES = 1 << 20  # 8 MiB of weights at a time keeps the temporaries small on any device
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15 | 1


class FingerprintError(RuntimeError):
    """A tensor's bits cannot be read, so the model cannot be told from another one."""


def _lane_weights(salt: int) -> torch.Tensor:
    """One odd 64-bit multiplier per lane. Odd: a single changed lane always changes the sum modulo 2^64."""
    index = np.arange(1, _CHUNK_LANES + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (index + np.uint64(salt)) * np.uint64(_STEP)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return torch.from_numpy((mixed | np.uint64(1)).view(np.int64))


class _BitsHash:
    """Two position-weighted sums of the raw bits modulo 2^64. Integer sums: no rounding, the same on every device."""

    def __init__(self) -> None:
        self._weights = (_lane_weights(1), _lane_weights(0x5851F42D4C957F2D))
        self._on: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    def __call__(self, tensor: torch.Tensor) -> str:
        flat = tensor.detach().contiguous().reshape(-1)
        raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
        tail = raw.numel() % 8
        if tail or raw.storage_offset() % 8:
            padded = raw.new_zeros((raw.numel() + 7) // 8 * 8)
            padded[: raw.numel()] = raw
            raw = padded
        lanes = raw.view(torch.int64)
        if lanes.device not in self._on:
            self._on[lanes.device] = tuple(weights.to(lanes.device) for weights in self._weights)
        sums = [0, 0]
        for chunk in lanes.split(_CHUNK_LANES):
            for i, weights in enumerate(self._on[lanes.device]):
                partial = int((chunk * weights[: chunk.numel()]).sum())
                sums[i] = (sums[i] * _STEP + partial) & _MASK
        return Digest("tensor", str(tensor.dtype), *tensor.shape, "|", *sums).hex()


@dataclass
class _Hashed:
    tensor: weakref.ref[torch.Tensor]
    state: tuple[int, int]
    digest: str


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The plain tensors behind a parameter: itself, the parts of a wrapper subclass, and quantisation scales."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts = [(f".{name}", getattr(tensor, name)) for name in names]
    else:
        parts = [("", tensor)]
    # bitsandbytes keeps the scales beside the packed bytes, outside parameters and buffers
    for holder, name in ((getattr(tensor, "quant_state", None), "absmax"), (tensor, "SCB")):
        scale = getattr(holder, name, None)
        if isinstance(scale, torch.Tensor):
            parts.append((f".{name}", scale))
    return parts


def _is_adapter_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.") and hasattr(module, "active_adapters")


def _is_adapter_container(module: nn.Module) -> bool:
    """Whether the children or parameters of a module are named after adapters."""
    return isinstance(module, (nn.ModuleDict, nn.ParameterDict)) or type(module).__name__ == "BufferDict"


def _offloaded(module: nn.Module, name: str) -> torch.Tensor | None:
    """The value of a parameter that accelerate keeps off the module (`meta`), from its weights map."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        weights_map = getattr(part, "weights_map", None)
        if weights_map is not None:
            try:
                return weights_map[name]
            except KeyError:
                continue
    return None


class WeightsFingerprint:
    """Fingerprints parts of a model; hashes a tensor once and then watches its identity, version and address.

    Changes made through `tensor.data` move none of these: call `refresh()` after them.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Hashed] = {}
        self._merged: dict[str, tuple[Any, ...]] = {}

    def refresh(self) -> None:
        """Forgets all that was hashed: the next request reads every weight again."""
        self._seen.clear()

    def digest(self, root: nn.Module, name: str) -> str:
        """Fingerprint of a module.

        Args:
            root (`nn.Module`): the module, wrapped or offloaded or quantised as it may be.
            name (`str`): where its hashes are remembered; one name per module.

        Returns:
            `str`: 64 hex digits. Names of adapter wrappers are left out, and inactive adapters are not read, so a
            model with its adapters switched off has the fingerprint of its base.

        Raises:
            `FingerprintError`: a tensor cannot be read.
        """
        total, hasher = Digest("weights"), None
        for key, module, leaf, tensor in self._tensors(root, name, total):
            state = (_version(tensor), 0 if tensor.device.type == "meta" else _address(tensor))
            known = self._seen.get(key)
            if known is None or known.tensor() is not tensor or known.state != state:
                hasher = hasher or _BitsHash()
                known = _Hashed(weakref.ref(tensor), state, self._hash(hasher, module, leaf, tensor, key))
                self._seen[key] = known
            total.add(key.removeprefix(name), known.digest)
        return total.hex()

    def _tensors(
        self, module: nn.Module, path: str, total: Digest
    ) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        live = self._live_adapters(module, path, total) if _is_adapter_layer(module) else None
        for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{path}.{leaf}", module, leaf, tensor
        for name, child in module._modules.items():
            if child is None:
                continue
            if live is not None and _is_adapter_container(child):
                for key, owner, leaf, tensor in self._tensors(child, f"{path}.{name}", total):
                    if key.removeprefix(f"{path}.{name}.").split(".")[0] in live:
                        yield key, owner, leaf, tensor
            else:
                # adapters wrap a layer: the name of what they wrap stays that of the bare model
                yield from self._tensors(child, path if name == "base_layer" else f"{path}.{name}", total)

    def _live_adapters(self, module: Any, path: str, total: Digest) -> list[str]:
        """Adapters that take part as modules of their own; their switches are added to the digest."""
        active = [] if getattr(module, "disable_adapters", False) else list(module.active_adapters)
        merged = tuple(getattr(module, "merged_adapters", ()))
        if self._merged.get(path, ()) != merged:
            # peft merges through `.data`, which no version counter sees
            self._merged[path] = merged
            for key in [key for key in self._seen if key.startswith(path + ".")]:
                del self._seen[key]
        live = [adapter for adapter in active if adapter not in merged]
        scaling = getattr(module, "scaling", {})
        if live:
            total.add("adapters", path, *live, *(str(scaling.get(adapter)) for adapter in live))
        return live

    @staticmethod
    def _hash(hasher: _BitsHash, module: nn.Module, leaf: str, tensor: torch.Tensor, key: str) -> str:
        value = tensor
        if tensor.device.type == "meta":
            offloaded = _offloaded(module, leaf)
            if offloaded is None or offloaded.device.type == "meta":
                raise FingerprintError(f"{key} is on the meta device and no offloaded value of it was found")
            value = offloaded
        try:
            return Digest(*(text for name, part in _parts(value) for text in (name, hasher(part)))).hex()
        except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
            raise FingerprintError(f"the bits of {key} ({type(value).__name__}) cannot be read: {error}") from error


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # wrapper subclasses have no storage of their own
        return 0
