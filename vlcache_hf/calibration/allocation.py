"""Which ratio each layer gets: sensitivities in, a schedule out (paper section 4.1, "Dynamic Recomputation").

minimise sum_l S_l(r_l) under mean(r) <= budget and r_1 >= ... >= r_L >= 0, every r on a grid of equal steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]

STEP = 0.002
MAX_RATIO = 0.3
# 0.025 * 36 / 0.002 is 449.99...: a hair of slack gives a budget all the steps it pays for
_SLACK = 1e-9


class Allocation(NamedTuple):
    """Levels on the grid, one per layer, and the sum of sensitivities that they have.

    Args:
        levels (`tuple[int, ...]`): the ratio of layer l is `levels[l] * step`.
        objective (`float`): sum over layers of `S_l`.
    """

    levels: tuple[int, ...]
    objective: float

    def ratios(self, step: float = STEP) -> tuple[float, ...]:
        # without the rounding 3 * 0.002 would be written to the file as 0.006000000000000001
        return tuple(round(level * step, 9) for level in self.levels)


def grid(step: float = STEP, max_ratio: float = MAX_RATIO) -> tuple[float, ...]:
    """Zero and the ratios of the paper's search, 0.002, 0.004, ..., 0.300."""
    return tuple(round(level * step, 9) for level in range(round(max_ratio / step) + 1))


def units(budget: float, layers: int, step: float = STEP) -> int:
    """How many grid steps, summed over layers, a mean ratio pays for.

    Args:
        budget (`float`): the largest mean ratio, in [0, 1].
        layers (`int`): number of decoder layers.
        step (`float`, *optional*): step of the grid.

    Raises:
        `ValueError`: the budget is out of range.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0.0 <= budget <= 1.0:
        raise ValueError(f"A budget is a mean ratio in [0, 1], got {budget!r}.")
    return int(budget * layers / step + _SLACK)


def objective(table: Table, levels: Sequence[int]) -> float:
    """The sum of sensitivities at some levels."""
    return float(sum(table[layer, level] for layer, level in enumerate(levels)))


def greedy(table: Table, budget: int) -> Allocation:
    """The paper's approximate solution: always the move that lowers the objective most for each step it costs.

    A move lifts one layer to a higher level, and with it all layers before it that stand lower: alone it would break
    the order. Curves need not be convex, so moves may be of any height; a move of one step would be stuck before the
    first flat stretch, and layer 0, which gains nothing, would hold all others down.

    Args:
        table (array of shape `(layers, levels)`): sensitivity of each layer at each level, level 0 is r = 0.
        budget (`int`): sum of levels that may be spent.
    """
    layers, heights = table.shape
    levels = np.zeros(layers, dtype=int)
    while True:
        left = budget - int(levels.sum())
        lift = np.maximum(np.arange(heights)[None] - levels[:, None], 0)
        gain = np.where(lift > 0, table[np.arange(layers), levels][:, None] - table, 0.0)
        # levels do not rise with the layer, so what a lift of layer l drags along is a sum over the layers up to l
        cost, gain = np.cumsum(lift, axis=0), np.cumsum(gain, axis=0)
        allowed = (lift > 0) & (cost <= left) & (gain > 0)
        if not allowed.any():
            return Allocation(tuple(levels.tolist()), objective(table, levels.tolist()))
        value = np.where(allowed, gain / np.maximum(cost, 1), -np.inf)
        layer, level = np.unravel_index(int(value.argmax()), value.shape)
        levels[: layer + 1] = np.maximum(levels[: layer + 1], level)


def optimal(table: Table, budget: int) -> Allocation:
    """The exact optimum, by dynamic programming over layer, level and budget, vectorised over the budget.

    With `F_l(g, b)` the least objective of layers `l...L` whose levels are at most `g` and add up to at most `b`:
    `F_l(g, b) = min(F_l(g - 1, b), S_l(g) + F_{l+1}(g, b - g))`. Where levels are equally good the lowest is taken.

    Args:
        table (array of shape `(layers, levels)`): sensitivity of each layer at each level, level 0 is r = 0.
        budget (`int`): sum of levels that may be spent.
    """
    layers, heights = table.shape
    budget = min(budget, layers * (heights - 1))
    after = np.zeros((heights, budget + 1))
    taken = np.zeros((layers, heights, budget + 1), dtype=bool)
    for layer in reversed(range(layers)):
        best = np.empty_like(after)
        best[0] = table[layer, 0] + after[0]
        taken[layer, 0] = True
        for level in range(1, heights):
            best[level] = best[level - 1]
            if level > budget:
                continue
            value = table[layer, level] + after[level, : budget + 1 - level]
            better = value < best[level, level:]
            best[level, level:][better] = value[better]
            taken[layer, level, level:] = better
        after = best
    levels, level, left = [], heights - 1, budget
    for layer in range(layers):
        while not taken[layer, level, left]:
            level -= 1
        levels.append(level)
        left -= level
    return Allocation(tuple(levels), objective(table, levels))


def rows_count(ratios: Sequence[float]) -> float:
    """The mean ratio of attention and MLP where rows that the next layer does not compute get keys and values only.

    The paper counts `mean(r_l)`. What layer l has to bring to its end are the rows of layer l + 1 (the last: none), so
    layer 0, whose keys and values depend on pixels alone, costs what layer 1 needs.
    """
    return sum(ratios[1:]) / len(ratios)
