"""Forward hooks of users: an observer may stay, one that changes values puts the cache out of action.

No key can tell what a hook does. So the hooks of a run that is captured or served are watched: one that returns
another value or writes into what it is given ends the run, which is then computed in full, as stock, and remembered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

# Hooks of these do their work without changing values: output capturing, offloading, sharding, weight normalisation.
# Not peft, whose hooks choose adapters row by row.
_HARMLESS = ("transformers.", "accelerate.", "torch.")


class HookChangesValues(Exception):
    """A forward hook changed what a module computes."""


def _foreign(hook: Any) -> bool:
    home = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return not home.startswith(_HARMLESS)


def _hook_tables(module: nn.Module) -> Iterator[dict[int, Callable[..., Any]]]:
    for part in module.modules():
        for table in (part._forward_pre_hooks, part._forward_hooks):
            if table:
                yield table


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _versions(values: tuple[Any, ...]) -> list[int]:
    return [tensor._version for tensor in _tensors(values) if not tensor.is_inference()]


class HookWatch:
    """Watches the forward hooks of users, and remembers those that change values."""

    def __init__(self) -> None:
        self._changing: weakref.WeakSet[Any] = weakref.WeakSet()

    def has_own_hooks(self, module: nn.Module) -> bool:
        """Whether a module itself, not a part of it, has hooks of users."""
        return any(_foreign(hook) for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()))

    def has_inner_hooks(self, module: nn.Module) -> bool:
        """Whether a module's parts, not the module itself, have hooks of users."""
        return any(
            _foreign(hook) for part in module.children() for table in _hook_tables(part) for hook in table.values()
        )

    def has_changing_hooks(self, module: nn.Module) -> bool:
        """Whether a hook that has been seen to change values is on a module or on a part of it."""
        if not self._changing:
            return False
        return any(hook in self._changing for table in _hook_tables(module) for hook in table.values())

    def watching(self, module: nn.Module) -> _Watched:
        """A context in which a hook that changes values raises `HookChangesValues`."""
        return _Watched(module, self._changing)


class _Watched:
    def __init__(self, module: nn.Module, changing: weakref.WeakSet[Any]) -> None:
        self._module, self._changing = module, changing
        self._replaced: list[tuple[dict[int, Any], int, Any]] = []

    def __enter__(self) -> None:
        for table in _hook_tables(self._module):
            for key, hook in list(table.items()):
                if _foreign(hook):
                    self._replaced.append((table, key, hook))
                    table[key] = self._checked(hook)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for table, key, hook in self._replaced:
            if key in table:  # a hook may remove itself
                table[key] = hook

    def _checked(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            before = _versions(args)
            result = hook(*args)
            if (result is not None and result is not args[-1]) or _versions(args) != before:
                self._changing.add(hook)
                raise HookChangesValues("a forward hook changes values")
            return result

        return call
