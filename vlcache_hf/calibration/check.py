"""Schedules against each other in real requests, on samples that the calibration has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from ..schedule import RecomputeSchedule
from .allocation import Table
from .probe import Point, prepare, reuse
from .samples import TokenSample
from .workspace import Workspace

RESAMPLES = 10_000


@dataclass(frozen=True)
class Outcomes:
    """What real requests gave.

    Args:
        names (`tuple[str, ...]`): the schedules.
        mse (array of shape `(schedules, samples)`): error of the answers' logits.
        flips (array of shape `(schedules, samples)`): 1 where greedy decoding would give another answer.
    """

    names: tuple[str, ...]
    mse: Table
    flips: Table

    def against(self, baseline: str, seed: int = 0) -> dict[str, dict[str, Any]]:
        """Means with 95 % intervals, and each schedule's error over the baseline's on the same samples.

        Args:
            baseline (`str`): name of the schedule to compare with.
            seed (`int`, *optional*, defaults to 0): of the bootstrap, which draws the same samples for all schedules.
        """
        number = self.mse.shape[1]
        draws = np.random.default_rng(seed).integers(number, size=(RESAMPLES, number))
        base = self.mse[self.names.index(baseline)]
        report = {}
        for name, mse, flips in zip(self.names, self.mse, self.flips):
            means, base_means = mse[draws].mean(axis=1), base[draws].mean(axis=1)
            ratios = means / np.where(base_means > 0, base_means, np.nan)
            report[name] = {
                "mse": float(mse.mean()),
                "mse_interval": _interval(means),
                "of_baseline": float(mse.mean() / base.mean()) if base.mean() > 0 else None,
                "of_baseline_interval": _interval(ratios) if np.isfinite(ratios).all() else None,
                "flipped": int(flips.sum()),
                "flipped_interval": wilson(int(flips.sum()), number),
                "samples": number,
            }
        return report


def run(
    model: Any,
    samples: Sequence[TokenSample],
    schedules: Mapping[str, RecomputeSchedule],
    max_new_tokens: int,
    progress: bool = False,
) -> Outcomes:
    """Every sample through every schedule.

    Args:
        model: one of our models.
        samples (sequence of `TokenSample`): the samples.
        schedules (`dict[str, RecomputeSchedule]`): the schedules, by name.
        max_new_tokens (`int`): the longest answer, where a sample has none.
        progress (`bool`, *optional*, defaults to `False`): whether to show a bar.
    """
    shape = (len(schedules), len(samples))
    mse, flips = np.zeros(shape), np.zeros(shape)
    with Workspace() as workspace:
        for column in tqdm(range(len(samples)), desc="checking", unit="sample", disable=None if progress else True):
            prepared = prepare(model, samples[column], workspace, max_new_tokens)
            known: dict[tuple[int, ...], Point] = {}
            for row, schedule in enumerate(schedules.values()):
                same = schedule.tokens(prepared.tokens)  # on small images many schedules are the same request
                if same not in known:
                    known[same], _ = reuse(model, prepared, workspace, schedule=schedule)
                mse[row, column], flips[row, column] = known[same]
    return Outcomes(tuple(schedules), mse, flips)


def wilson(hits: int, number: int, z: float = 1.96) -> list[float]:
    """The 95 % interval of a share: right also where no or every sample hits."""
    share, square = hits / number, z * z / number
    middle = (share + square / 2) / (1 + square)
    half = z * (share * (1 - share) / number + square / number / 4) ** 0.5 / (1 + square)
    return [max(0.0, middle - half), min(1.0, middle + half)]


def _interval(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.quantile(values, (0.025, 0.975))]
