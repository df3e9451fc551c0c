"""Write-behind: storing does not make the caller wait."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import torch

from .base import Store, StoredEntry
from .forks import renew_in_children
from .layer import TierOver
from .memory import Key, MemoryEntry

logger = logging.getLogger(__name__)


@dataclass
class _Job:
    entry: MemoryEntry
    tensors: dict[str, torch.Tensor]
    fields: dict[str, str]
    max_in_group: int | None
    wanted: bool = True


class WriteBehind(TierOver):
    """Hands entries to another tier in a background thread. What waits is served from memory.

    While more than a number of bytes waits, `accepts` says no, and counts it, since a miss is always acceptable. What
    it has said yes to is taken: a request that asked before it began may go over the bound with all it captured, which
    was in memory anyway, so that no image is too large to ever be stored. The queue is written out at the end of the
    process and by `flush()`. A forked child starts with an empty queue: what waits is the parent's to write.

    Args:
        below (`Store`): the tier that writes.
        max_bytes (`int`): bytes of waiting tensors from which on nothing more is accepted.

    Attributes:
        dropped (`int`): entries that were not accepted because the queue was full.
    """

    def __init__(self, below: Store, max_bytes: int) -> None:
        super().__init__(below, max_bytes)
        self.dropped = 0
        self.after_fork()
        renew_in_children(self)
        # bound to the object only weakly: a store that nobody holds any more has nothing left to flush
        atexit.register(_flush_at_exit, weakref.ref(self))

    def after_fork(self) -> None:
        """Starts over, with an empty queue."""
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Key, _Job] = OrderedDict()
        self._bytes = 0
        self._thread: threading.Thread | None = None

    def get(self, kind: str, group: str, name: str) -> StoredEntry | None:
        with self._changed:
            job = self._waiting.get((kind, group, name))
            if job is not None and job.wanted:
                return job.entry
        return self.below.get(kind, group, name)

    def names(self, kind: str, group: str) -> list[str]:
        with self._changed:
            waiting = [key[2] for key, job in self._waiting.items() if key[:2] == (kind, group) and job.wanted]
        waiting.reverse()  # the last one stored was the last one used
        return waiting + [name for name in self.below.names(kind, group) if name not in waiting]

    def accepts(self, nbytes: int) -> bool:
        """As `DiskStore.accepts`, and whether there is room in the queue.

        Args:
            nbytes (`int`): bytes of an entry's tensors.
        """
        if not self.below.accepts(nbytes):
            return False
        with self._changed:
            full = bool(self._waiting) and self._bytes >= self.max_bytes
            self.dropped += full
        if full:
            logger.info("The queue of entries to be written is full: %d not stored so far.", self.dropped)
        return not full

    def put(
        self,
        kind: str,
        group: str,
        name: str,
        tensors: dict[str, torch.Tensor],
        fields: dict[str, str],
        max_in_group: int | None = None,
    ) -> int:
        """As `DiskStore.put`, but returns at once, with the bytes that are about to be written."""
        entry = MemoryEntry(dict(tensors), dict(fields))
        if not self.below.accepts(entry.nbytes):
            return 0
        with self._changed:
            old = self._waiting.pop((kind, group, name), None)
            self._bytes += entry.nbytes - (0 if old is None else old.entry.nbytes)
            self._waiting[kind, group, name] = _Job(entry, tensors, fields, max_in_group)
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._write, name="vlcache-writer", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads are to be had
                    self._bytes -= self._waiting.pop((kind, group, name)).entry.nbytes
                    self.dropped += 1
                    return 0
                self._thread = thread
            self._changed.notify_all()
        return entry.nbytes

    def discard(self, kind: str, group: str, name: str) -> None:
        with self._changed:
            job = self._waiting.get((kind, group, name))
            if job is not None:
                job.wanted = False  # it may be on its way to the disk: the writer removes it again
        self.below.discard(kind, group, name)

    def nbytes(self) -> int:
        self.flush()
        return self.below.nbytes()

    def clear(self) -> None:
        with self._changed:
            for job in self._waiting.values():
                job.wanted = False
        self.flush()
        self.below.clear()

    def flush(self) -> None:
        """Waits until all that waits is written."""
        with self._changed:
            while self._waiting and self._thread is not None and self._thread.is_alive():
                self._changed.wait(0.1)

    def close(self) -> None:
        self.flush()
        self.below.close()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if not self._changed.wait(5.0) and not self._waiting:
                        self._thread = None  # a later put starts another one; an idle process keeps no thread
                        return
                key, job = next(iter(self._waiting.items()))
            if job.wanted:
                self.below.put(*key, job.tensors, job.fields, job.max_in_group)
            with self._changed:
                if self._waiting.get(key) is job:
                    del self._waiting[key]
                    self._bytes -= job.entry.nbytes
                self._changed.notify_all()
            if not job.wanted:
                self.below.discard(*key)


def _flush_at_exit(reference: weakref.ref[WriteBehind]) -> None:
    store = reference()
    if store is not None:
        store.flush()
