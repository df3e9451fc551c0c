"""From samples to schedules: `calibrate`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm

from ..options import model_label
from ..schedule import RecomputeSchedule
from ..version import __version__
from . import check, refine
from .allocation import MAX_RATIO, STEP, Allocation, Table, greedy, grid, objective, optimal, rows_count, units
from .journal import JOURNAL_NAME, Journal, digest
from .probe import MAX_BATCH, Probe, prepare
from .result import BudgetResult, CalibrationResult
from .samples import CalibrationSample, Samples, TokenSample
from .sensitivity import COARSE, SampleCurves, SensitivityCurves, counts, measure
from .workspace import Workspace

TOLERANCE = 0.02
MAX_NEW_TOKENS = 32
BUDGETS = (0.025, 0.035)


def calibrate(
    model: Any,
    processor: Any,
    samples: Sequence[CalibrationSample | TokenSample],
    budgets: Sequence[float] = BUDGETS,
    *,
    held_out: Sequence[CalibrationSample | TokenSample] = (),
    out: str | os.PathLike[str] | None = None,
    method: str = "refined",
    max_ratio: float = MAX_RATIO,
    tolerance: float = TOLERANCE,
    max_new_tokens: int = MAX_NEW_TOKENS,
    seed: int = 0,
    progress: bool = True,
) -> CalibrationResult:
    """Measures how sensitive each layer is to reuse, and gives each budget to the layers where it helps most.

    The sensitivities are those of the paper's sections 3.2 and 4.1. `"greedy"` is its allocation, `"optimal"` the
    exact optimum of the same problem, `"refined"` goes on from there (and from simpler schedules) with measurements of
    whole schedules, which the sum of sensitivities only stands for.

    Args:
        model: a model loaded with `attn_implementation="vlcache"`, or given to `attach`. Its own cache is not touched.
        processor (`ProcessorMixin`): its processor; may be `None` where all samples are `TokenSample`s.
        samples (sequence of `CalibrationSample`): the paper takes 40.
        budgets (sequence of `float`): mean ratios; a schedule is made for each.
        held_out (sequence of `CalibrationSample`, *optional*): samples to compare the schedules on, in real requests.
        out (`str` or `os.PathLike`, *optional*): folder that keeps what is done, for a run that is stopped and started
            again; the results are written there too.
        method (`str`, *optional*, defaults to `"refined"`): which schedule is taken.
        max_ratio (`float`, *optional*, defaults to 0.3): the largest ratio of a layer.
        tolerance (`float`, *optional*, defaults to 0.02): how exact curves are between their points, as a share of
            S(0).
        max_new_tokens (`int`, *optional*, defaults to 32): the longest answer that the model gives.
        seed (`int`, *optional*, defaults to 0): of the search and of the intervals.
        progress (`bool`, *optional*, defaults to `True`): show progress on a terminal.

    Raises:
        `ValueError`: a sample has not one image, or its image stands in the same context in both prompts; a budget or
            method does not exist; `out` belongs to a calibration with other settings.
    """
    _check(model, samples, budgets, method, max_ratio)
    calibration = _Calibration(model, processor, samples, method, max_ratio, tolerance, max_new_tokens, seed, progress)
    journal = Journal(None if out is None else Path(out) / JOURNAL_NAME, calibration.settings)
    curves = calibration.curves(journal)
    results = tuple(calibration.allocate(curves, budget, journal) for budget in budgets)
    tested = Samples(held_out, processor, model.device)
    found = _held_out(model, tested, results, max_new_tokens, seed, progress) if len(tested) else {}
    result = CalibrationResult(curves, results, calibration.settings, found)
    if out is not None:
        result.save(out)
    return result


class _Calibration:
    """Samples, grid and settings of one calibration; keeps the probes of the samples for whole schedules."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        samples: Sequence[CalibrationSample | TokenSample],
        method: str,
        max_ratio: float,
        tolerance: float,
        max_new_tokens: int,
        seed: int,
        progress: bool,
    ) -> None:
        self._model, self._method, self._seed, self._progress = model, method, seed, progress
        self._samples = Samples(samples, processor, model.device)
        self._ratios = grid(max_ratio=max_ratio)
        self._tolerance, self._max_new_tokens = tolerance, max_new_tokens
        self._probes: dict[int, Probe] = {}
        keys = model.vlcache.model_keys(model.model, "calibration")
        label = None if keys is None else model_label(model.config, keys)
        # without the folders of this machine
        self._model_id = label.rsplit("@", 1)[0] if label and model.config._name_or_path else None
        self.settings: dict[str, Any] = {
            "model": label or "unknown",
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
            "samples": digest({"samples": [sample.digest() for sample in self._samples]}),
            "num_samples": len(self._samples),
            "step": STEP,
            "max_ratio": max_ratio,
            "coarse": list(COARSE),
            "tolerance": tolerance,
            "max_new_tokens": max_new_tokens,
            "max_batch": MAX_BATCH,
            "seed": seed,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "vlcache_hf": __version__,
        }

    def _bar(self, **kwargs: Any) -> Any:
        return tqdm(disable=None if self._progress else True, leave=False, dynamic_ncols=True, **kwargs)

    def curves(self, journal: Journal) -> SensitivityCurves:
        """The curves of all samples; those in the journal are not measured again."""
        found = []
        for index in self._bar(iterable=range(len(self._samples)), desc="measuring layers", unit="sample"):
            part = f"sample {index}"
            if part not in journal.done:
                probe, answer = self._probe(index)
                curves = measure(
                    lambda points: [point.mse for point in probe(points)],
                    probe.tokens,
                    probe.num_layers,
                    self._ratios,
                    self._tolerance,
                )
                journal.add(part, {"answer": list(answer), **curves.to_dict()})
                self._keep(index, probe)
            found.append(SampleCurves.from_dict(journal.done[part]))
        return SensitivityCurves.over(found, self._ratios)

    def _probe(self, index: int, answer: Sequence[int] | None = None) -> tuple[Probe, tuple[int, ...]]:
        sample = self._samples[index]
        if answer is not None:
            sample = TokenSample(sample.inputs, sample.auxiliary, tuple(answer))
        try:
            with Workspace() as workspace:
                prepared = prepare(self._model, sample, workspace, self._max_new_tokens)
                probe = Probe(self._model, prepared, workspace, self._ratios[-1])
        except ValueError as error:
            raise ValueError(f"Sample {index}: {error}") from None
        return probe, prepared.answer

    def _keep(self, index: int, probe: Probe) -> None:
        if self._method == "refined":
            # beside a model on a GPU there may be no room for the rows of all samples
            self._probes[index] = probe.to("cpu")

    def allocate(self, curves: SensitivityCurves, budget: float, journal: Journal) -> BudgetResult:
        """The schedules of one budget."""
        layers, spend = len(curves.mean), units(budget, len(curves.mean))
        spend = min(spend, layers * (len(self._ratios) - 1))
        levels = {
            "uniform": refine.uniform(layers, spend),
            "greedy": greedy(curves.mean, spend).levels,
            "optimal": optimal(curves.mean, spend).levels,
        }
        report: dict[str, Any] = {"budget": budget, "method": self._method}
        if self._method == "refined":
            part = f"budget {budget!r}"
            if part not in journal.done:
                journal.add(part, self._search(levels, spend, journal))
            report["search"] = journal.done[part]
            levels["refined"] = tuple(report["search"]["levels"])
        candidates = {name: self._schedule(name, value, budget, curves, journal) for name, value in levels.items()}
        report["schedules"] = {
            name: {
                "ratios": list(schedule.ratios),
                "mean": schedule.mean,
                "mean_where_rows_without_a_next_layer_get_kv_only": rows_count(schedule.ratios),
                "sum_of_sensitivities": objective(curves.mean, levels[name]),
            }
            for name, schedule in candidates.items()
        }
        return BudgetResult(budget, candidates[self._method], candidates, report)

    def _search(self, levels: dict[str, refine.Levels], spend: int, journal: Journal) -> dict[str, Any]:
        top, layers = len(self._ratios) - 1, len(levels["uniform"])
        for index in range(len(self._samples)):
            if index not in self._probes:
                self._keep(index, self._probe(index, journal.done[f"sample {index}"]["answer"])[0])
        with self._bar(desc="measuring schedules", unit="schedule") as bar:

            def errors(schedules: Sequence[refine.Levels]) -> Table:
                bar.update(len(schedules))
                return np.array([self._errors(self._probes[index], schedules) for index in sorted(self._probes)]).T

            starts = {**levels, **refine.first_layers(layers, spend, top)}
            found = refine.search(errors, starts, spend, top, self._seed)
        return {**vars(found), "levels": list(found.levels)}

    def _errors(self, probe: Probe, schedules: Sequence[refine.Levels]) -> list[float]:
        wanted = [counts([self._ratios[level] for level in levels], probe.tokens) for levels in schedules]
        return [point.mse for point in probe(wanted)]

    def _schedule(
        self, name: str, levels: refine.Levels, budget: float, curves: SensitivityCurves, journal: Journal
    ) -> RecomputeSchedule:
        ratios = Allocation(levels, 0.0).ratios()
        about = {
            "paper": "arXiv 2512.12977, section 4.1",
            "allocation": name,
            "budget": budget,
            "mean_where_rows_without_a_next_layer_get_kv_only": rows_count(ratios),
            "base_mse": curves.base,
            "digest": journal.digest,
            **self.settings,
        }
        calibrated = name != "uniform"
        kind = self._model.config.model_type
        return RecomputeSchedule(ratios, self._model_id, kind, calibrated, about, budget=budget)


