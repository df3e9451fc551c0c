"""Does the guard tell harmful reuse from harmless, and what does it cost? Calibrated on one seed, tested on another.

    python -m benchmarks.accuracy.guard examples/tiny_models/ordinary examples/tiny_models/routed
    python -m benchmarks.accuracy.guard Qwen/Qwen3-VL-8B-Instruct --questions mine.jsonl --dtype auto --device auto

Reuse is harmful where the answer is not that of the full computation, or the first token's KL to it is above 0.1. A
threshold is chosen on half of the questions of all models together (largest share of harmful minus share of harmless
cases above it; "calibrated": for each model by itself, the highest that lets at most 1 % of its answers become wrong)
and judged on the other half. With the deviation of every case known, what `guard="escalate"` does follows from it: the
full answer above the threshold, else that of the guarded reuse. `--single` questions of each model are asked singly
with the real `guard="escalate"` to check that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vlcache_hf import RecomputeSchedule
from vlcache_hf.policies import Prefix
from vlcache_hf.watch import probe_layer, with_probe

from .asking import Answers, Asker, asker
from .guard_report import (
    all_have,
    best_signal,
    calibrated,
    choose,
    distribution,
    evaluation,
    plot,
    signal_table,
    singles_table,
)
from .metrics import kl
from .questions import Batch, is_right
from .report import Raw, batches, environment, measured_with, parser, write
from .signals import Probes, candidates, recording, stacked

UNLIMITED = 1e9  # a threshold that nothing exceeds


def measure(one: Asker, batch: Batch, ratio: float, contexts: Sequence[str]) -> dict[str, Any]:
    """Answers with and without the guard's probes, and deviations, of one batch.

    Returns:
        `dict`: `"group"`, and `"cases"`: for each context and question a `dict`.
    """
    asked = batch.questions
    inputs = one.inputs([question.messages for question in asked])
    stock = one.stock(inputs)
    text = _text(one, inputs)
    cases = []
    for context in contexts:
        one.store_earlier(asked, context)
        plain = one.reuse(inputs, context, "reused", schedule=ratio)
        guarded = one.reuse(inputs, context, "reused", schedule=ratio, guard="warn", guard_threshold=UNLIMITED)
        with recording() as recorder:
            probed = one.reuse(inputs, context, "reused", policy=Probes(), schedule=0.0)
        pictures = [stacked(recorder.last[index]) for index in range(len(probed.images))]
        abandoned = _abandoned(one, inputs, guarded, ratio)
        distances = kl(stock.logits, plain.logits)
        for row, question in enumerate(asked):
            images = [index for index, image in enumerate(guarded.images) if image.row == row]
            cases.append(
                {
                    "context": context,
                    "full": int(is_right(stock.texts[row], question.answer)),
                    "plain": int(is_right(plain.texts[row], question.answer)),
                    "guarded": int(is_right(guarded.texts[row], question.answer)),
                    "flip": int(plain.texts[row] != stock.texts[row]),
                    "kl": round(float(distances[row]), 6),
                    "deviation": max(guarded.images[index].deviation or 0.0 for index in images),
                    "signals": {
                        signal.name: round(max(signal.value(pictures[index]) for index in images), 5)
                        for signal in candidates(one.layers)
                    },
                    "tokens": sum(guarded.images[index].tokens for index in images),
                    "text": int(text[row]),
                    "plain share": plain.shares()[row],
                    "guarded share": guarded.shares()[row],
                    "escalated share": 1 + float(abandoned[row]),
                }
            )
    one.model.vlcache.clear()
    return {"group": asked[0].group, "cases": cases}


def _text(one: Asker, inputs: Any) -> np.ndarray:
    """Tokens of each row that are not of a picture."""
    is_text = (inputs["input_ids"] != one.model.config.image_token_id) & inputs["attention_mask"].bool()
    return is_text.sum(1).cpu().numpy()


def _abandoned(one: Asker, inputs: Any, found: Answers, ratio: float) -> np.ndarray:
    """What an escalation throws away of each row, text included, over image tokens times layers."""
    layers, rows = one.layers, len(inputs["input_ids"])
    tokens, probes = np.zeros(rows), np.zeros(rows)
    for image in found.images:
        counts = RecomputeSchedule.uniform(ratio, layers).tokens(image.tokens)
        runs = with_probe(Prefix().runs(counts, image.tokens), image.tokens)
        tokens[image.row] += image.tokens
        probes[image.row] += sum(b - a for layer in runs[: probe_layer(layers) + 1] for a, b in layer)
    return (probes + _text(one, inputs) * (probe_layer(layers) + 1)) / (tokens * layers)


def singles(
    one: Asker, batch: Batch, cases: Sequence[dict[str, Any]], ratio: float, threshold: float, limit: int
) -> list[dict[str, Any]]:
    """Single requests with the real guard, beside what `measure` says that they should do."""
    found = []
    contexts = list(dict.fromkeys(case["context"] for case in cases))
    for row, question in enumerate(batch.questions[:limit]):
        for number, context in enumerate(contexts):
            case = cases[number * len(batch.questions) + row]
            one.store_earlier([question], context)
            answer = one.reuse(
                one.inputs([question.messages]), context, "escalated",
                schedule=ratio, guard="escalate", guard_threshold=threshold,
            )  # fmt: skip
            image = answer.images[0]
            above = case["deviation"] > threshold
            found.append(
                {
                    "right": int(is_right(answer.texts[0], question.answer)),
                    "full": case["full"],
                    "plain": case["plain"],
                    "escalated": int(image.guarded == "escalated"),
                    "share": answer.shares()[0] + answer.abandoned / (image.tokens * image.layers),
                    "expected": int((image.guarded == "escalated") == above),
                    "expected share": case["escalated share"] if above else case["guarded share"],
                }
            )
    one.model.vlcache.clear()
    return found


def options() -> argparse.ArgumentParser:
    found = parser(__doc__ or "", count=1000)
    found.add_argument("models", nargs="+", help="checkpoint folders or Hub ids")
    found.add_argument("--ratio", type=float, default=0.1, help="recompute ratio of the reuse that is guarded")
    found.add_argument(
        "--single", type=int, default=24, help="questions that are asked one by one with the real guard"
    )
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    args = options().parse_args(arguments)
    name = args.name or "guard"
    wanted = list(batches(args))
    # every other batch of each layout and size: the same mixture on both sides
    halves = _halves(wanted)
    started = time.monotonic()
    cases: dict[str, dict[str, list[dict[str, Any]]]] = {}
    layers: dict[str, int] = {}
    raws: dict[str, Raw] = {}
    for model in args.models:
        label = Path(model).name
        raw = raws[model] = Raw(args.work / f"{name}_{label}.jsonl", measured_with(args, model, "ratio"))
        with asker(model, args.dtype, args.device, args.max_new_tokens, max_ram_bytes=2**28) as one:
            layers[label] = one.layers
            for batch in tqdm(wanted, desc=f"{name} {label}", disable=None):
                if batch.name not in raw.found and time.monotonic() - started < 60 * args.minutes:
                    raw.add(batch.name, measure(one, batch, args.ratio, args.contexts))
        cases[label] = {"calibration": [], "test": []}
        for side, chosen in halves.items():
            for batch in chosen:
                entry = raw.found.get(batch.name, {"cases": [], "group": ""})
                cases[label][side] += [{**case, "group": entry["group"]} for case in entry["cases"]]
    threshold = min(UNLIMITED, choose([case for sides in cases.values() for case in sides["calibration"]]))
    single: dict[str, list[dict[str, Any]]] = {}
    for model in args.models:
        with asker(model, args.dtype, args.device, args.max_new_tokens, max_ram_bytes=2**28) as one:
            done = [batch for batch in halves["test"] if batch.name in raws[model].found]
            for batch in tqdm(done[: min(4, args.single)], desc=f"one by one {Path(model).name}", disable=None):
                rows = singles(
                    one, batch, raws[model].found[batch.name]["cases"], args.ratio, threshold, -(-args.single // 4)
                )
                single.setdefault(Path(model).name, []).extend(rows)
    compared = [signal for signal in candidates(min(layers.values())) if all_have(cases, signal.name)]
    best = best_signal(cases, compared, layers, args.ratio)
    parts = [
        distribution(cases),
        signal_table(cases, compared),
        evaluation(cases, best, layers, args.ratio, threshold),
        singles_table(single),
    ]
    result = {**environment(*args.models), "ratio": args.ratio, "threshold": threshold}
    result["calibrated"] = {model: calibrated(sides) for model, sides in cases.items()}
    for part in parts:
        result[part.name] = part.data
    write(args.out, name, result, "\n\n".join(part.text for part in parts))
    plot(cases, best, threshold, args.out, name)
    return result


def _halves(wanted: Sequence[Batch]) -> dict[str, list[Batch]]:
    halves: dict[str, list[Batch]] = {"calibration": [], "test": []}
    seen: dict[tuple[str, int], int] = {}
    for batch in wanted:
        key = (batch.questions[0].group, len(batch.questions))
        seen[key] = seen.get(key, 0) + 1
        halves["calibration" if seen[key] % 2 else "test"].append(batch)
    return halves


if __name__ == "__main__":
    main()
