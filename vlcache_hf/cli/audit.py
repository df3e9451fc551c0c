"""`vlcache audit`: how far reuse is from the full computation, on the user's own prompts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import GUARDS
from ..policies import POLICIES
from .common import Misuse, bar, note, plural, settings
from .models import DTYPES, load_model, model_option
from .units import printable

if TYPE_CHECKING:
    from ..audit import AuditReport, AuditSettings, CaseResult

PARTIAL_SUFFIX = ".audit-partial"
WIDTH = 80
LEGEND = (
    "Against the full computation: KL divergence (nats) of the first token, its 95th",
    "percentile, the mean over the answer; prompts whose first token, whose greedy",
    "answer differs. computed: image tokens, the mean over layers.",
)


class _Schedules(click.ParamType):
    """Ratios, names and files, one or several with commas: `0.1`, `0,0.035,auto`, `mine/`."""

    name = "schedules"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, tuple) else tuple(_number(part.strip()) for part in value.split(","))


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


@click.command()
@model_option
@click.option(
    "--prompts",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with `image` (or `images`) and `question`, or `messages`; see below.",
)
@click.option(
    "--schedule",
    "schedules",
    type=_Schedules(),
    multiple=True,
    metavar="S[,S...]",
    help="Ratios, schedule files or auto; may be repeated.  [default: 0,0.035,0.1,0.3,auto]",
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice(sorted(POLICIES)),
    multiple=True,
    default=("prefix",),
    show_default="prefix",
    help="Which tokens are recomputed; may be repeated.",
)
@click.option("--guard", type=click.Choice(GUARDS), default="off", show_default=True, help="The guard while reusing.")
@click.option(
    "--guard-threshold", type=float, help="Deviation above which it acts.  [default: the schedule's, else 0.7]"
)
@click.option("--lossy-multi-image", is_flag=True, help="Reuse in prompts with several images, too.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Of an answer.")
@click.option(
    "--max-flips", type=float, default=0.01, show_default=True, help="Share of answers that may differ, to recommend."
)
@click.option(
    "--json", "json_file", metavar="FILE", help="Write the report as JSON to a file; - for stdout, without the table."
)
@click.option(
    "--partial",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"Keeps results until all are there.  [default: PROMPTS{PARTIAL_SUFFIX}]",
)
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="That of the requests.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
def audit(
    model_id: str,
    prompts: Path,
    schedules: tuple[tuple[str | float, ...], ...],
    policies: tuple[str, ...],
    guard: str,
    guard_threshold: float | None,
    lossy_multi_image: bool,
    max_new_tokens: int,
    max_flips: float,
    json_file: str | None,
    partial: Path | None,
    dtype: str,
    device: str,
) -> None:
    """Measure what reuse in another context costs, on your own prompts and images.

    A line of the file is {"image": "a.png", "question": "What is it?"}: paths relative to the file, `images` for
    several, `system` for a system turn, or `messages` for a whole chat. `context` is the earlier prompt in which the
    image is met first: a text that stands before it, or messages. Without it the image's other prompts in the file
    serve, else a neutral one.

    Each prompt is computed in full, as an exact hit, and reused with every schedule and policy. Entries lie in a
    temporary folder (TMPDIR says where), never in your cache. A run that was stopped goes on where it was. Exit status
    1 when a prompt failed.

    Example: vlcache audit --model Qwen/Qwen3-VL-8B-Instruct --prompts prompts.jsonl
    """
    from ..audit import PartialMismatch, SampleError, read_samples
    from ..audit import audit as run

    tried = _settings(
        schedules=tuple(dict.fromkeys(one for given in schedules for one in given)) or None,
        policies=tuple(dict.fromkeys(policies)),
        guard=guard,
        guard_threshold=guard_threshold,
        lossy_multi_image=lossy_multi_image,
        max_new_tokens=max_new_tokens,
        max_flips=max_flips,
    )
    kept = partial or prompts.with_name(prompts.name + PARTIAL_SUFFIX)
    for option, file in (("--json", json_file), ("--partial", kept)):
        if file not in (None, "-"):
            _check_writable(option, Path(str(file)))
    try:
        samples = read_samples(prompts)
    except SampleError as error:
        raise Misuse(f"--prompts {error}") from None
    # a folder of the default is never touched: all calls of an audit name their own
    model, processor = load_model(model_id, dtype, device, settings(remote="", read_only=True, max_ram_bytes=0))
    try:
        with bar(total=2 * len(samples), desc="auditing", unit="step") as progress:
            report = run(model, processor, samples, tried, kept, progress.update)
    except PartialMismatch as error:
        raise Misuse(f"--partial {error}") from None
    except (ValueError, OSError) as error:  # a schedule that is not there, or not for this model
        raise Misuse(str(error)) from None
    _show(report, json_file)
    if report.failed:
        for row in report.failed:
            note(f"failed: {row['prompt']}: {printable(row['problem'])}")
        note(f"Run again to try what failed once more; the other results are in {printable(str(kept))}.")
        sys.exit(1)
    kept.unlink(missing_ok=True)


def _settings(**fields: Any) -> AuditSettings:
    from ..audit import AuditSettings

    try:
        return AuditSettings(**{name: value for name, value in fields.items() if value is not None})
    except ValueError as error:
        raise Misuse(str(error)) from None


def _check_writable(option: str, file: Path) -> None:
    """A file that cannot be written is found before hours of work, not after."""
    if file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise Misuse(f"{option} {str(file)!r} cannot be written. Give another file.")


def _show(report: AuditReport, json_file: str | None) -> None:
    document = json.dumps(report.to_dict(), indent=2)
    if json_file == "-":
        click.echo(document)
        return
    if json_file is not None:
        Path(json_file).write_text(document + "\n", encoding="utf-8")
    click.echo("\n".join(_lines(report)))


def _lines(report: AuditReport) -> list[str]:
    from ..audit.report import percent

    seen = report.in_operation
    total = sum(seen.values())
    counted = plural(report.prompts, "prompt")
    lines = [f"{printable(report.model, 40)}: {counted}, answers of {report.answer_tokens:.0f} tokens"]
    if total:
        shares = ", ".join(f"{name} {count} ({percent(count / total)})" for name, count in seen.items())
        lines.append(f"in this order, by default: {shares}")
    rows = [case for case in (report.exact, *report.cases) if case.prompts]
    width = max([len(case.label) for case in rows] + [len("schedule")])
    lines += [
        "",
        f"{'schedule':<{width}}{'computed':>9}{'KL first':>9}{'p95':>8}{'answer':>8}{'first':>7}  flips (95 % CI)",
    ]
    lines += [_row(case, width) for case in rows]
    lines += ["", *LEGEND]
    notes = []
    escalated = [f"{case.escalated} at {case.label}" for case in rows if case.escalated]
    if escalated:
        notes.append(f"Computed in full by the guard: {', '.join(escalated)}.")
    if report.same_context:
        notes.append(
            f"{plural(report.same_context, 'prompt')} had the image in the same context before: exact, and not in the "
            "schedules' rows."
        )
    if report.several_images:
        notes.append(
            f"{plural(report.several_images, 'prompt')} with several images: of those only exact hits are reused, "
            "unless --lossy-multi-image is given."
        )
    acts = report.guard_acts
    if acts.total:
        mean = sum(report.deviations) / acts.total
        notes.append(
            f"The guard sees a deviation of {mean:.3f} on average, above {report.guard_threshold:g} in {acts.count} "
            f"of {acts.total} prompts."
        )
    notes += report.recommendation
    return [*lines, "", *(click.wrap_text(text, WIDTH, subsequent_indent="  ") for text in notes)]


def _row(case: CaseResult, width: int) -> str:
    from ..audit.report import interval

    flips = f"{case.flips.count} ({interval(case.flips)})"
    return (
        f"{case.label:<{width}}{100 * case.recomputed:>8.1f}%{case.first_kl:>9.1e}{case.first_kl_p95:>8.1e}"
        f"{case.answer_kl:>8.1e}{case.first_flips.count:>7}  {flips}"
    )
