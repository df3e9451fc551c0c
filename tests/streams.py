"""Stand-ins for a GPU: copies that arrive only when they are waited for, tensors that say they are on one, and pinned
memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

GPU = torch.device("cuda", 0)


class LateStream:
    """As `CopyStream`. What it copies arrives at the last moment, and until then nonsense is there.

    Args:
        pinned (`bool`): whether the host's tensors are in pinned memory.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self.calls: list[tuple[Any, ...]] = []
        self.threads: dict[str, set[str]] = {}
        self._pending: dict[int, Callable[[], None]] = {}
        self._events = 0

    def mark(self) -> int:
        return self._note("mark")

    def is_pinned(self, part: torch.Tensor) -> bool:
        return self.pinned or hasattr(part, "pinned_here")

    def pin(self, part: torch.Tensor) -> torch.Tensor:
        self.threads.setdefault("pin", set()).add(threading.current_thread().name)
        copy = part.clone()
        copy.pinned_here = True  # type: ignore[attr-defined]
        return copy

    def copy(self, parts: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], after: int) -> int:
        assert all(map(self.is_pinned, parts))
        for target in targets:
            target.fill_(77)

        def arrive() -> None:
            for part, target in zip(parts, targets, strict=True):
                target.copy_(part)

        event = self._note("copy", after)
        self._pending[event] = arrive
        return event

    def wait(self, event: int) -> None:
        self._note("wait", event)
        self._pending.pop(event, lambda: None)()

    def finish(self, event: int) -> None:
        self._note("finish", event)
        self._pending.pop(event, lambda: None)()

    def join(self) -> None:
        self._note("join")

    def _note(self, call: str, *of: int) -> int:
        """Numbers the call; `mark` and `copy` return their number as an event."""
        self.threads.setdefault(call, set()).add(threading.current_thread().name)
        self._events += 1
        self.calls.append((call, *of, self._events) if call in ("mark", "copy") else (call, *of))
        return self._events


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnGpu)


class LateCopies:
    """As `HostCopies`: copies hold nonsense until they are waited for."""

    def __init__(self) -> None:
        self.waits = 0
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.full(tensor.shape, 77, dtype=tensor.dtype)
        self._pending.append((host, tensor.as_subclass(torch.Tensor)))
        return host

    def wait(self) -> None:
        self.waits += 1
        for host, tensor in self._pending:
            host.copy_(tensor)
        self._pending.clear()


def pinning(monkeypatch: pytest.MonkeyPatch, works: bool) -> list[Any]:
    """Lets pinned memory be had, or not; returns the sizes that were asked for."""
    empty, asked = torch.empty, []

    def pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            asked.append(args[0])
            if not works:
                raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", pinned)
    return asked