def _check(model: Any, samples: Sequence[Any], budgets: Sequence[float], method: str, max_ratio: float) -> None:
    if not hasattr(model, "vlcache"):
        raise ValueError(
            f'A {type(model).__name__} has no image cache: load it with attn_implementation="vlcache", or give it '
            "to `vlcache_hf.attach` first."
        )
    if model.training:
        raise ValueError("The model is in training mode, where nothing is reused: call `model.eval()`.")
    if not len(samples):
        raise ValueError("`samples` is empty: give about 40.")
    if not len(budgets) or len(set(budgets)) < len(budgets):
        raise ValueError(f"`budgets` must be one or more different mean ratios, got {budgets!r}.")
    for budget in budgets:
        units(budget, 1)
    if method not in ("greedy", "optimal", "refined"):
        raise ValueError(f"`method` must be 'greedy', 'optimal' or 'refined', got {method!r}.")
    if not STEP <= max_ratio <= 1.0:
        raise ValueError(f"`max_ratio` must be in [{STEP}, 1], got {max_ratio!r}.")


def _held_out(
    model: Any, samples: Samples, results: Sequence[BudgetResult], max_new_tokens: int, seed: int, progress: bool
) -> dict[str, Any]:
    """Real requests with every candidate."""
    named = {
        f"{result.budget:g} {name}": schedule for result in results for name, schedule in result.candidates.items()
    }
    outcomes = check.run(model, samples, named, max_new_tokens, progress)
    report = {}
    for result in results:
        rows = [outcomes.names.index(f"{result.budget:g} {name}") for name in result.candidates]
        part = check.Outcomes(tuple(result.candidates), outcomes.mse[rows], outcomes.flips[rows])
        report[f"{result.budget:g}"] = part.against("uniform", seed)
    return report
