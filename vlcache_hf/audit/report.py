"""What an audit found: rates with their uncertainty, and what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

# Of the normal distribution: two-sided 95 %.
Z = 1.959964


@dataclass(frozen=True)
class Rate:
    """A share with its 95 % Wilson interval, which is honest about few samples.

    Args:
        count (`int`), total (`int`): so many of so many.
    """

    count: int
    total: int

    @property
    def value(self) -> float:
        return self.count / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper bound; `(0, 1)` where nothing was seen."""
        n, square = self.total, Z * Z
        if not n:
            return 0.0, 1.0
        centre = self.count + square / 2
        spread = Z * math.sqrt(self.count * (n - self.count) / n + square / 4)
        low = 0.0 if self.count == 0 else (centre - spread) / (n + square)
        return low, 1.0 if self.count == n else (centre + spread) / (n + square)

    def to_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "count": self.count,
            "total": self.total,
            "value": _number(self.value),
            "low": low,
            "high": high,
        }


def prompts_needed(limit: float) -> int:
    """How many samples without a single event show that a rate lies below `limit`."""
    return math.ceil(Z * Z * (1 - limit) / limit)


@dataclass(frozen=True)
class Measure:
    """One prompt computed in one way, against its full computation.

    Args:
        first_kl (`float`): KL divergence of the first token's distribution from that of the full computation, nats.
        answer_kl (`float`): the mean of it over the full computation's answer.
        first_flip (`bool`): whether the most likely first token differs.
        flip (`bool`): whether the greedy answer differs anywhere.
        recomputed (`float`): share of the image tokens that was computed, the mean over layers.
        escalated (`bool`): whether the guard had it computed in full.
    """

    first_kl: float
    answer_kl: float
    first_flip: bool
    flip: bool
    recomputed: float
    escalated: bool = False


@dataclass(frozen=True)
class CaseResult:
    """One way to compute prompts, over all of them.

    Args:
        label (`str`): `"exact hit"`, or the schedule, with the policy where it is not the default.
        schedule (`str`), policy (`str`): the settings; empty for the exact hit.
        prompts (`int`): how many were computed so.
        first_kl (`float`), first_kl_p95 (`float`), answer_kl (`float`): mean and 95th percentile, see `Measure`.
        first_flips (`Rate`), flips (`Rate`): prompts whose first token, and whose answer, differ.
        recomputed (`float`): mean share of image tokens computed.
        escalated (`int`): prompts that the guard had computed in full.
        guard_threshold (`float`, *optional*): the highest at which the guard would keep the share of answers that
            differ within the limit; `None` where it was on, and without prompts.
    """

    label: str
    schedule: str
    policy: str
    prompts: int
    first_kl: float
    first_kl_p95: float
    answer_kl: float
    first_flips: Rate
    flips: Rate
    recomputed: float
    escalated: int
    guard_threshold: float | None = None

    @classmethod
    def of(
        cls, label: str, schedule: str, policy: str, measures: Sequence[Measure], guard_threshold: float | None = None
    ) -> CaseResult:
        """Adds the measures of some prompts up."""
        first = [measure.first_kl for measure in measures]
        return cls(
            label=label,
            schedule=schedule,
            policy=policy,
            prompts=len(measures),
            first_kl=mean(first),
            first_kl_p95=float(np.percentile(first, 95)) if first else math.nan,
            answer_kl=mean([measure.answer_kl for measure in measures]),
            first_flips=Rate(sum(measure.first_flip for measure in measures), len(measures)),
            flips=Rate(sum(measure.flip for measure in measures), len(measures)),
            recomputed=mean([measure.recomputed for measure in measures]),
            escalated=sum(measure.escalated for measure in measures),
            guard_threshold=guard_threshold,
        )

    def to_dict(self) -> dict[str, Any]:
        rates = {"first_flips": self.first_flips.to_dict(), "flips": self.flips.to_dict()}
        return {
            name: _number(value) if isinstance(value, float) else value
            for name, value in {**asdict(self), **rates}.items()
        }


def mean(values: Sequence[float]) -> float:
    """The mean, not a number for none."""
    return sum(values) / len(values) if values else math.nan


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


