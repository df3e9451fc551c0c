"""A fingerprint of a model's weights that changes when any parameter or buffer changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from .bits import BitsHash, Canary
from .keys import Digest

# Attributes outside parameters and buffers that change what a module of these models computes.
_SCALARS = (
    "attention_scaling",
    "eps",
    "interpolation_align_corners",
    "interpolation_mode",
    "scaling",
    "variance_epsilon",
)


class FingerprintError(RuntimeError):
    """A tensor's bits cannot be read, so the model cannot be told from another one."""


@dataclass
class _Hashed:
    anchor: weakref.ref[Any]
    state: tuple[int, int]
    digest: str


class _Weight(NamedTuple):
    """A tensor of the model, or where accelerate keeps it.

    Args:
        key (`str`): its name, that of the bare model.
        tensor (`torch.Tensor`): the tensor; on `meta` when it has to be loaded.
        source (`Mapping`, *optional*): the loader of a tensor on `meta`.
        name (`str`): its name in `source`.
    """

    key: str
    tensor: torch.Tensor
    source: Any = None
    name: str = ""

    @property
    def anchor(self) -> Any:
        """The object whose identity stands for the weight: accelerate makes a new meta tensor after every forward."""
        return self.tensor if self.source is None else self.source

    @property
    def state(self) -> tuple[int, int]:
        if self.source is not None:
            return (0, 0)
        return (0 if self.tensor.is_inference() else self.tensor._version, _address(self.tensor))


