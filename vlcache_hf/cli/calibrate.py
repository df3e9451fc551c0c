"""`vlcache calibrate`: measures a recompute schedule on a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .common import Misuse, note, print_json
from .models import images_option, load_model, model_option

if TYPE_CHECKING:
    from ..calibration import CalibrationResult

METHODS = ("refined", "optimal", "greedy")


class _Several(click.Command):
    """Takes several values after one `--budget`: `--budget 0.025 0.035`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        open_ended = False
        for arg in args:
            if open_ended and not arg.startswith("-"):
                spread += ["--budget", arg]
                continue
            open_ended = arg == "--budget"
            if not open_ended:
                spread.append(arg)
        return super().parse_args(ctx, spread)


@click.command(cls=_Several)
@model_option
@images_option
@click.option(
    "--prompts",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON lines {"image": ..., "question": ...}, images relative to --images.  [default: built-in questions]',
)
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    type=click.FloatRange(0, 1, min_open=True),
    default=(0.025, 0.035),
    show_default="0.025 0.035",
    metavar="RATIO...",
    help="Mean share of the tokens to recompute; a schedule is made for each.",
)
@click.option("--samples", type=click.IntRange(min=1), default=40, show_default=True, help="Prompts to measure on.")
@click.option("--held-out", type=click.IntRange(min=0), default=20, show_default=True, help="Prompts to check on.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the choice of prompts and of the search.")
@click.option("--method", type=click.Choice(METHODS), default="refined", show_default=True, help="The allocation.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Longest answer.")
@click.option("--dtype", default="auto", show_default=True, help="auto, bfloat16, float16, float32.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of the results.")
@click.option("--plots", is_flag=True, help="Draw the curves and schedules; needs matplotlib.")
@click.option("--push-to-hub", "repo_id", metavar="REPO", help="Upload the schedule; for one --budget.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def calibrate(
    model_id: str,
    folder: Path,
    file: Path | None,
    budgets: tuple[float, ...],
    samples: int,
    held_out: int,
    seed: int,
    method: str,
    max_new_tokens: int,
    dtype: str,
    device: str,
    out: Path,
    plots: bool,
    repo_id: str | None,
    as_json: bool,
) -> None:
    """Measure which layers of a model are worth recomputing, and write a schedule for each budget.

    Each sample is an image behind a question; what is reused was computed behind "Please describe this image." A run
    that was stopped goes on where it was when it is started again with the same options.

    Example: vlcache calibrate --model Qwen/Qwen3-VL-8B-Instruct --images photos/ --budget 0.025 0.035 --out qwen3-8b/
    """
    if repo_id is not None and len(budgets) != 1:
        raise Misuse(f"--push-to-hub uploads one schedule, but there are {len(budgets)} budgets. Give one --budget.")
    if plots:
        _require_matplotlib()
    from ..calibration import samples as sources

    try:
        asked, kept = (
            sources.from_folder(folder, samples, held_out, seed)
            if file is None
            else sources.from_file(file, folder, samples, held_out, seed)
        )
    except ValueError as error:
        raise Misuse(str(error)) from None
    model, processor = load_model(model_id, dtype, device, None)
    from .. import calibration

    start = time.perf_counter()
    try:
        result = calibration.calibrate(
            model,
            processor,
            asked,
            budgets,
            held_out=kept,
            out=out,
            method=method,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
    except ValueError as error:
        raise Misuse(str(error)) from None
    seconds = time.perf_counter() - start
    if plots:
        calibration.plot(result, out)
    if repo_id is not None:
        result.budgets[0].schedule.push_to_hub(repo_id)
        note(f"Uploaded the schedule to {repo_id}.")
    if as_json:
        print_json({**result.report(), "out": str(out), "seconds": round(seconds, 3)})
    else:
        _report(result, out, seconds)


def _require_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise Misuse("--plots needs matplotlib, which is not installed: pip install 'vlcache-hf[plots]'.")


def _report(result: CalibrationResult, out: Path, seconds: float) -> None:
    number = len(result.curves.samples)
    click.echo(f"{result.curves.points:,} points on {number} samples, MSE without recompute {result.curves.base:.3g}")
    for part in result.budgets:
        click.echo(f"\nmean {part.budget:g}: {out / part.folder_name}/vlcache_schedule.json")
        tested = result.held_out.get(f"{part.budget:g}", {})
        lines: list[Sequence[str]] = [("schedule", "sum of S", "held-out MSE", "of uniform", "other answers")]
        for name in part.candidates:
            row = tested.get(name)
            cells = ("", "", "")
            if row is not None:
                interval = row["of_baseline_interval"]
                share = "" if interval is None else f"{row['of_baseline']:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
                cells = (f"{row['mse']:.3g}", share, f"{row['flipped']} of {row['samples']}")
            chosen = "*" if part.candidates[name] is part.schedule else ""
            lines.append((name + chosen, f"{part.report['schedules'][name]['sum_of_sensitivities']:.4g}", *cells))
        for line in lines:
            click.echo(f"  {line[0]:<10}{line[1]:>11}{line[2]:>14}{line[3]:>20}{line[4]:>15}")
    click.echo(f"\n{seconds:.0f} s")
