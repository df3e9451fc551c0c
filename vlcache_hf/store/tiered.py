"""Two tiers as one: what is near, and what many machines share."""

from __future__ import annotations

import torch

from .base import Store, StoredEntry
from .behind import WriteBehind
from .remote import RemoteStore


class Tiered:
    """Looks entries up in a local tier and then in a remote one, and stores them in both.

    What was found remotely is used at once, and goes into the local tier when all of its tensors have been read.

    Args:
        local (`Store`): the near tier. It keeps the flags.
        remote (`RemoteStore`): the far one.
        queue_bytes (`int`, *optional*): bytes of entries found remotely that may wait to be written to the local tier,
            by a background thread. By default they are written at once, while the reader waits.
    """

    def __init__(self, local: Store, remote: RemoteStore, queue_bytes: int | None = None) -> None:
        self.local = local
        self.remote = remote
        self.queue_bytes = queue_bytes
        self._front: Store = local if queue_bytes is None else WriteBehind(local, queue_bytes)

    def __reduce__(self) -> tuple:
        return Tiered, (self.local, self.remote, self.queue_bytes)

    @property
    def faults(self) -> int:
        return self.local.faults + self.remote.faults

    @property
    def dropped(self) -> int:
        # an entry found remotely that is not kept locally is not lost: it does not count
        return self.local.dropped + self.remote.dropped

    def get(self, kind: str, group: str, name: str) -> StoredEntry | None:
        near = self._front.get(kind, group, name)
        if near is not None:
            self.remote.touch(kind, group, name)  # else what all machines have would expire for those to come
            return near
        far = self.remote.get(kind, group, name)
        if far is not None and self._front.accepts(far.nbytes):
            fields = dict(far.fields)

            def keep(tensors: dict[str, torch.Tensor]) -> None:
                self._front.put(kind, group, name, tensors, fields)

            far.when_complete = keep
        return far

    def touch(self, kind: str, group: str, name: str) -> None:
        self._front.touch(kind, group, name)
        self.remote.touch(kind, group, name)

    def names(self, kind: str, group: str) -> list[str]:
        """Those of the local tier first, each part most recently used first."""
        near = self._front.names(kind, group)
        return near + [name for name in self.remote.names(kind, group) if name not in near]

    def accepts(self, nbytes: int) -> bool:
        return self.local.accepts(nbytes) or self.remote.accepts(nbytes)

    def put(
        self,
        kind: str,
        group: str,
        name: str,
        tensors: dict[str, torch.Tensor],
        fields: dict[str, str],
        max_in_group: int | None = None,
    ) -> int:
        """As `DiskStore.put`: the bytes of either tier, 0 when neither has stored it."""
        near = self.local.put(kind, group, name, tensors, fields, max_in_group)
        far = self.remote.put(kind, group, name, tensors, fields, max_in_group)
        return near or far

    def discard(self, kind: str, group: str, name: str) -> None:
        self._front.discard(kind, group, name)
        self.remote.discard(kind, group, name)

    def mark(self, key: str) -> None:
        self.local.mark(key)

    def marked(self, key: str) -> bool:
        return self.local.marked(key)

    def nbytes(self) -> int:
        """Bytes of the local tier: those that this machine has to keep."""
        return self._front.nbytes()

    def clear(self) -> None:
        """Empties both tiers: other machines lose their remote entries too."""
        self._front.clear()
        self.remote.clear()

    def flush(self) -> None:
        self._front.flush()
        self.remote.flush()

    def close(self) -> None:
        self._front.close()
        self.remote.close()
