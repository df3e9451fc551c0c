"""`VLCacheConfig.guard_threshold` for one model: what its own prompts say."""

from __future__ import annotations

from collections.abc import Sequence


def calibrated_threshold(deviations: Sequence[float], harmed: Sequence[bool], limit: float) -> float:
    """The highest threshold that lets little harm pass.

    Args:
        deviations (sequence of `float`): what the guard sees of each prompt.
        harmed (sequence of `bool`): whether reuse changed its answer.
        limit (`float`): share of all prompts that may be harmed and not above the threshold.

    Returns:
        `float`: one of `deviations`, at most the highest: nothing is known of what lies above. 0 where even the lowest
        lets too much harm pass.
    """
    found, passed = 0.0, 0
    order = sorted(zip(deviations, harmed, strict=True))
    for index, (deviation, harm) in enumerate(order):
        passed += harm
        if passed > limit * len(order) + 1e-9:
            break
        # of equal deviations all pass or none
        if index + 1 == len(order) or order[index + 1][0] > deviation:
            found = deviation
    return found