@dataclass(frozen=True)
class AuditReport:
    """The answer of `audit`.

    Args:
        model (`str`): the model, with digits that stand for its weights.
        prompts (`int`): prompts that were audited.
        answer_tokens (`float`): mean length of the answers, on which it depends how many differ.
        in_operation (`dict[str, int]`): in the order of the file, with the default settings: prompts that would be
            `"exact"` hits, `"reused"` from another context, or a `"miss"`.
        same_context (`int`): prompts whose earlier prompt gave an exact hit: nothing is reused from elsewhere there,
            so they are left out of `cases`.
        several_images (`int`): prompts with several images, of which lossless hits only are reused unless
            `lossy_multi_image` is set: left out, too.
        exact (`CaseResult`): exact hits: what of the differences below is kernel noise.
        cases (`list[CaseResult]`): reuse from another context.
        deviations (`list[float]`): what the guard sees, by prompt.
        guard_threshold (`float`): above which it acts: the setting, else that of the schedule `"auto"`.
        max_flips (`float`): the share of answers that may differ.
        failed (`list[dict]`): prompts that could not be audited, with the reason.
    """

    model: str
    prompts: int
    answer_tokens: float
    in_operation: dict[str, int]
    same_context: int
    several_images: int
    exact: CaseResult
    cases: list[CaseResult]
    deviations: list[float]
    guard_threshold: float
    max_flips: float
    failed: list[dict[str, str]] = field(default_factory=list)

    @property
    def guard_acts(self) -> Rate:
        """Prompts on which the guard would act."""
        return self.above(self.guard_threshold)

    def above(self, threshold: float) -> Rate:
        """Prompts whose deviation is above a threshold."""
        return Rate(sum(d > threshold for d in self.deviations), len(self.deviations))

    @property
    def recommendation(self) -> list[str]:
        """What to do, in sentences."""
        return recommend(self)

    def to_dict(self) -> dict[str, Any]:
        deviations = self.deviations
        return {
            "model": self.model,
            "prompts": self.prompts,
            "answer_tokens": _number(self.answer_tokens),
            "in_operation": self.in_operation,
            "same_context": self.same_context,
            "several_images": self.several_images,
            "exact": self.exact.to_dict(),
            "cases": [case.to_dict() for case in self.cases],
            "guard": {
                "threshold": self.guard_threshold,
                "deviation": _number(mean(deviations)),
                "deviation_p95": float(np.percentile(deviations, 95)) if deviations else None,
                "acts": self.guard_acts.to_dict(),
            },
            "max_flips": self.max_flips,
            "recommendation": self.recommendation,
            "failed": self.failed,
        }


def recommend(report: AuditReport) -> list[str]:
    """The cheapest case that is shown to stay below `max_flips`, or what keeps it from being one."""
    limit, cases = report.max_flips, [case for case in report.cases if case.prompts]
    lines = []
    by_cost = sorted(cases, key=lambda case: (case.recomputed, case.flips.value))
    shown = next((case for case in by_cost if case.flips.interval[1] <= limit), None)
    likely = next((case for case in by_cost if case.flips.value <= limit), None)
    if not cases:
        lines.append("No prompt was reused from another context, so no schedule can be recommended.")
    elif shown is not None:
        lines.append(f"Recommended: {_said(shown)}. That is within the {percent(limit)} of answers that may differ.")
    elif likely is not None:
        few = prompts_needed(limit)
        lines.append(
            f"Likely: {_said(likely)}. But {likely.prompts} prompts are too few to show that at most {percent(limit)} "
            f"of answers differ: that takes {few:,} without a flip, and more with some. "
            'Until then reuse="exact" is the safe choice.'
        )
    else:
        best = min(cases, key=lambda case: (case.flips.value, case.answer_kl))
        lines.append(
            f'Recommended: reuse="exact". With every schedule more than {percent(limit)} of answers differ; the best '
            f"is {_said(best)}."
        )
        lines += _guarded(report, cases)
    hits = report.in_operation["exact"] + report.in_operation["reused"]
    if hits and report.in_operation["reused"]:
        lost = Rate(report.in_operation["reused"], hits)
        lines.append(
            f'reuse="exact" computes {lost.count} of {hits} hits in full, {percent(lost.value)} of them, when they '
            "first come in another context."
        )
    elif hits:
        lines.append('All hits are exact in this order of prompts: reuse="exact" costs none of them.')
    else:
        lines.append("No image comes twice in these prompts: in this order nothing is a hit.")
    if report.exact.flips.count:
        lines.append(
            f"Exact hits too differ in {report.exact.flips.count} of {report.exact.prompts} answers: that much is "
            "kernel noise in this dtype."
        )
    return lines


def _guarded(report: AuditReport, cases: Sequence[CaseResult]) -> list[str]:
    """The cheapest case with a guard that is calibrated on these prompts."""

    def computed(case: CaseResult) -> float:
        above = report.above(case.guard_threshold or 0.0)
        return above.value + (1 - above.value) * case.recomputed

    known = [case for case in cases if case.guard_threshold]
    if not known:
        return []
    best = min(known, key=computed)
    above = report.above(best.guard_threshold or 0.0)
    allowed = Rate(math.floor(report.max_flips * best.prompts + 1e-9), best.prompts)
    return [
        f'Or {_setting(best)}, guard="escalate", guard_threshold={best.guard_threshold}: of these {best.prompts} '
        f"prompts {above.count} would be computed in full, and at most {allowed.count} other answers differ "
        f"(95 % CI of other prompts {interval(allowed)})."
    ]


def _said(case: CaseResult) -> str:
    return (
        f"{_setting(case)}, where {case.flips.count} of {case.prompts} answers differ "
        f"({percent(case.flips.value)}, 95 % CI {interval(case.flips)}) and {percent(case.recomputed)} of image "
        "tokens are recomputed"
    )


def _setting(case: CaseResult) -> str:
    policy = f', policy="{case.policy}"' if case.policy != "prefix" else ""
    schedule = case.schedule if case.schedule.replace(".", "").isdigit() else f'"{case.schedule}"'
    return f"schedule={schedule}{policy}"


def percent(share: float) -> str:
    """`0.1234` as `12.3 %`."""
    return f"{100 * share:.3g} %"


def interval(rate: Rate) -> str:
    """`0.0-16.1 %`."""
    low, high = rate.interval
    return f"{100 * low:.1f}-{100 * high:.1f} %"
