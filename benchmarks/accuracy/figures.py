"""The paper's measurements of section 3 and appendix A.1 on a model of your own: Figures 2, 3 and 5.

    python -m benchmarks.accuracy.figures examples/tiny_models/routed
    python -m benchmarks.accuracy.figures Qwen/Qwen3-VL-8B-Instruct --questions mine.jsonl --dtype auto --device auto

Figure 2: error of the attention output of each image token when later tokens of the picture are reused and the first
0, 10 or 30 % are computed. Figure 3: reused KV everywhere, but one layer sees the true KV of the first 10, 20 or 30 %;
error of the logits of the answer. Figure 5: as Figure 2, but with as many of the last tokens computed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

from .asking import Asker
from .inject import NAME, Injection, first_position, injecting, moved, picture_span, register
from .questions import Question
from .report import Raw, batches, environment, figure, measured_with, parser, save, table, write

TOKEN_RATIOS = (0.0, 0.1, 0.3)
LAYER_RATIOS = (0.1, 0.2, 0.3)
BINS = 16  # of token positions


class Pictures:
    """A stock model, and the KV of the last picture of a prompt.

    Args:
        one (`Asker`): model and processor.
    """

    def __init__(self, one: Asker) -> None:
        self.one, self.model = one, one.model
        self.model.set_attn_implementation({"text_config": NAME})

    @torch.no_grad()
    def kv(self, messages: Any) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
        """Keys, rotated, and values of every layer, and the position of the first token."""
        inputs = self.one.inputs([messages])
        cache = self.model(**inputs, use_cache=True).cache
        a, b = picture_span(self.model, inputs["input_ids"])
        return [(layer.keys[:, :, a:b], layer.values[:, :, a:b]) for layer in cache.layers], first_position(
            self.model, inputs, a
        )

    def measure(self, question: Question, context: str) -> dict[str, Any]:
        """All three figures' numbers of one question.

        Returns:
            `dict`: `"prefix R"` and `"suffix R"`: error by bin of token positions; `"layers"`: logit errors of
            shape `(1 + ratios, layers)`, direct reuse first.
        """
        stored, before = self.kv(question.earlier[context][-1])
        inputs = self.one.inputs([question.messages])
        answer = torch.as_tensor(self.one.generate(inputs).tokens, device=inputs["input_ids"].device)
        a, b = picture_span(self.model, inputs["input_ids"])
        own, here = self.kv(question.messages)
        stored = moved(self.model, stored, here - before)
        forced = _with_answer(inputs, answer)
        layers, tokens = len(own), b - a
        place = torch.arange(tokens, device=self.model.device)

        none = Injection(a, b, stored, [place < 0] * layers)
        true = self._logits(forced, none, answer)
        found: dict[str, Any] = {}
        for ratio in TOKEN_RATIOS:
            count = int(ratio * tokens + 1e-9)
            for name, taken in (("prefix", place >= count), ("suffix", place < tokens - count)):
                other = Injection(a, b, stored, [taken] * layers)
                self._logits(forced, other, answer)
                found[f"{name} {ratio:g}"] = _error_by_token(none.outputs, other.outputs)
        everything = place >= 0
        direct = float(
            (self._logits(forced, Injection(a, b, stored, [everything] * layers), answer) - true).square().mean()
        )
        rows = [[direct] * layers]
        for ratio in LAYER_RATIOS:
            first = place < int(ratio * tokens + 1e-9)
            rows.append([])
            for layer in range(layers):
                mixed = list(stored)
                keys, values = (
                    torch.where(first[:, None], mine, other)
                    for mine, other in zip(own[layer], stored[layer], strict=True)
                )
                mixed[layer] = (keys, values)
                logits = self._logits(forced, Injection(a, b, mixed, [everything] * layers), answer)
                rows[-1].append(float((logits - true).square().mean()))
        return {**found, "layers": rows}

    @torch.no_grad()
    def _logits(self, forced: Any, injection: Injection, answer: torch.Tensor) -> torch.Tensor:
        with injecting(injection):
            logits = self.model(**forced, use_cache=False, logits_to_keep=answer.shape[1] + 1).logits
        return logits[0, :-1].float()


def _with_answer(inputs: Any, answer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs with the answer behind the prompt."""
    found = dict(inputs)
    extra = {
        "input_ids": answer,
        "attention_mask": torch.ones_like(answer),
        "mm_token_type_ids": torch.zeros_like(answer),
    }
    for name, part in extra.items():
        found[name] = torch.cat([found[name], part.to(found[name].dtype)], dim=1)
    return found


