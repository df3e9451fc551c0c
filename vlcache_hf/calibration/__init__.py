"""Recompute schedules measured on a model (paper sections 3.2 and 4.1)."""

from .plots import plot
from .result import BudgetResult, CalibrationResult
from .run import calibrate
from .samples import CalibrationSample, TokenSample
from .sensitivity import SensitivityCurves

__all__ = [
    "BudgetResult",
    "CalibrationResult",
    "CalibrationSample",
    "SensitivityCurves",
    "TokenSample",
    "calibrate",
    "plot",
]
