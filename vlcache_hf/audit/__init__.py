"""How far reuse is from the full computation, on a user's own prompts and images."""

from .partial import PartialMismatch
from .report import AuditReport, CaseResult, Measure, Rate, recommend
from .run import audit
from .samples import AuditSample, SampleError, read_samples
from .settings import DEFAULT_SCHEDULES, WITHOUT_REUSE, AuditSettings
from .threshold import calibrated_threshold

__all__ = [
    "DEFAULT_SCHEDULES",
    "WITHOUT_REUSE",
    "AuditReport",
    "AuditSample",
    "AuditSettings",
    "CaseResult",
    "Measure",
    "PartialMismatch",
    "Rate",
    "SampleError",
    "audit",
    "calibrated_threshold",
    "read_samples",
    "recommend",
]
