"""Which of two entries goes first when there is no room: segmented LRU.

An entry is on probation until it is used again after it was stored, and protected from then on. So images that come
once push out each other, and not those that come back.
"""

from __future__ import annotations

PROBATION_SHARE = 0.1  # of the cap, left to those on probation: a new working set has to start somewhere
PROTECTED_SECONDS = 24 * 3600.0  # after the last use; an old working set must not block a new one


def protected_goes_first(
    probation_bytes: int, cap: int, probation_use: float | None, protected_use: float | None, now: float
) -> bool:
    """
    Whether the least recently used protected entry has to go, rather than the least recently used one on probation.

    Args:
        probation_bytes (`int`): bytes of all entries on probation.
        cap (`int`): bytes that all entries may take.
        probation_use (`float`, *optional*): when the one on probation was last used; `None` when there is none.
        protected_use (`float`, *optional*): when the protected one was last used; `None` when there is none.
        now (`float`): the time, on the same clock.
    """
    if protected_use is None:
        return False
    if probation_use is None or probation_bytes <= PROBATION_SHARE * cap:
        return True
    return protected_use < min(probation_use, now - PROTECTED_SECONDS)
