"""The RAM tier: entries that were stored or read lately stay in memory."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .base import Store, StoredEntry
from .entry import StoreReadError
from .forks import renew_in_children
from .host import HostMemory
from .layer import TierOver
from .policy import protected_goes_first

Key = tuple[str, str, str]

logger = logging.getLogger(__name__)


class MemoryEntry:
    """An entry whose tensors are in memory. They are shared between requests: nobody writes to them.

    Args:
        tensors (`Mapping[str, torch.Tensor]`): CPU tensors.
        fields (`Mapping[str, str]`): the fields it was stored with.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], fields: Mapping[str, str]) -> None:
        self._tensors = tensors
        self.fields = fields
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())

    def keys(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._get(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._get(name).dtype

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        tensor = self._get(name)
        if not 0 <= start <= stop <= tensor.shape[0]:
            raise StoreReadError(f"rows {start}:{stop} are not in tensor {name!r} of shape {tuple(tensor.shape)}.")
        return tensor[start:stop]

    def ready(self, name: str, start: int, stop: int) -> bool:
        return True

    def _get(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise StoreReadError(f"there is no tensor {name!r}, only {self.keys()}.") from None


def in_memory(entry: StoredEntry) -> MemoryEntry:
    """A copy of an entry in memory, pinned where there is CUDA and that can be, so that it travels to the device by
    itself.

    Raises:
        `StoreReadError`: it cannot be read.
    """
    memory = HostMemory(pins=torch.cuda.is_available())
    tensors = {name: memory.copy(entry.rows(name, 0, entry.shape(name)[0])) for name in entry.keys()}
    return MemoryEntry(tensors, dict(entry.fields))


@dataclass
class _Kept:
    entry: MemoryEntry
    used: float


class RamTier(TierOver):
    """Keeps recently used entries in memory, in front of another tier.

    What is stored stays as it is, without a copy. What is read from below is copied at its second use, by a thread
    that nobody waits for, so that images that come once leave nothing here, and what is stored once makes room before
    what was used again.

    Args:
        below (`Store`): the next tier.
        max_bytes (`int`): bytes that the tensors may take together.
        clock (`Callable[[], float]`, *optional*): seconds that never go back.
    """

    def __init__(self, below: Store, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(below, max_bytes)
        self._clock = clock
        self._start_over()
        renew_in_children(self)

    def _start_over(self) -> None:
        self._lock = threading.Lock()
        self._probation: OrderedDict[Key, _Kept] = OrderedDict()  # least recently used first, as in the next one
        self._protected: OrderedDict[Key, _Kept] = OrderedDict()
        self._used_once: OrderedDict[Key, None] = OrderedDict()
        self._bytes = self._probation_bytes = 0
        self._copying: OrderedDict[Key, StoredEntry] = OrderedDict()
        self._copier: threading.Thread | None = None

    def after_fork(self) -> None:
        if self._lock.locked():
            self._start_over()  # another thread was changing what it guards
        self._lock = threading.Lock()  # one that had just come through may not have said so yet
        self._copying.clear()
        self._copier = None  # threads do not come along

    @property
    def dropped(self) -> int:
        return self.below.dropped

    @property
    def ram_bytes(self) -> int:
        """Bytes of the entries in memory."""
        return self._bytes

    def get(self, kind: str, group: str, name: str) -> StoredEntry | None:
        key = (kind, group, name)
        with self._lock:
            kept = self._take(key)
            if kept is not None:
                self._protect(key, kept.entry)
        if kept is not None:
            self.touch(kind, group, name)  # else what is used most would be the first to leave the disk
            return kept.entry
        entry = self.below.get(kind, group, name)
        if entry is not None and self._second_use(key) and self._has_place_for(entry.nbytes):
            self._copy(key, entry)
        return entry

    def names(self, kind: str, group: str) -> list[str]:
        return self.below.names(kind, group)

    def put(
        self,
        kind: str,
        group: str,
        name: str,
        tensors: dict[str, torch.Tensor],
        fields: dict[str, str],
        max_in_group: int | None = None,
    ) -> int:
        written = self.below.put(kind, group, name, tensors, fields, max_in_group)
        if written:
            key, entry = (kind, group, name), MemoryEntry(dict(tensors), dict(fields))
            with self._lock:
                self._forget(key)
                if self._has_place_for(entry.nbytes):
                    self._make_room(entry.nbytes)
                    self._probation[key] = _Kept(entry, self._clock())
                    self._bytes += entry.nbytes
                    self._probation_bytes += entry.nbytes
        return written

    def discard(self, kind: str, group: str, name: str) -> None:
        with self._lock:
            self._forget((kind, group, name))
        self.below.discard(kind, group, name)

    def nbytes(self) -> int:
        return self.below.nbytes()

    def clear(self) -> None:
        with self._lock:
            self._probation.clear()
            self._protected.clear()
            self._used_once.clear()
            self._copying.clear()
            self._bytes = self._probation_bytes = 0
        self.below.clear()

    def flush(self) -> None:
        """Waits for copies and writes."""
        with self._lock:
            copier = self._copier
        if copier is not None:
            copier.join()
        self.below.flush()

    def close(self) -> None:
        self.below.close()

    def _has_place_for(self, nbytes: int) -> bool:
        # what takes no bytes would never have to leave
        return 0 < nbytes <= self.max_bytes

    def _second_use(self, key: Key) -> bool:
        with self._lock:
            if key in self._used_once:
                del self._used_once[key]
                return True
            self._used_once[key] = None
            while len(self._used_once) > 4096:
                self._used_once.popitem(last=False)
            return False

    def _copy(self, key: Key, entry: StoredEntry) -> None:
        with self._lock:
            self._copying.setdefault(key, entry)
            if self._copier is not None and self._copier.is_alive():
                return
            copier = threading.Thread(target=self._copy_all, name="vlcache-copier")
            try:
                copier.start()
            except RuntimeError:  # no more threads are to be had
                self._copying.clear()
            else:
                self._copier = copier

    def _copy_all(self) -> None:
        while True:
            with self._lock:
                if not threading.main_thread().is_alive():
                    self._copying.clear()  # the process waits for this thread to end
                if not self._copying:
                    self._copier = None
                    return
                key, entry = next(iter(self._copying.items()))
            copy = None
            try:
                copy = in_memory(entry)
            except StoreReadError:
                pass  # whoever reads it next finds out, and knows what to do
            except Exception as exc:  # such as too little memory
                logger.debug("no copy was made of an entry: %s", exc)
            with self._lock:
                if self._copying.get(key) is not entry:
                    continue  # it was replaced or discarded meanwhile
                del self._copying[key]
                if copy is not None:
                    self._take(key)
                    self._make_room(copy.nbytes)
                    self._protect(key, copy)

    # --- called under the lock

    def _forget(self, key: Key) -> None:
        self._copying.pop(key, None)
        self._take(key)

    def _take(self, key: Key) -> _Kept | None:
        kept = self._probation.pop(key, None)
        if kept is not None:
            self._probation_bytes -= kept.entry.nbytes
        else:
            kept = self._protected.pop(key, None)
        if kept is not None:
            self._bytes -= kept.entry.nbytes
        return kept

    def _protect(self, key: Key, entry: MemoryEntry) -> None:
        self._protected[key] = _Kept(entry, self._clock())
        self._bytes += entry.nbytes

    def _make_room(self, nbytes: int) -> None:
        while self._bytes + nbytes > self.max_bytes:
            first = next(iter(self._probation.items()), None)
            protected = next(iter(self._protected.items()), None)
            if protected_goes_first(
                self._probation_bytes,
                self.max_bytes,
                first and first[1].used,
                protected and protected[1].used,
                self._clock(),
            ):
                first = protected
            assert first is not None  # what is not there takes no bytes
            self._take(first[0])
