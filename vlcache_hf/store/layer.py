"""What a tier in front of another one passes on."""

from __future__ import annotations

from typing import Any

from .base import Store


class TierOver:
    """A tier in front of another one: everything that it does not do itself is done below.

    Args:
        below (`Store`): the next tier.
        max_bytes (`int`): bytes that this tier may hold.
    """

    def __init__(self, below: Store, max_bytes: int) -> None:
        self.below = below
        self.max_bytes = max_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.below, self.max_bytes)

    @property
    def faults(self) -> int:
        return self.below.faults

    def touch(self, kind: str, group: str, name: str) -> None:
        self.below.touch(kind, group, name)

    def accepts(self, nbytes: int) -> bool:
        return self.below.accepts(nbytes)

    def mark(self, key: str) -> None:
        self.below.mark(key)

    def marked(self, key: str) -> bool:
        return self.below.marked(key)
