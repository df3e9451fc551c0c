"""Variants in turns, within a budget."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .variants import Answers, Variant
from .workload import Workload


class Budget:
    """Keeps a variant from taking more than so many seconds at one size.

    Args:
        max_seconds (`float`): for each variant and size, warm-up included.
        earlier (`dict[str, tuple[int, float]]`): tokens and seconds of the same variants at a smaller size.
    """

    def __init__(self, max_seconds: float, earlier: dict[str, tuple[int, float]]) -> None:
        self._max = max_seconds
        self._earlier = earlier

    def allows(self, label: str, tokens: int, spent: list[float]) -> bool:
        """Whether a variant may run once more.

        Args:
            label (`str`): of the variant.
            tokens (`int`): image tokens of the request.
            spent (`list[float]`): seconds of its runs so far.
        """
        if spent:
            return sum(spent) + spent[-1] <= self._max
        smaller, taken = self._earlier.get(label, (tokens, 0.0))
        return taken * (tokens / smaller) ** 2 <= self._max


def measure(
    architecture: Any,
    size: Any,
    workload: Workload,
    rounds: int,
    max_seconds: float,
    earlier: dict[str, tuple[int, float]],
    tiers: tuple[str, ...],
) -> dict[str, Any]:
    """All variants of one workload, in turns; each round begins with another one.

    Args:
        architecture (`str`), size (`str`): of the model.
        workload (`Workload`): the request.
        rounds (`int`): of all variants, beside the first, which is for thread pools, kernel choice and page cache.
        max_seconds (`float`): budget of each variant.
        earlier (`dict`): what the sizes before took; it is brought up to date.
        tiers (`tuple[str, ...]`): of the store.
    """
    tokens = workload.tokens * workload.images
    budget = Budget(max_seconds, earlier)
    with tempfile.TemporaryDirectory(prefix="vlcache-ttft-") as folder:
        answers = Answers(architecture, size, workload, Path(folder), tiers)
        fill_s = answers.fill()
        variants = answers.variants()
        times: dict[str, dict[int, float]] = {variant.label: {} for variant in variants}
        for index in tqdm(range(rounds + 1), desc=f"{architecture} {workload}", disable=None):
            first = index % len(variants)
            for variant in variants[first:] + variants[:first]:
                taken = times[variant.label]
                if budget.allows(variant.label, tokens, list(taken.values())):
                    taken[index] = variant.run(index)
        answers.ours.vlcache.flush()
    kept = {label: settled(taken) for label, taken in times.items() if taken}
    for label, taken in kept.items():
        earlier[label] = tokens, statistics.median(taken.values())
    return {
        "architecture": architecture,
        "size": size,
        "image_tokens": workload.tokens,
        "images": workload.images,
        "text_tokens": workload.text,
        "rounds": rounds,
        "entry_bytes": answers.entry_bytes,
        "fill_s": round(fill_s, 4),
        "variants": {
            variant.label: summary(variant, kept[variant.label], kept.get("stock", {}))
            for variant in variants
            if variant.label in kept
        },
        "skipped": [label for label, taken in times.items() if not taken],
    }


def settled(times: dict[int, float]) -> dict[int, float]:
    """Without the first round, where there are others."""
    return {index: taken for index, taken in times.items() if index} or times


def summary(variant: Variant, times: dict[int, float], stock: dict[int, float]) -> dict[str, Any]:
    """Median and spread; speed-ups are of the same round, so that a machine whose speed drifts does no harm.

    Args:
        variant (`Variant`): what was measured.
        times (`dict[int, float]`): its seconds by round.
        stock (`dict[int, float]`): those of the stock model; empty when that was skipped.
    """
    median = statistics.median(times.values())
    row: dict[str, Any] = {
        "name": variant.name,
        "tier": variant.tier,
        "median_s": round(median, 5),
        "min_s": round(min(times.values()), 5),
        "max_s": round(max(times.values()), 5),
        "runs": len(times),
    }
    paired = [stock[index] / taken for index, taken in times.items() if index in stock]
    if paired:
        row |= {
            "speedup": round(statistics.median(paired), 3),
            "speedup_min": round(min(paired), 3),
            "speedup_max": round(max(paired), 3),
        }
    elif stock:  # the stock model had time for its first round only
        row["speedup"] = round(statistics.median(stock.values()) / median, 3)
    if variant.parts:
        names = dict.fromkeys(name for parts in variant.parts for name in parts)
        row["parts"] = {
            name: round(statistics.median(parts.get(name, 0.0) for parts in variant.parts), 5) for name in names
        }
    return row