def _error_by_token(true: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> list[float]:
    """Relative error of attention outputs, the mean over layers from 1 on, in `BINS` bins of token positions."""
    errors = [
        (one - two).flatten(1).norm(dim=1) / one.flatten(1).norm(dim=1).clamp_min(1e-12)
        for one, two in zip(true[1:], other[1:], strict=True)
    ]
    mean = torch.stack(errors).mean(0).cpu().numpy()
    return [float(part.mean()) for part in np.array_split(mean, min(BINS, len(mean)))]


def summarise(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means over questions, by layout and context."""
    result: dict[str, Any] = {}
    for key in dict.fromkeys(entry["key"] for entry in entries.values()):
        part = [entry for entry in entries.values() if entry["key"] == key]
        names = [name for name in part[0] if name != "key"]
        result[key] = {name: np.mean([entry[name] for entry in part], axis=0).tolist() for name in names}
        result[key]["n"] = len(part)
    return result


def text_tables(title: str, summary: dict[str, Any]) -> str:
    """Mean errors of both figures."""
    names = [
        f"{side} {ratio:g}" for ratio in TOKEN_RATIOS for side in ("prefix", "suffix") if ratio or side == "prefix"
    ]
    lines = [
        [key, str(found["n"]), *(f"{np.mean(found[name]):.3f}" for name in names)] for key, found in summary.items()
    ]
    tokens = table(f"{title}: relative error of attention outputs, mean over image tokens", ["", "n", *names], lines)
    halves = [
        [key, *(f"{np.mean(part):.3f}" for name in names[:1] for part in np.array_split(found[name], 4))]
        for key, found in summary.items()
    ]
    quarters = table(f"{title}: the same at r = 0 by quarter of the picture", ["", "1st", "2nd", "3rd", "4th"], halves)
    layers = len(next(iter(summary.values()))["layers"][0])
    rows = [
        [f"{key}, {name}", *(f"{value:.4f}" for value in row)]
        for key, found in summary.items()
        for name, row in zip(["reused", *(f"first {ratio:g}" for ratio in LAYER_RATIOS)], found["layers"], strict=True)
    ]
    by_layer = table(f"{title}: logit MSE, true rows in one layer", ["", *map(str, range(layers))], rows)
    return "\n\n".join([tokens, quarters, by_layer])


def plot(summary: dict[str, Any], folder: Path, name: str) -> None:
    """A column for each layout and context: Figures 2, 3 and 5 from above."""
    drawn, axes = figure(3, len(summary), width=3.6, height=2.8)
    for column, (key, found) in enumerate(summary.items()):
        for ratio in TOKEN_RATIOS:
            axes[0][column].plot(
                np.linspace(0, 1, len(found[f"prefix {ratio:g}"])), found[f"prefix {ratio:g}"], label=f"r = {ratio:g}"
            )
        for label, row in zip(["reused", *(f"first {r:g}" for r in LAYER_RATIOS)], found["layers"], strict=True):
            axes[1][column].plot(row, marker="" if label == "reused" else ".", label=label)
        for side, style in (("prefix", "-"), ("suffix", "--")):
            for ratio, color in zip(TOKEN_RATIOS[1:], ("C1", "C2"), strict=True):
                curve = found[f"{side} {ratio:g}"]
                axes[2][column].plot(
                    np.linspace(0, 1, len(curve)), curve, style, color=color, label=f"{side} {ratio:g}"
                )
        axes[0][column].set(title=key, xlabel="place in the picture")
        axes[1][column].set(xlabel="layer with true first rows")
        axes[2][column].set(xlabel="place in the picture")
    for row, label in enumerate(("Fig. 2: attention error", "Fig. 3: logit MSE", "Fig. 5: attention error")):
        axes[row][0].set_ylabel(label)
        axes[row][0].legend(fontsize=7)
    save(drawn, folder, name)


def options() -> argparse.ArgumentParser:
    found = parser(__doc__ or "", count=40)
    found.add_argument("model", help="checkpoint folder or Hub id")
    found.set_defaults(sizes=[16], contexts=["question", "caption"])
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    args = options().parse_args(arguments)
    name = args.name or f"figures_{Path(args.model).name}"
    raw = Raw(args.work / f"{name}.jsonl", measured_with(args, args.model))
    register()
    placed: dict[str, Any] = {"device_map": "auto"} if args.device == "auto" else {}
    model: Any = AutoModelForImageTextToText.from_pretrained(args.model, dtype=args.dtype, **placed)
    model = model if placed else model.to(args.device)
    pictures = Pictures(Asker(model, AutoProcessor.from_pretrained(args.model), args.max_new_tokens))
    started = time.monotonic()
    entries: dict[str, dict[str, Any]] = {}
    wanted = [
        (f"{batch.name}/{index}/{context}", question, context)
        for batch in batches(args)
        for index, question in enumerate(batch.questions)
        for context in args.contexts
    ]
    for key, question, context in tqdm(wanted, desc=name, disable=None):
        if key not in raw.found and time.monotonic() - started < 60 * args.minutes:
            raw.add(key, {"key": f"{question.group} / {context}", **pictures.measure(question, context)})
        if key in raw.found:
            entries[key] = raw.found[key]
    summary = summarise(entries)
    write(args.out, name, {**environment(args.model), "figures": summary}, text_tables(Path(args.model).name, summary))
    plot(summary, args.out, name)
    return summary


if __name__ == "__main__":
    main()
