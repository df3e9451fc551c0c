"""Tables of the results, as Markdown, which is readable in a terminal too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Result = dict[str, Any]

# Phases of `last_request.seconds`, with the two outside of it, first and last.
PHASES = ("fingerprint", "hashing", "loading", "vision", "prefill", "storing", "rest of generate()")
_PAPER = {
    "stock": "Origin (stock)",
    "cold": "cold, stored",
    "encoder only": "w/o ViT (encoder only)",
    "exact": "exact hit",
    "by hand": "by hand (deepcopy of a prefix)",
}


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table.

    Args:
        columns (sequence of `str`): the head.
        rows (sequence of sequences of `str`): the cells.
    """
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows))


def speedups(results: Sequence[Result]) -> str:
    """The paper's table: a row per configuration, TTFT and speed-up per size; the request that filled the store first.

    Args:
        results (sequence of `dict`): of one architecture.
    """
    columns = ["configuration"]
    for result in results:
        columns += [f"{_size(result)}: TTFT", "speed-up (range)"]
    labels = _labels(results, lambda row: not row["name"].startswith("floor"))
    rows = [["first request of all, stored (once)", *(c for r in results for c in (_time(r["fill_s"]), "-"))]]
    for label in labels:
        cells = [_paper_name(label, results)]
        for result in results:
            row = result["variants"].get(label)
            cells += ["-", "-"] if row is None else [_time(row["median_s"]), _speedup(row)]
        rows.append(cells)
    return markdown(columns, rows)


def floors(results: Sequence[Result]) -> str:
    """Exact and dynamic requests beside what cannot be avoided.

    Args:
        results (sequence of `dict`): of one architecture.
    """
    columns = ["", *(_size(result) for result in results)]
    rows = []
    for name, label in (("exact", "exact"), ("dynamic", "dynamic 0.035")):
        for what, value in (
            ("stock forward of the computed rows", lambda v, n=name: _median(v, f"floor {n}: forward")),
            ("+ copy of the KV", lambda v, n=name: _median(v, f"floor {n}: copy")),
            ("from memory", lambda v, n=label: _median(v, f"{n} (ram)")),
            ("from disk", lambda v, n=label: _median(v, f"{n} (disk)")),
        ):
            found = [value(result["variants"]) for result in results]
            rows.append([f"{name}: {what}", *(_time(seconds) for seconds in found)])
        for tier in ("ram", "disk"):
            over = [_over_floor(result["variants"], name, f"{label} ({tier})") for result in results]
            rows.append([f"{name}: {tier} / floor", *("-" if factor is None else f"{factor:.2f}x" for factor in over)])
    return markdown(columns, rows)


def breakdown(results: Sequence[Result], label: str) -> str:
    """Where the time of a request goes.

    Args:
        results (sequence of `dict`): of one architecture.
        label (`str`): the variant, such as `exact (ram)`.
    """
    columns = ["", *(_size(result) for result in results)]
    known = [(result, result["variants"].get(label)) for result in results]
    rows = []
    for phase in PHASES:
        cells = [_phase(result, row, phase) for result, row in known]
        if any(cell is not None and cell > 0 for cell in cells):
            rows.append([phase, *(_time(cell) for cell in cells)])
    rows.append(["all", *(_time(None if row is None else row["median_s"]) for _, row in known)])
    return markdown(columns, rows)


def shapes(results: Sequence[Result]) -> str:
    """Stock and exact for every combination of image size, number of images and text.

    Args:
        results (sequence of `dict`): of any architecture.
    """
    columns = ["model", "images", "tokens each", "text", "stock", "dynamic 0.035", "exact, memory", "exact, disk"]
    rows = []
    for result in results:
        labels = ("stock", "dynamic 0.035 (ram)", "exact (ram)", "exact (disk)")
        cells = [_cell(result["variants"].get(label)) for label in labels]
        counts = [f"{result[name]:,}" for name in ("images", "image_tokens", "text_tokens")]
        rows.append([result["architecture"], *counts, *cells])
    return markdown(columns, rows)


