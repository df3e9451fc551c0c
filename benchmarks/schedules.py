"""Calibrated recompute schedules against uniform ones at the same mean, on a trained tiny model.

    python benchmarks/schedules.py examples/tiny_models/routed --json benchmarks/results/schedules_routed.json

Questions stand in front of pictures or behind them; what is reused comes from prompts in which the picture stands in
another context. Calibrated on some held-out samples of the model's tasks, measured on others, in real requests:
squared error of the logits of the answer, and exact match of the greedy answer, both on the same samples for all
schedules. "of uniform" is the error over that of the uniform schedule, with a 95 % interval of a paired bootstrap.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("uniform", "greedy", "optimal", "refined")


def draw(tasks: Any, seed: int, count: int, cells: Sequence[tuple[str, str, int, str]]) -> list[tuple[Any, str]]:
    """Samples of the cells in turn, each with the kind of earlier prompt whose KV is reused."""
    each = -(-count // len(cells))
    lists = [
        [(s, earlier) for s in tasks.samples(seed, each, kind, layout, size)] for kind, layout, size, earlier in cells
    ]
    return [pair for row in zip(*lists) for pair in row][:count]


def as_calibration(drawn: Sequence[tuple[Any, str]]) -> list[Any]:
    from vlcache_hf.calibration import CalibrationSample

    return [CalibrationSample(sample.messages, sample.mismatched[earlier][0]) for sample, earlier in drawn]


def accuracy(
    model: Any,
    processor: Any,
    tasks: Any,
    drawn: Sequence[tuple[Any, str]],
    schedules: dict[str, Any],
    flips: np.ndarray,
) -> dict[str, np.ndarray]:
    """1 where the greedy answer is right, for each schedule and for no reuse ("stock").

    Where teacher forcing shows that an answer is that of no reuse, it is not generated again.
    """
    from vlcache_hf.calibration.workspace import Workspace

    right = {name: np.zeros(len(drawn)) for name in ("stock", *schedules)}
    with Workspace() as workspace, torch.no_grad():
        for column, (sample, earlier) in enumerate(drawn):
            workspace.clear()
            model(**tasks.inputs(processor, sample.mismatched[earlier][0]), cache=workspace.cache(), logits_to_keep=1)
            inputs = tasks.inputs(processor, sample.messages)
            known: dict[Any, bool] = {}
            for row, (name, schedule) in enumerate([("stock", None), *schedules.items()]):
                same = None if schedule is None or not flips[row - 1, column] else schedule.tokens(sample.size**2)
                if same not in known:
                    settings = {"policy": "encoder_only"} if same is None else {"schedule": schedule}
                    cache = workspace.cache(read_only=True, **settings)
                    output = model.generate(**inputs, cache=cache, max_new_tokens=8)
                    (image,) = model.vlcache.last_request.images
                    if image.kv != ("miss" if same is None else "reused"):
                        raise RuntimeError(f"not what was to be measured: {model.vlcache.last_request}")
                    said = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
                    known[same] = said.strip() == sample.answer
                right[name][column] = known[same]
    return right


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from tiny_models import tasks
    from vlcache_hf import RecomputeSchedule
    from vlcache_hf.calibration import calibrate
    from vlcache_hf.calibration.check import Outcomes, run, wilson
    from vlcache_hf.calibration.samples import Samples

    model = AutoModelForImageTextToText.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="vlcache", vlcache_config={"schedule": 0.0}
    ).eval()
    processor = AutoProcessor.from_pretrained(args.model)
    kinds = ("digit", "color", "both")
    cells = [
        (kind, layout, size, earlier)
        for size in args.sizes
        for layout, earlier in (cell.split("/") for cell in args.cells)
        for kind in kinds
    ]
    known, unseen = draw(tasks, 1, args.samples, cells), draw(tasks, 2, args.held_out, cells)
    start = time.perf_counter()
    result = calibrate(model, processor, as_calibration(known), args.budgets, max_new_tokens=8, seed=0)
    seconds = time.perf_counter() - start

    layers = len(result.curves.mean)
    schedules = {"none": RecomputeSchedule.uniform(0.0, layers)}
    for part in result.budgets:
        schedules |= {f"{part.budget:g} {name}": part.candidates[name] for name in METHODS}
    outcomes = run(model, Samples(as_calibration(unseen), processor, model.device), schedules, 8, progress=True)
    right = accuracy(model, processor, tasks, unseen, schedules, outcomes.flips)
    rows = []
    for part in result.budgets:
        names = [f"{part.budget:g} {name}" for name in METHODS]
        index = [outcomes.names.index(name) for name in names]
        report = Outcomes(METHODS, outcomes.mse[index], outcomes.flips[index]).against("uniform")
        for name, key in zip(METHODS, names):
            hits = right[key]
            rows.append(
                {
                    "budget": part.budget,
                    "schedule": name,
                    "ratios": list(schedules[key].ratios),
                    **report[name],
                    "calibration": part.report["search"]["starts"].get(name, part.report["search"]["error"]),
                    "sum_of_sensitivities": part.report["schedules"][name]["sum_of_sensitivities"],
                    "kv_only_mean": part.report["schedules"][name]["mean_where_rows_without_a_next_layer_get_kv_only"],
                    "accuracy": float(hits.mean()),
                    "accuracy_interval": wilson(int(hits.sum()), len(hits)),
                    "won": int(((hits == 1) & (right[names[0]] == 0)).sum()),
                    "lost": int(((hits == 0) & (right[names[0]] == 1)).sum()),
                }
            )
    return {
        "model": args.model.name,
        "cells": [list(cell) for cell in cells],
        "samples": len(known),
        "held_out": len(unseen),
        "layers": layers,
        "points": result.curves.points,
        "calibration_seconds": round(seconds, 1),
        "curves": {"ratios": list(result.curves.ratios), "mean": result.curves.mean.tolist()},
        "none": {"mse": float(outcomes.mse[0].mean()), "accuracy": float(right["none"].mean())},
        "stock": {"accuracy": float(right["stock"].mean())},
        "searches": {f"{part.budget:g}": part.report["search"] for part in result.budgets},
        "results": rows,
    }


def table(report: dict[str, Any]) -> str:
    stock, none = report["stock"]["accuracy"], report["none"]
    lines = [
        f"{report['model']}: {report['layers']} layers, calibrated on {report['samples']} samples in "
        f"{report['calibration_seconds']:.0f} s, measured on {report['held_out']} others. "
        f"Exact match {stock:.3f} computed in full, {none['accuracy']:.3f} at r = 0 (MSE {none['mse']:.4g}).",
        "",
        "| mean r | schedule | logit MSE | of uniform | exact match | ratios |",
        "|---:|---|---:|---|---|---|",
    ]
    for row in report["results"]:
        low, high = row["of_baseline_interval"]
        first, last = row["accuracy_interval"]
        lines.append(
            f"| {row['budget']:g} | {row['schedule']} | {row['mse']:.4g} | {row['of_baseline']:.3f} "
            f"[{low:.3f}, {high:.3f}] | {row['accuracy']:.3f} [{first:.3f}, {last:.3f}] "
            f"| {', '.join(f'{ratio:.3g}' for ratio in row['ratios'])} |"
        )
    return "\n".join(lines)


def draw_plot(report: dict[str, Any], file: Path) -> None:
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(10, 4), layout="constrained")
    for axes, key in zip(figure.subplots(1, 2), ("mse", "accuracy")):
        for name in METHODS:
            rows = [row for row in report["results"] if row["schedule"] == name]
            middle = np.array([row[key] for row in rows])
            ends = np.array([row[f"{key}_interval"] for row in rows]).T
            reach = np.maximum(np.stack([middle - ends[0], ends[1] - middle]), 0)
            axes.errorbar([row["budget"] for row in rows], middle, reach, marker="o", capsize=3, label=name)
        axes.axhline(report["none"][key], color="grey", linestyle=":", label="r = 0")
        axes.set(xscale="log", xlabel="mean ratio", ylabel={"mse": "MSE of logits", "accuracy": "exact match"}[key])
    axes.axhline(report["stock"]["accuracy"], color="black", linestyle="--", label="in full")
    axes.legend(fontsize="small")
    figure.suptitle(report["model"])
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder of examples/tiny_models")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.01, 0.02, 0.035, 0.05, 0.1])
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--held-out", type=int, default=150)
    parser.add_argument("--sizes", nargs="+", type=int, default=[16], help="of the digit grids, in tokens a side")
    parser.add_argument(
        "--cells",
        nargs="+",
        default=["before/question", "before/position", "after/question", "after/caption"],
        metavar="LAYOUT/EARLIER",
        help="where the question stands, and the earlier prompt whose KV is reused, see tiny_models/tasks.py",
    )
    parser.add_argument("--tasks", type=Path, default=ROOT / "examples", help="folder that holds tiny_models/")
    parser.add_argument("--json", type=Path, help="write the results here, with a table (.md) and a plot (.png)")
    args = parser.parse_args()
    sys.path.insert(0, str(args.tasks))
    report = {
        "command": " ".join(["python", "benchmarks/schedules.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, fp32, CPU, {torch.get_num_threads()} thread(s)",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        **measure(args),
    }
    print(table(report))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
        args.json.with_suffix(".md").write_text(table(report) + "\n")
        draw_plot(report, args.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
