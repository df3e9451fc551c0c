"""How the error of the logits falls when one layer alone recomputes: S_i(r) (paper section 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .allocation import Table

# The ratios that are measured first; between them only where a curve bends
COARSE = (0.0, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3)
# Below this, differences of logits are rounding
NOISE = 1e-10

# The errors of some choices of one sample: counts of true tokens per layer in, one error each out
Evaluate = Callable[[Sequence[Sequence[int]]], Sequence[float]]


@dataclass(frozen=True)
class SampleCurves:
    """The measured points of one sample.

    Args:
        tokens (`int`): image tokens.
        base (`float`): the error where no layer recomputes, S(0).
        layers (`tuple[dict[int, float], ...]`): per layer, the error by number of recomputed tokens. Layer 0 has the
            point 0 only: its keys and values depend on pixels alone, so they are never wrong.
    """

    tokens: int
    base: float
    layers: tuple[dict[int, float], ...]

    def on(self, ratios: Sequence[float]) -> Table:
        """The curves at some ratios, `(layers, ratios)`: piecewise linear in the number of tokens."""
        wanted = counts(ratios, self.tokens)
        rows = []
        for curve in self.layers:
            known = sorted(curve)
            rows.append(np.interp(wanted, known, [curve[at] for at in known]))
        return np.array(rows)

    def to_dict(self) -> dict[str, Any]:
        layers = [[[at, curve[at]] for at in sorted(curve)] for curve in self.layers]
        return {"tokens": self.tokens, "base": self.base, "layers": layers}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SampleCurves:
        return cls(data["tokens"], data["base"], tuple(dict(map(tuple, curve)) for curve in data["layers"]))


@dataclass(frozen=True)
class SensitivityCurves:
    """S_i(r), the mean over the samples, on a grid.

    Args:
        ratios (`tuple[float, ...]`): the grid, 0 first.
        mean (array of shape `(layers, ratios)`): S_i(r).
        error (array of shape `(layers, ratios)`): its standard error over samples.
        samples (`tuple[SampleCurves, ...]`): what was measured.
    """

    ratios: tuple[float, ...]
    mean: Table
    error: Table
    samples: tuple[SampleCurves, ...]

    @classmethod
    def over(cls, samples: Sequence[SampleCurves], ratios: Sequence[float]) -> SensitivityCurves:
        values = np.stack([sample.on(ratios) for sample in samples])
        spread = values.std(axis=0, ddof=1) if len(samples) > 1 else np.zeros(values.shape[1:])
        return cls(tuple(ratios), values.mean(axis=0), spread / len(samples) ** 0.5, tuple(samples))

    @property
    def base(self) -> float:
        """S(0)."""
        return float(self.mean[0, 0])

    @property
    def points(self) -> int:
        """How many points were measured."""
        return sum(len(curve) - 1 for sample in self.samples for curve in sample.layers) + len(self.samples)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ratios": list(self.ratios),
            "mean": self.mean.tolist(),
            "standard_error": self.error.tolist(),
            "samples": [sample.to_dict() for sample in self.samples],
        }


def counts(ratios: Sequence[float], tokens: int) -> list[int]:
    """`floor(r * T)`, with the hair of slack that `RecomputeSchedule.tokens` gives."""
    return [min(tokens, int(ratio * tokens + 1e-9)) for ratio in ratios]


def measure(
    evaluate: Evaluate,
    tokens: int,
    num_layers: int,
    ratios: Sequence[float],
    tolerance: float,
    coarse: Sequence[float] = COARSE,
) -> SampleCurves:
    """Measures the curves of one sample, with points only where they are needed.

    All layers start with a few ratios. Then every interval is measured at its middle, and cut in two there where the
    straight line was off by more than the tolerance. Ratios that recompute as many tokens are one point.

    Args:
        evaluate (`Callable`): the errors of some choices, which are computed together.
        tokens (`int`): image tokens, T.
        num_layers (`int`): number of decoder layers.
        ratios (sequence of `float`): the grid, from 0 up.
        tolerance (`float`): largest error of the straight line, as a share of S(0).
        coarse (sequence of `float`, *optional*): the ratios to start with.
    """
    grid = sorted({0, *counts(ratios, tokens)})
    (base,) = evaluate([[0] * num_layers])
    curves: list[dict[int, float]] = [{0: base} for _ in range(num_layers)]
    limit = max(tolerance * base, NOISE)
    wanted = [min(count, grid[-1]) for count in counts(coarse, tokens)]
    # the coarse points on the grid, by their place in it
    first = sorted({0, len(grid) - 1, *(max(i for i, at in enumerate(grid) if at <= count) for count in wanted)})

    def take(places: list[tuple[int, int]]) -> None:
        found = evaluate([_only(layer, grid[place], num_layers) for layer, place in places])
        for (layer, place), error in zip(places, found):
            curves[layer][grid[place]] = error

    layers = range(1, num_layers)
    if base > NOISE:
        take([(layer, place) for layer in layers for place in first[1:]])
        spans = [(layer, a, b) for layer in layers for a, b in zip(first, first[1:]) if b - a > 1]
        while spans:
            take([(layer, (a + b) // 2) for layer, a, b in spans])
            halves = []
            for layer, a, b in spans:
                middle, curve = (a + b) // 2, curves[layer]
                ends = [grid[a], grid[b]]
                line = np.interp(grid[middle], ends, [curve[at] for at in ends])
                if abs(line - curve[grid[middle]]) > limit:
                    halves += [(layer, a, middle), (layer, middle, b)]
            spans = [(layer, a, b) for layer, a, b in halves if b - a > 1]
    return SampleCurves(tokens, base, tuple(curves))


def _only(layer: int, count: int, num_layers: int) -> list[int]:
    return [count if index == layer else 0 for index in range(num_layers)]