class WeightsFingerprint:
    """Fingerprints parts of a model; hashes a tensor once and then watches its identity, version and address, and a
    sample of its values.

    A change through `tensor.data` moves no version. One that touches most values, like merging an adapter, shows in
    the sample; one that touches a few may not: call `refresh()` after it. Inference tensors have no version at all and
    are hashed at every request.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Hashed] = {}
        self._canaries: dict[str, Canary] = {}
        self._totals: dict[str, tuple[list[str], str]] = {}

    def refresh(self) -> None:
        """Forgets all that was hashed: the next request reads every weight again."""
        self._seen.clear()
        self._canaries.clear()
        self._totals.clear()

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
        facts: list[str] = ["weights"]
        weights: list[_Weight] = []
        _collect(root, name, facts, weights)
        stale = [weight for weight in weights if not self._known(weight)]
        canary = self._canaries.get(name)
        if canary is not None and canary.changed() - {weight.key for weight in stale}:
            stale = weights  # values moved where no counter did: nothing that is known can be trusted
        if stale:
            hasher = BitsHash()
            for weight in stale:
                digest = _hash(hasher, weight)
                self._seen[weight.key] = _Hashed(weakref.ref(weight.anchor), weight.state, digest)
            self._canaries[name] = Canary({weight.key: weight.tensor for weight in weights})
        for weight in weights:
            facts += (weight.key.removeprefix(name), self._seen[weight.key].digest)
        # all that the fingerprint is made of is compared; only hashing the same once more is saved
        known, digest = self._totals.get(name, (None, ""))
        if facts != known:
            digest = Digest(*facts).hex()
            self._totals[name] = (facts, digest)
        return digest

    def _known(self, weight: _Weight) -> bool:
        known = self._seen.get(weight.key)
        if known is None or (weight.source is None and weight.tensor.is_inference()):
            return False
        return known.anchor() is weight.anchor and known.state == weight.state


def _collect(module: nn.Module, path: str, facts: list[str], weights: list[_Weight]) -> None:
    """Appends all tensors that take part to `weights`, and what else decides, such as the switches of adapters, to
    `facts`. It runs at every request, over hundreds of modules."""
    own = module.__dict__
    live = _live_adapters(module, path, facts) if _is_adapter_layer(module) else None
    for name in _SCALARS:
        if name in own and isinstance(own[name], (int, float, str)):  # tuners keep tables by adapter under such names
            facts += ("scalar", path, name, str(own[name]))
    patch = own.get("forward")
    # accelerate wraps forwards too; the vision tower as a whole is wrapped by people who count its calls
    if patch is not None and "_old_forward" not in own and path != "visual":
        facts += ("forward", path, _code(patch))
    for table in (module._parameters, module._buffers):
        for leaf, tensor in table.items():
            if tensor is not None:
                weights.append(_located(module, leaf, tensor, f"{path}.{leaf}"))
    for name, child in module._modules.items():
        if child is None:
            continue
        if live is not None and _is_adapter_container(child):
            inner: list[_Weight] = []
            _collect(child, f"{path}.{name}", facts, inner)
            first = len(path) + len(name) + 2
            weights += [weight for weight in inner if weight.key[first:].split(".")[0] in live]
        else:
            # adapters wrap a layer: the name of what they wrap stays that of the bare model
            wrapped = live is not None and name in ("base_layer", "original_module")
            _collect(child, path if wrapped else f"{path}.{name}", facts, weights)


def _is_adapter_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.") and hasattr(module, "active_adapters")


def _is_adapter_container(module: nn.Module) -> bool:
    """Whether the children or parameters of a module are named after adapters."""
    return isinstance(module, (nn.ModuleDict, nn.ParameterDict)) or type(module).__name__ == "BufferDict"


def _live_adapters(module: Any, path: str, facts: list[str]) -> list[str]:
    """Adapters that take part as modules of their own, with their scaling; merged ones are in the base weights."""
    active = [] if getattr(module, "disable_adapters", False) else list(module.active_adapters)
    live = [adapter for adapter in active if adapter not in getattr(module, "merged_adapters", ())]
    if live:
        # what a tuner keeps beside its parameters: scaling, ranks, indices
        facts += ("adapters", path, type(module).__qualname__, *live)
        for name in sorted({"scaling", *getattr(module, "other_param_names", ())}):
            table = getattr(module, name, None)
            if isinstance(table, nn.Module):  # walked as a module
                continue
            for adapter in live:
                value = table.get(adapter) if isinstance(table, dict) else table
                facts += (name, BitsHash()(value) if isinstance(value, torch.Tensor) else str(value))
    return live


def _code(function: Any) -> str:
    """What a replaced `forward` runs, as far as it can be told."""
    inner = getattr(function, "__func__", getattr(function, "func", function))
    code = getattr(inner, "__code__", None)
    text = repr((code.co_code, code.co_consts, code.co_names)) if code is not None else repr(type(inner))
    return Digest(getattr(inner, "__module__", "") or "", getattr(inner, "__qualname__", ""), text).hex()


def _located(module: nn.Module, leaf: str, tensor: torch.Tensor, key: str) -> _Weight:
    if not tensor.is_meta:
        return _Weight(key, tensor)
    found = _offloaded(module, leaf)
    if found is None:
        raise FingerprintError(f"{key} is on the meta device and no offloaded value of it was found")
    source, name = found
    in_memory = source if isinstance(source, dict) else getattr(source, "state_dict", None) or {}
    if isinstance(in_memory.get(name), torch.Tensor):
        return _Weight(key, in_memory[name])
    return _Weight(key, tensor, source, name)


def _offloaded(module: nn.Module, leaf: str) -> tuple[Any, str] | None:
    """Where accelerate keeps a parameter that it took off the module: the loader, and the name there."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        weights_map = getattr(part, "weights_map", None)
        source, name = getattr(weights_map, "dataset", weights_map), getattr(weights_map, "prefix", "") + leaf
        # not `name in source`: that would read the weight from disk
        tables = [source, getattr(source, "state_dict", None), getattr(source, "index", None)]
        if any(isinstance(table, dict) and name in table for table in tables):
            return source, name
    return None


def _parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors behind a parameter: itself, the parts of a wrapper subclass, and quantisation scales."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield f".{name}", getattr(tensor, name)
    else:
        yield "", tensor
    # bitsandbytes keeps the scales beside the packed bytes, outside parameters and buffers
    holders = [("", tensor), ("quant_state", getattr(tensor, "quant_state", None))]
    holders.append(("state2", getattr(holders[1][1], "state2", None)))
    for label, holder in holders:
        for name in ("SCB", "absmax", "offset", "code"):
            scale = getattr(holder, name, None)
            if isinstance(scale, torch.Tensor):
                yield f".{label}.{name}", scale


def _hash(hasher: BitsHash, weight: _Weight) -> str:
    value = weight.tensor if weight.source is None else weight.source[weight.name]
    try:
        return Digest(*(text for name, part in _parts(value) for text in (name, hasher(part)))).hex()
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        raise FingerprintError(f"the bits of {weight.key} ({type(value).__name__}) cannot be read: {error}") from error


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # wrapper subclasses have no storage of their own
        return 0
