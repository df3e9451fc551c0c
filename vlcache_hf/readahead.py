"""Stored rows on their way: what the next layer reads is loaded while this one computes.

What has to be waited for - a disk, checksums, a server, and for a GPU the way into pinned memory - is done in a
thread, the way from there to the GPU on a stream beside the computing one. What lies in memory, or has been checked by
this process before, needs neither where the CPU computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .store import StoredEntry, StoreReadError
from .store.forks import renew_in_children
from .transfer import CopyStream, copy_stream

THREAD_NAME = "vlcache-reader"
_MAX_STAGED = 2  # layers whose rows are in pinned memory at a time: one on its way, one being filled


class Rows(NamedTuple):
    """Some rows of some tensors of an entry.

    Args:
        entry (`StoredEntry`): the entry.
        names (`tuple[str, ...]`): the tensors.
        start (`int`), stop (`int`): rows `[start, stop)` of each.
    """

    entry: StoredEntry
    names: tuple[str, ...]
    start: int
    stop: int

    def ready(self) -> bool:
        """Whether reading them waits for nothing."""
        return all(self.entry.ready(name, self.start, self.stop) for name in self.names)

    def read(self) -> list[torch.Tensor]:
        """The rows on the CPU, a tensor for each name. Raises `StoreReadError`."""
        return [self.entry.rows(name, self.start, self.stop) for name in self.names]

    def room(self, device: torch.device) -> list[torch.Tensor]:
        """Uninitialised memory for them on a device. Raises `StoreReadError` where there is no such tensor."""
        return [
            torch.empty(
                (self.stop - self.start, *self.entry.shape(name)[1:]), dtype=self.entry.dtype(name), device=device
            )
            for name in self.names
        ]


_Found = dict[Rows, list[torch.Tensor] | StoreReadError]


@dataclass
class _Load:
    """What one layer reads, on its way.

    Args:
        rows (collection of `Rows`): all of it that is not read when it is taken.
        done (`Future`): gives the rows, or why they cannot be read, and the event of their arrival on a device.
        stream (`CopyStream`, *optional*): what brings them there.
        device (`torch.device`, *optional*): that device.
        taken (`bool`): whether their arrival has been waited for.
    """

    rows: Collection[Rows]
    done: Future[tuple[_Found, Any]]
    stream: CopyStream | None = None
    device: torch.device | None = None
    taken: bool = False

    def take(self, rows: Rows) -> list[torch.Tensor] | None:
        if self.done.cancel():  # the thread has not come to it: on a busy machine waiting for that takes longer
            return None
        found, arrived = self.done.result()
        if self.stream is not None and not self.taken:
            self.stream.wait(arrived)
        self.taken = True
        parts = found[rows]
        if isinstance(parts, StoreReadError):
            raise parts
        return parts


class ReadAhead:
    """Loads stored rows one layer ahead of the layer that computes. What it has not loaded is read when it is taken.

    Args:
        device (`torch.device`): where the first layer is expected to ask for its rows. Each layer is expected to ask
            for them where the one before did; where it does not, they are copied there directly.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[torch.device, CopyStream | None] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._staged: deque[tuple[CopyStream, Any, Sequence[torch.Tensor]]] = deque()
        self._current: _Load | None = None
        self._next: _Load | None = None
        self._left: list[_Load] = []

    def after_fork(self) -> None:
        """In a child, where the thread does not run: nothing is on its way."""
        self._thread = self._current = self._next = None

    def begin(self, wanted: Iterable[Rows]) -> None:
        """Starts to load what the next layer reads. Called as a layer begins, whose own rows stay until the next call.

        Args:
            wanted (iterable of `Rows`): what the next layer reads.
        """
        if self._current is not None and not self._current.taken and not self._current.done.cancel():
            self._left.append(self._current)  # a copy may still write where it is to be
        self._current, self._next = self._next, self._start(dict.fromkeys(wanted))

    def take(self, rows: Rows, device: torch.device) -> list[torch.Tensor]:
        """Rows that the present layer reads, a tensor for each name.

        Args:
            rows (`Rows`): which.
            device (`torch.device`): where they are needed.

        Raises:
            `StoreReadError`: they cannot be read.
        """
        self._device = device
        load = self._current
        parts = None
        if load is not None and rows in load.rows and load.device in (None, device):
            parts = load.take(rows)
        return [part.to(device, non_blocking=True) for part in (rows.read() if parts is None else parts)]

    def close(self) -> None:
        """Stops what is still on its way. When this returns the thread is gone."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)
        for stream in self._streams.values():
            if stream is not None:
                stream.join()  # before memory that it writes to is used for something else
        self._current = self._next = None
        self._left.clear()
        self._staged.clear()

    def _start(self, wanted: Collection[Rows]) -> _Load | None:
        if not wanted:
            return None
        device = self._device
        if device not in self._streams:
            self._streams[device] = copy_stream(device)
        stream = self._streams[device]
        if stream is not None:
            return self._send(wanted, stream, device)
        waited_for = dict.fromkeys(rows for rows in wanted if not rows.ready())
        done = self._in_thread(lambda: (_read(waited_for), None)) if waited_for else None
        return None if done is None else _Load(waited_for, done)

    def _send(self, wanted: Collection[Rows], stream: CopyStream, device: torch.device) -> _Load | None:
        # Memory of the computing stream: what that stream does once it has read the rows can have it. With
        # `record_stream` it would stay taken until the host sees the copy end, and the host may be many layers ahead.
        try:
            targets = {rows: rows.room(device) for rows in wanted}
        except StoreReadError:
            return None  # whoever takes them finds out, and knows what to do
        free = stream.mark()
        found = _read(wanted) if all(rows.ready() for rows in wanted) else None
        done: Future[tuple[_Found, Any]] | None
        if found is not None and all(stream.is_pinned(part) for part in _parts(found)):
            done = Future()
            done.set_result(_copied(found, stream, list(_parts(found)), targets, free))
        else:
            done = self._in_thread(lambda: self._by_pinned_memory(wanted, stream, targets, free))
        return None if done is None else _Load(wanted, done, stream, device)

    def _by_pinned_memory(
        self, wanted: Collection[Rows], stream: CopyStream, targets: Mapping[Rows, list[torch.Tensor]], free: Any
    ) -> tuple[_Found, Any]:
        found = _read(wanted)
        while len(self._staged) >= _MAX_STAGED:
            other, arrived = self._staged.popleft()[:2]
            other.finish(arrived)
        staged = [part if stream.is_pinned(part) else stream.pin(part) for part in _parts(found)]
        result = _copied(found, stream, staged, targets, free)
        self._staged.append((stream, result[1], staged))
        return result

    def _in_thread(self, work: Callable[[], tuple[_Found, Any]]) -> Future[tuple[_Found, Any]] | None:
        inference = torch.is_inference_mode_enabled()  # a mode of this thread, which its tensors must be written in

        def run() -> tuple[_Found, Any]:
            with torch.inference_mode(inference):
                return work()

        try:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, THREAD_NAME)
                renew_in_children(self)
            return self._thread.submit(run)
        except RuntimeError:  # no more threads are to be had; the work must not be done later, for nobody
            self._thread = None
            return None


def _read(wanted: Iterable[Rows]) -> _Found:
    """Rows on the CPU, or why they cannot be read: whoever takes them knows what to do."""
    found: _Found = {}
    for rows in wanted:
        try:
            found[rows] = rows.read()
        except StoreReadError as exc:
            found[rows] = exc
    return found


def _parts(found: _Found) -> Iterable[torch.Tensor]:
    return (part for parts in found.values() if not isinstance(parts, StoreReadError) for part in parts)


def _copied(
    found: _Found,
    stream: CopyStream,
    parts: Sequence[torch.Tensor],
    targets: Mapping[Rows, list[torch.Tensor]],
    free: Any,
) -> tuple[_Found, Any]:
    """What was found as it will be on a device, and the event of its arrival there."""
    there: _Found = {rows: exc if isinstance(exc, StoreReadError) else targets[rows] for rows, exc in found.items()}
    return there, stream.copy(parts, list(_parts(there)), free)
