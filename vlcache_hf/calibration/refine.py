"""Schedules by what they really do: a search that starts from the allocations and measures whole schedules.

Allocation takes a layer's sensitivity to be independent of what other layers do (paper section 4.1). Whole schedules
cost as little to measure as single layers do (see `probe`), so the assumption can be checked, and mended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .allocation import Table

Levels = tuple[int, ...]

# Errors of whole schedules, `(schedules, samples)`
Measure = Callable[[Sequence[Levels]], Table]

WIDTH = 48
ROUNDS = 24
PATIENCE = 4
_STEPS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Refined:
    """What the search found.

    Args:
        levels (`tuple[int, ...]`): the schedule.
        error (`float`): its mean error on the samples of the calibration.
        start (`str`): the start that was best.
        starts (`dict[str, float]`): mean error of every start.
        measured (`int`): how many schedules were measured.
    """

    levels: Levels
    error: float
    start: str
    starts: dict[str, float]
    measured: int


def uniform(layers: int, budget: int) -> Levels:
    """The same level everywhere, and one more in the first layers for what is left of the budget."""
    level, more = divmod(budget, layers)
    return tuple(level + (index < more) for index in range(layers))


def first_layers(layers: int, budget: int, top: int) -> dict[str, Levels]:
    """The whole budget for the first m layers, for every m that it suffices for."""
    found = {m: min(top, budget // m) for m in range(1, layers + 1)}
    return {f"first {m}": (level,) * m + (0,) * (layers - m) for m, level in found.items() if level}


def search(
    measure: Measure,
    starts: dict[str, Levels],
    budget: int,
    top: int,
    seed: int,
    width: int = WIDTH,
    rounds: int = ROUNDS,
    patience: int = PATIENCE,
) -> Refined:
    """Moves the budget between layers as long as the error of the whole falls.

    A round measures a random choice of moves and makes the best of them, if it is better on the samples by more than
    the standard error of the difference: less may be chance.

    Args:
        measure (`Callable`): errors of schedules.
        starts (`dict[str, tuple[int, ...]]`): schedules to start from, by name.
        budget (`int`): sum of levels that may be spent.
        top (`int`): the highest level.
        seed (`int`): of the choice of moves.
        width (`int`, *optional*), rounds (`int`, *optional*): moves of a round, and how many rounds at most.
        patience (`int`, *optional*): rounds without a better schedule after which the search ends.
    """
    names = list(starts)
    errors = measure([starts[name] for name in names])
    best = int(errors.mean(axis=1).argmin())
    levels, own = starts[names[best]], errors[best]
    rng, seen, failures = np.random.default_rng(seed), set(starts.values()), 0
    for _ in range(rounds):
        tried = _draw(moves(levels, budget, top), seen, width, rng)
        if not tried or failures == patience:
            break
        seen.update(tried)
        found = measure(tried)
        at = int(found.mean(axis=1).argmin())
        gain = own - found[at]
        noise = gain.std(ddof=1) / len(gain) ** 0.5 if len(gain) > 1 else 0.0
        if gain.mean() > noise:
            levels, own, failures = tried[at], found[at], 0
        else:
            failures += 1
    means = dict(zip(names, errors.mean(axis=1).tolist()))
    return Refined(levels, float(own.mean()), names[best], means, len(seen))


def moves(levels: Levels, budget: int, top: int) -> set[Levels]:
    """Schedules near one: the first layers lifted to a level, paid for by later layers or by a cap on the first ones.

    Lifting and lowering keep the order: what stands before a lifted layer is at least as high, what follows a lowered
    one no higher.
    """
    found = set()
    old = np.array(levels)
    for last in range(len(levels)):
        for step in _STEPS:
            level = levels[last] + step
            if level > top:
                break
            lifted = np.maximum(old, np.where(np.arange(len(levels)) <= last, level, 0))
            for paid in (*_cut_tails(lifted, last, budget), *_caps(lifted, level, budget)):
                found.add(tuple(paid.tolist()))
    return found - {levels}


def _cut_tails(lifted: np.ndarray, last: int, budget: int) -> Iterable[np.ndarray]:
    """The layers from some layer on lowered to the highest level that fits the budget."""
    if lifted.sum() <= budget:
        yield lifted
        return
    for first in range(last + 1, len(lifted)):
        for level in range(int(lifted[first]) - 1, -1, -1):
            lowered = np.concatenate([lifted[:first], np.minimum(lifted[first:], level)])
            if lowered.sum() <= budget:
                yield lowered
                break


def _caps(lifted: np.ndarray, level: int, budget: int) -> Iterable[np.ndarray]:
    """All layers under the highest cap that fits the budget."""
    for cap in range(int(lifted[0]) - 1, level - 1, -1):
        lowered = np.minimum(lifted, cap)
        if lowered.sum() <= budget:
            yield lowered
            return


def _draw(candidates: set[Levels], seen: set[Levels], width: int, rng: np.random.Generator) -> list[Levels]:
    fresh = sorted(candidates - seen)
    chosen = rng.permutation(len(fresh))[:width]
    return [fresh[index] for index in chosen]
