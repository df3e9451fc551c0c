"""Copies between host and GPU that nobody waits for before they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .store.host import HostMemory


class HostCopies:
    """Copies in memory of the host. Those of a GPU's tensors are made while it computes on."""

    def __init__(self) -> None:
        self._memory = HostMemory(pins=True)
        self._devices: set[torch.device] = set()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the CPU, which must not be read before `wait`.

        Args:
            tensor (`torch.Tensor`): on any device.
        """
        if tensor.device.type != "cuda":
            return tensor.to("cpu", copy=True)
        self._devices.add(tensor.device)
        return self._memory.copy(tensor)

    def wait(self) -> None:
        """Waits until all copies are made."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._devices.clear()


class CopyStream:
    """A stream of a CUDA device for copies to it, beside the one that computes.

    Everything that takes CUDA to load rows is here, so that tests can put something else in its place.

    Args:
        device (`torch.device`): the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._memory = HostMemory(pins=True)

    def mark(self) -> Any:
        """An event behind everything that the computing stream has been given so far."""
        return torch.cuda.current_stream(self._device).record_event()

    def is_pinned(self, part: torch.Tensor) -> bool:
        """Whether the device can read a tensor of the host by itself."""
        return part.is_pinned()

    def pin(self, part: torch.Tensor) -> torch.Tensor:
        """A copy that it can read, where memory can be pinned.

        Args:
            part (`torch.Tensor`): on the CPU.
        """
        return self._memory.copy(part)

    def copy(self, parts: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], after: Any) -> Any:
        """Starts to copy tensors to the device. May be called in any thread.

        Args:
            parts (sequence of `torch.Tensor`): on the CPU.
            targets (sequence of `torch.Tensor`): of the same shapes and dtypes, on the device.
            after: the event after which `targets` may be written.

        Returns:
            An event behind the copies.
        """
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            for part, target in zip(parts, targets):
                target.copy_(part, non_blocking=True)
            return self._stream.record_event(torch.cuda.Event(blocking=True))

    def wait(self, event: Any) -> None:
        """Lets the computing stream wait for an event; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self, event: Any) -> None:
        """Lets the host wait for an event."""
        event.synchronize()

    def join(self) -> None:
        """Lets the computing stream wait for all copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def copy_stream(device: torch.device) -> CopyStream | None:
    """What copies to a device beside its computing; `None` where nothing does.

    Args:
        device (`torch.device`): with an index, as tensors have it.
    """
    return CopyStream(device) if device.type == "cuda" else None
