"""What every tier of the store can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class StoredEntry(Protocol):
    """Read access to the tensors of one entry. Tensors are views: copy before writing to them."""

    @property
    def fields(self) -> Mapping[str, str]:
        """What was stored beside the tensors."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        ...

    def keys(self) -> list[str]:
        """Names of the tensors, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, without reading it."""
        ...

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `[start, stop)` of a tensor on the CPU. Raises `StoreReadError`. May be called in several threads."""
        ...

    def ready(self, name: str, start: int, stop: int) -> bool:
        """Whether `rows` of these has nothing to wait for."""
        ...


class Store(Protocol):
    """A tier: keeps entries, dicts of CPU tensors, under a kind, a group and a name (two 256-bit digests).

    Apart from malformed keys nothing raises: any doubt is a miss, and trouble is logged once and counted in `faults`.
    """

    @property
    def faults(self) -> int:
        """Bad entries met and operations failed so far."""
        ...

    @property
    def dropped(self) -> int:
        """Entries that were not stored because too many were waiting to be written."""
        ...

    def get(self, kind: str, group: str, name: str) -> StoredEntry | None: ...

    def touch(self, kind: str, group: str, name: str) -> None:
        """Makes an entry the most recently used one, as `get` does."""
        ...

    def names(self, kind: str, group: str) -> list[str]: ...

    def accepts(self, nbytes: int) -> bool: ...

    def put(
        self,
        kind: str,
        group: str,
        name: str,
        tensors: dict[str, torch.Tensor],
        fields: dict[str, str],
        max_in_group: int | None = None,
    ) -> int: ...

    def discard(self, kind: str, group: str, name: str) -> None: ...

    def mark(self, key: str) -> None: ...

    def marked(self, key: str) -> bool: ...

    def nbytes(self) -> int: ...

    def clear(self) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...
