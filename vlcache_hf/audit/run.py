"""The audit itself: all prompts in their order, then each one by one."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..cache import VLCache
from ..config import VLCacheConfig
from ..options import model_label
from ..schedule_lookup import ModelFacts, resolve_schedule
from .measure import Bench, NotMeasured, measure
from .partial import PartialResults
from .report import AuditReport, CaseResult, Measure, mean
from .samples import AuditSample, earlier_prompts
from .settings import AuditSettings
from .threshold import calibrated_threshold


def audit(
    model: Any,
    processor: Any,
    samples: Sequence[AuditSample],
    settings: AuditSettings | None = None,
    partial: str | Path | None = None,
    progress: Callable[[], None] | None = None,
) -> AuditReport:
    """Measures how far reuse is from the full computation.

    Each sample is answered in full by the stock model, then computed once more along that answer as an exact hit and,
    after its images were met in another context, with every schedule and policy. Entries lie in a temporary folder;
    the model's own store is not touched.

    Args:
        model: one of our models, as it is or wrapped by PEFT, in `eval()`.
        processor: its processor.
        samples (sequence of `AuditSample`): the prompts, in the order in which they come.
        settings (`AuditSettings`, *optional*): what is tried.
        partial (`str` or `Path`, *optional*): file that keeps what is done; a second call goes on from there.
        progress (`Callable`, *optional*): called after each step; there are two for each sample.

    Raises:
        `ValueError`: a schedule does not fit the model.
        `PartialMismatch`: `partial` belongs to another audit.
    """
    settings, step = settings or AuditSettings(), progress or (lambda: None)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = len(model.model.language_model.layers)
    cases: dict[str, dict[str, Any]] = {
        label: {
            "schedule": resolve_schedule(schedule, ModelFacts.of(model.config, layers)),
            "policy": policy,
            "guard": settings.guard,
            "guard_threshold": settings.guard_threshold,
        }
        for label, _, policy, schedule in settings.cases()
    }
    keys = model.vlcache.model_keys(model.model, "")
    if keys is None:
        raise ValueError("Nothing is cached for this model, see the warning above.")
    label = model_label(model.config, keys)
    rows = PartialResults(partial, _identity(label, samples, settings))
    _replay(model, processor, samples, rows, settings.lossy_multi_image, step)
    with tempfile.TemporaryDirectory(prefix="vlcache-audit-") as folder:
        bench = Bench(model, processor, folder, settings.max_new_tokens, settings.lossy_multi_image)
        for index, earlier in enumerate(earlier_prompts(samples)):
            if "failed" in rows.get("measure", index, {"failed": ""}):  # what failed is tried again
                rows.put("measure", index, _measured(bench, samples[index], earlier, cases))
            step()
    in_use = VLCache(schedule="auto", guard_threshold=settings.guard_threshold)
    limit = model.vlcache.options(in_use, model.config, layers).guard_threshold
    return _report(label, samples, settings, rows, limit)


def _identity(label: str, samples: Sequence[AuditSample], settings: AuditSettings) -> dict[str, Any]:
    """What partial results depend on. Pictures that are no files are told apart by their order only."""
    prompts = json.dumps([(sample.messages, sample.context) for sample in samples], default=lambda _: "picture")
    asked = {name: value for name, value in asdict(settings).items() if name != "max_flips"}
    return {
        "model": label,
        "prompts": hashlib.sha256(prompts.encode()).hexdigest(),
        "settings": json.loads(json.dumps({**asked, "schedules": [str(s) for s in settings.schedules]})),
    }


def _replay(
    model: Any,
    processor: Any,
    samples: Sequence[AuditSample],
    rows: PartialResults,
    lossy_multi_image: bool,
    step: Callable[[], None],
) -> None:
    """What the prompts are to the cache when they come one after the other, with the settings that it has in use.

    Each depends on those before it, so a replay that was stopped begins anew.
    """
    done = all(rows.get("replay", index) is not None for index in range(len(samples)))
    with tempfile.TemporaryDirectory(prefix="vlcache-audit-") as folder:
        bench = Bench(model, processor, folder, 1, lossy_multi_image)
        in_use = {"schedule": "auto", "min_tokens": VLCacheConfig().min_tokens}
        for index, sample in enumerate(samples):
            if not done:
                try:
                    kind = bench.seen(bench.inputs(sample.messages), **in_use)
                except NotMeasured:  # left to the stock model
                    kind = "miss"
                except Exception:  # `measure`, which meets it too, says what it is
                    kind = "failed"
                rows.put("replay", index, kind)
            step()


def _measured(bench: Bench, sample: AuditSample, earlier: Any, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    try:
        row = measure(bench, sample.messages, earlier, cases)
    except NotMeasured as why:
        return {"failed": str(why)}
    except Exception as error:  # a broken image, one that the processor refuses, or that does not fit into memory
        first = next(iter(str(error).strip().splitlines()), "")
        return {"failed": f"{type(error).__name__}: {first}"}
    row["exact"] = asdict(row["exact"])
    if "cases" in row:
        row["cases"] = {label: asdict(result) for label, result in row["cases"].items()}
    return row


def _report(
    label: str, samples: Sequence[AuditSample], settings: AuditSettings, rows: PartialResults, guard_threshold: float
) -> AuditReport:
    measured = [(sample, rows.get("measure", index)) for index, sample in enumerate(samples)]
    good = [row for _, row in measured if "failed" not in row]
    reused = [row for row in good if "cases" in row]
    kinds = [rows.get("replay", index) for index in range(len(samples))]

    def result(label: str, schedule: str, policy: str, found: Sequence[dict[str, Any]]) -> CaseResult:
        threshold = None
        if schedule and reused and settings.guard != "escalate":
            harmed = [values["flip"] for values in found]
            threshold = calibrated_threshold([row["deviation"] for row in reused], harmed, settings.max_flips)
            threshold = math.floor(1e4 * threshold) / 1e4  # a number to be typed; rounded up it could let more pass
        return CaseResult.of(label, schedule, policy, [Measure(**values) for values in found], threshold)

    return AuditReport(
        model=label,
        prompts=len(good),
        answer_tokens=mean([row["answer_tokens"] for row in good]),
        in_operation={kind: kinds.count(kind) for kind in ("exact", "reused", "miss")},
        same_context=sum("cases" not in row and not row["several"] for row in good),
        several_images=sum(row["several"] for row in good),
        exact=result("exact hit", "", "", [row["exact"] for row in good]),
        cases=[
            result(label, schedule, policy, [row["cases"][label] for row in reused])
            for label, schedule, policy, _ in settings.cases()
        ],
        deviations=[row["deviation"] for row in reused],
        guard_threshold=guard_threshold,
        max_flips=settings.max_flips,
        failed=[{"prompt": sample.name, "problem": row["failed"]} for sample, row in measured if "failed" in row],
    )
