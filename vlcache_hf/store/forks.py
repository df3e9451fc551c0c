"""What a forked child must not take over as it is."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """Something with locks of its own."""

    def after_fork(self) -> None:
        """Called in a forked child, before anything else runs there. Other threads of the parent may have been in the
        middle of something: their locks will never be released, and what they guard may be half changed."""
        ...


_KNOWN: weakref.WeakSet[Forked] = weakref.WeakSet()


def renew_in_children(owner: Forked) -> None:
    """
    Lets forked children call `owner.after_fork()`.

    Locks are replaced there rather than held during each fork: a fork must not wait for whatever holds them, and
    holding several needs an order.

    Args:
        owner (`Forked`): held only weakly.
    """
    _KNOWN.add(owner)


def _in_child() -> None:
    for owner in list(_KNOWN):
        owner.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
