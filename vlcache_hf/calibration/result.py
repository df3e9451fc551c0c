"""What `calibrate` gives."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..schedule import RecomputeSchedule
from .sensitivity import SensitivityCurves


@dataclass(frozen=True)
class BudgetResult:
    """What was found for one budget.

    Args:
        budget (`float`): the largest mean ratio.
        schedule (`RecomputeSchedule`): the schedule to use.
        candidates (`dict[str, RecomputeSchedule]`): `"uniform"`, `"greedy"`, `"optimal"` and, with `refine`,
            `"refined"`.
        report (`dict`): objectives, errors and costs of the candidates.
    """

    budget: float
    schedule: RecomputeSchedule
    candidates: dict[str, RecomputeSchedule]
    report: dict[str, Any]

    @property
    def folder_name(self) -> str:
        return f"mean-{self.budget:g}"


@dataclass(frozen=True)
class CalibrationResult:
    """Curves and schedules.

    Args:
        curves (`SensitivityCurves`): S_i(r).
        budgets (`tuple[BudgetResult, ...]`): one per budget.
        settings (`dict`): everything that the curves depend on.
        held_out (`dict`): real requests on held-out samples, by budget and schedule; empty without such samples.
    """

    curves: SensitivityCurves
    budgets: tuple[BudgetResult, ...]
    settings: dict[str, Any]
    held_out: dict[str, Any] = field(default_factory=dict)

    @property
    def schedules(self) -> dict[float, RecomputeSchedule]:
        """The schedule of each budget."""
        return {result.budget: result.schedule for result in self.budgets}

    def report(self) -> dict[str, Any]:
        """All but the curves, as JSON."""
        return {
            "settings": self.settings,
            "points": self.curves.points,
            "base_mse": self.curves.base,
            "budgets": {f"{result.budget:g}": result.report for result in self.budgets},
            "held_out": self.held_out,
        }

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `curves.json`, `report.json` and, in a folder for each budget, `vlcache_schedule.json`.

        Args:
            folder (`str` or `os.PathLike`): created when missing.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        for name, document in (("curves.json", self.curves.to_dict()), ("report.json", self.report())):
            (path / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        for result in self.budgets:
            result.schedule.save_pretrained(path / result.folder_name)
