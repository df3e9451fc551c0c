"""Forward hooks of users. No key can tell what a hook does, so a model that has some is computed in full.

One kind is watched instead, because people count calls with it: a hook behind the whole vision tower. It sees the
tower's output only, so that whether it changed anything can be checked by comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

# Hooks of these do their work without changing values: output capturing, offloading, sharding, weight normalisation.
# Not peft, whose hooks choose adapters row by row.
_HARMLESS = ("transformers.", "accelerate.", "torch.")


class HookChangesValues(Exception):
    """A forward hook changed what the vision tower computes."""


def _foreign(hook: Any) -> bool:
    home = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return not home.startswith(_HARMLESS)


def _any_foreign(*tables: dict[int, Callable[..., Any]]) -> bool:
    return any(_foreign(hook) for table in tables for hook in table.values())


def has_hooks(module: nn.Module) -> bool:
    """Whether a module, a part of it, or all modules of the process have forward hooks of users."""
    if _any_foreign(torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks):
        return True
    waiting = [module]
    while waiting:  # at every request, over hundreds of modules: `modules()` takes several times as long
        part = waiting.pop()
        if (part._forward_pre_hooks or part._forward_hooks) and _any_foreign(
            part._forward_pre_hooks, part._forward_hooks
        ):
            return True
        waiting.extend(child for child in part._modules.values() if child is not None)
    return False


def has_hooks_but_behind(module: nn.Module) -> bool:
    """As `has_hooks`, but hooks that see the output of the whole module are passed over."""
    return (
        _any_foreign(torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
        or _any_foreign(module._forward_pre_hooks)
        or any(has_hooks(part) for part in module.children())
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


class watched_output:
    """A context in which a hook behind a module that changes its output raises `HookChangesValues`.

    Args:
        module (`nn.Module`): the vision tower.
    """

    def __init__(self, module: nn.Module) -> None:
        self._hooks: dict[int, Any] = module._forward_hooks
        self._replaced: dict[int, Any] = {}

    def __enter__(self) -> None:
        for key, hook in list(self._hooks.items()):
            if _foreign(hook):
                self._replaced[key] = hook
                self._hooks[key] = _checked(hook)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for key, hook in self._replaced.items():
            if key in self._hooks:  # a hook may remove itself
                self._hooks[key] = hook


def _checked(hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        output = args[-1]
        before = [tensor.clone() for tensor in _tensors(output)]
        result = hook(*args)
        after = list(_tensors(output))
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        if not same or (result is not None and result is not output):
            raise HookChangesValues
        return result

    return call
