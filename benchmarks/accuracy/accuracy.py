"""Accuracy behind reuse in another context: the paper's Tables 3, 4, 5, 7, 9 and 11, with intervals.

    python -m benchmarks.accuracy.accuracy examples/tiny_models/ordinary
    python -m benchmarks.accuracy.accuracy Qwen/Qwen3-VL-8B-Instruct --questions mine.jsonl --dtype auto --device auto

For each batch of questions the earlier prompts are stored once for each kind of context change (section 5.2: the
auxiliary prompt first). Then every row of the table asks the formal prompts on it, read only, and stops the run if a
picture is not reused as the row says. A stopped run is taken up where it was.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vlcache_hf import VLCache

from .asking import Answers, Asker, asker
from .conditions import Condition, conditions
from .metrics import bootstrap, kl, wilson
from .questions import Batch, is_right
from .report import Raw, batches, environment, figure, measured_with, parser, percent, save, table, write

EXACT_TOLERANCE = 1e-4  # of logits, in float32


def measure(one: Asker, batch: Batch, rows: Sequence[Condition], contexts: Sequence[str]) -> dict[str, Any]:
    """All rows and contexts of one batch.

    Returns:
        `dict`: `"group"`, and `"cells"`: by row and context `right`, `flip`, `kl`, `share`, one for each question.
    """
    asked = batch.questions
    inputs = one.inputs([question.messages for question in asked])
    stock = one.stock(inputs)
    one.store([question.messages for question in asked], "same")
    cells: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.kind not in ("reused", "escalated"):  # does not depend on what the earlier context was
            found = stock if row.kind == "stock" else one.reuse(inputs, "same", row.kind, **row.settings)
            if row.kind == "exact":
                _check_exact(one, stock, found)
            cells[row.name] = dict.fromkeys(contexts, _cell(asked, stock, found))
    for context in contexts:
        one.store_earlier(asked, context)
        for row in rows:
            if row.kind in ("reused", "escalated"):
                found = one.reuse(inputs, context, row.kind, **row.settings)
                cells.setdefault(row.name, {})[context] = _cell(asked, stock, found)
    one.model.vlcache.clear()
    return {"group": asked[0].group, "cells": cells}


def _check_exact(one: Asker, stock: Answers, found: Answers) -> None:
    if one.model.dtype.itemsize < 4:
        return
    error = float(np.abs(stock.logits - found.logits).max())
    if not np.array_equal(stock.tokens, found.tokens) or error > EXACT_TOLERANCE:
        raise AssertionError(f"An exact hit is not stock's answer: logits differ by {error:.1e}.")


def _cell(asked: Sequence[Any], stock: Answers, found: Answers) -> dict[str, Any]:
    return {
        "right": [int(is_right(text, question.answer)) for text, question in zip(found.texts, asked, strict=True)],
        "flip": [int(text != true) for text, true in zip(found.texts, stock.texts, strict=True)],
        "kl": [round(float(value), 6) for value in kl(stock.logits, found.logits)],
        "share": [round(share, 6) for share in found.shares()] or [1.0] * len(asked),
    }


def summarise(entries: Sequence[dict[str, Any]], rows: Sequence[str], contexts: Sequence[str]) -> dict[str, Any]:
    """Means and intervals of every row, for each context and over all of them. The first row is the full computation.

    Over all contexts a question counts once, with its mean, since its answers are not independent.
    """
    values = {
        row: {
            key: np.array(
                [np.concatenate([entry["cells"][row][context][key] for entry in entries]) for context in contexts]
            )
            for key in ("right", "flip", "kl", "share")
        }
        for row in rows
    }
    full = values[rows[0]]["right"]
    result: dict[str, Any] = {}
    for row, found in values.items():
        result[row] = {}
        for index, context in enumerate([*contexts, "all"]):
            part = {key: value.mean(0) if context == "all" else value[index] for key, value in found.items()}
            true = full.mean(0) if context == "all" else full[index]
            low, high = wilson(float(part["right"].sum()), len(true))
            result[row][context] = {
                "n": len(true),
                "accuracy": float(part["right"].mean()),
                "accuracy_95": [low, high],
                "to_full": float((part["right"] - true).mean()),
                "to_full_95": list(bootstrap(part["right"] - true)),
                "flips": float(part["flip"].mean()),
                "kl": float(part["kl"].mean()),
                "recomputed": float(part["share"].mean()),
            }
    return result


def text_table(title: str, summary: dict[str, Any], contexts: Sequence[str]) -> str:
    """Accuracy in percent for each context, and the rest over all of them."""
    columns = ["", "computed %", *contexts, "all", "95 %", "to full", "95 %", "flips %", "KL"]
    lines = []
    for row, cells in summary.items():
        total = cells["all"]
        lines.append(
            [
                row,
                percent(total["recomputed"]),
                *(percent(cells[context]["accuracy"]) for context in contexts),
                percent(total["accuracy"]),
                "{}..{}".format(*map(percent, total["accuracy_95"])),
                f"{100 * total['to_full']:+.1f}",
                "{:+.1f}..{:+.1f}".format(*(100 * edge for edge in total["to_full_95"])),
                percent(total["flips"]),
                f"{total['kl']:.4f}",
            ]
        )
    return table(f"{title}, n = {next(iter(summary.values()))['all']['n']}", columns, lines)


def plot(groups: dict[str, Any], rows: Sequence[Condition], contexts: Sequence[str], folder: Path, name: str) -> None:
    """Accuracy over the share of image tokens that is computed, a panel for each layout and context."""
    drawn, axes = figure(len(groups), len(contexts), width=3.2)
    for line, (group, summary) in zip(axes, groups.items(), strict=True):
        for axis, context in zip(line, contexts, strict=True):
            points: dict[str, list[tuple[float, float, float, float]]] = {}
            for row in rows:
                cell = summary[row.name][context]
                points.setdefault(row.policy, []).append((cell["recomputed"], cell["accuracy"], *cell["accuracy_95"]))
            for policy, found in points.items():
                x, y, low, high = (100 * np.array(part) for part in zip(*sorted(found), strict=True))
                errors = np.maximum(np.array([y - low, high - y]), 0.0)
                axis.errorbar(x, y, yerr=errors, marker=".", linewidth=1, capsize=2, label=policy)
            axis.set_title(f"question {group} / {context}", fontsize=8)
            axis.set_xscale("symlog", linthresh=2)
            axis.set_xlabel("image tokens computed, %", fontsize=8)
        line[0].set_ylabel("accuracy, %")
    axes[0][0].legend(fontsize=6)
    save(drawn, folder, name)


def options() -> argparse.ArgumentParser:
    found = parser(__doc__ or "", count=2000)
    found.add_argument("model", help="checkpoint folder or Hub id")
    found.add_argument("--schedules", nargs="+", type=Path, default=[], help="calibrated schedules (default: a prior)")
    found.add_argument(
        "--guard-threshold", type=float, help="of the row with the guard (default: that of the checkpoint's schedule)"
    )
    found.add_argument("--rows", nargs="+", default=[], help="only rows whose name starts so")
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    args = options().parse_args(arguments)
    name = args.name or f"accuracy_{Path(args.model).name}"
    entries: list[dict[str, Any]] = []
    started = time.monotonic()
    with asker(args.model, args.dtype, args.device, args.max_new_tokens, max_ram_bytes=2**28) as one:
        if args.guard_threshold is None:  # the rows have schedules of their own, which know no threshold
            in_use = one.model.vlcache.options(VLCache(schedule="auto"), one.model.config, one.layers)
            args.guard_threshold = in_use.guard_threshold
        raw = Raw(args.work / f"{name}.jsonl", measured_with(args, args.model, "rows", "schedules", "guard_threshold"))
        rows = conditions(one.layers, args.schedules, args.rows, args.guard_threshold)
        for batch in tqdm(batches(args), desc=name, disable=None):
            if batch.name not in raw.found:
                if time.monotonic() - started > 60 * args.minutes:
                    break
                raw.add(batch.name, measure(one, batch, rows, args.contexts))
            entries.append(raw.found[batch.name])
    names = [row.name for row in rows]
    groups = {
        group: summarise([entry for entry in entries if entry["group"] == group], names, args.contexts)
        for group in dict.fromkeys(entry["group"] for entry in entries)
    }
    everything = summarise(entries, names, args.contexts)
    title = f"{Path(args.model).name}: accuracy in %, picture stored in another context"
    tables = [text_table(f"{title}; question {group} the picture", groups[group], args.contexts) for group in groups]
    tables.append(text_table(f"{title}; all questions", everything, args.contexts))
    result = {**environment(args.model), "all": everything, "groups": groups}
    write(args.out, name, result, "\n\n".join(tables))
    plot(groups, rows, args.contexts, args.out, name)
    return result


if __name__ == "__main__":
    main()