def pictures(rows: Sequence[Result]) -> str:
    """End to end, processor included."""
    columns = ["model", "source", "tokens", "stock", "processor's share", "exact hit", "processor's share", "speed-up"]
    return markdown(
        columns,
        [
            [
                row["architecture"],
                row["source"],
                f"{row['image_tokens']:,}",
                _time(row["stock_s"]),
                f"{row['stock_processor_share']:.1%}",
                _time(row["exact_s"]),
                f"{row['exact_processor_share']:.1%}",
                f"{row['speedup']:.1f}x",
            ]
            for row in rows
        ],
    )


def memory(results: Sequence[Result]) -> str:
    """Anonymous memory that a request adds."""
    columns = ["model", "tokens", "request", "added at the peak", "of stock's"]
    rows = []
    for result in results:
        stock = next(row["added_bytes"] for row in result["variants"] if row["name"] == "stock")
        for row in result["variants"]:
            name = f"{row['name']} ({row['tier']})" if row["tier"] else row["name"]
            share = f"{row['added_bytes'] / stock:.0%}" if stock else "-"
            added = f"{row['added_bytes'] / (1 << 20):.0f} MiB"
            rows.append([result["architecture"], f"{result['image_tokens']:,}", name, added, share])
    return markdown(columns, rows)


def as_text(report: Result) -> str:
    """All tables of a report."""
    parts = []
    for architecture in dict.fromkeys(result["architecture"] for result in report["results"]):
        own = [result for result in report["results"] if result["architecture"] == architecture]
        parts += [architecture, speedups(own), floors(own), breakdown(own, "exact (ram)")]
    if report.get("pictures"):
        parts.append(pictures(report["pictures"]))
    if report.get("memory"):
        parts.append(memory(report["memory"]))
    return "\n\n".join(parts)


def _labels(results: Sequence[Result], wanted: Callable[[Result], bool]) -> list[str]:
    rows = {label: row for result in results for label, row in result["variants"].items()}
    return [label for label, row in rows.items() if wanted(row)]


def _paper_name(label: str, results: Sequence[Result]) -> str:
    row = next(result["variants"][label] for result in results if label in result["variants"])
    kind, _, ratio = row["name"].partition(" ")
    name = _PAPER.get(row["name"], f"{kind.capitalize()} (r = {ratio})" if ratio else row["name"])
    return f"{name}, {'memory' if row['tier'] == 'ram' else 'disk'}" if row["tier"] else name


def _size(result: Result) -> str:
    return f"{result['image_tokens'] * result['images']:,}"


def _median(variants: Result, label: str) -> float | None:
    return variants[label]["median_s"] if label in variants else None


def _over_floor(variants: Result, name: str, label: str) -> float | None:
    parts = [_median(variants, key) for key in (label, f"floor {name}: forward", f"floor {name}: copy")]
    whole, forward, copy = parts
    return None if whole is None or forward is None or copy is None else whole / (forward + copy)


def _phase(result: Result, row: Result | None, phase: str) -> float | None:
    if row is None:
        return None
    if phase == PHASES[-1]:
        return max(0.0, row["median_s"] - sum(row["parts"].values()))
    return row["parts"].get(phase, 0.0)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _speedup(row: Result) -> str:
    if "speedup" not in row:
        return "-"
    if row.get("speedup_min") == row.get("speedup_max"):  # one pair, or none
        return f"{_times(row['speedup'])}x"
    return f"{_times(row['speedup'])}x ({_times(row['speedup_min'])}-{_times(row['speedup_max'])})"


def _times(factor: float) -> str:
    return f"{factor:.0f}" if factor >= 10 else f"{factor:.2f}"


def _cell(row: Result | None) -> str:
    if row is None:
        return "-"
    return f"{_time(row['median_s'])}, {_times(row['speedup'])}x" if "speedup" in row else _time(row["median_s"])
