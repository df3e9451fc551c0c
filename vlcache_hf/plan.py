"""What a prefill computes: pure integer planning, no torch (paper section 4.1, "Basic Algorithm").

Positions count the *visible* tokens of a batch row, those that the attention mask keeps, from 0.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Segment:
    """A run of query tokens of one batch row that is computed together.

    Args:
        row (`int`): batch row.
        length (`int`): number of query tokens.
        kv_len (`int`): number of leading keys of the row that the last query sees. Queries are aligned to the end of
            the keys: query `i` of the segment sees keys `[0, kv_len - length + 1 + i)`. `0` for a padding query before
            the first visible token, whose attention output is zero.
    """

    row: int
    length: int
    kv_len: int


@dataclass(frozen=True)
class ImageSpan:
    """The tokens of one image in the prompt.

    Args:
        row (`int`): batch row.
        start (`int`): position of its first token.
        length (`int`): number of its tokens, T.
        recompute (`tuple[Runs, ...]`):
            For every layer the sorted, disjoint runs `[a, b)` of its tokens, counted from its first one, that are
            computed; the others are taken from the store. The sets must be nested: each a subset of the one before.
    """

    row: int
    start: int
    length: int
    recompute: tuple[Runs, ...]


@dataclass(frozen=True)
class LayerPlan:
    """What one decoder layer computes. Its packed rows are all active tokens, row by row, then the padding queries.

    Every active token gets keys and values. What goes on to the next layer (`through`) also gets attention and MLP.

    Args:
        runs (`tuple[tuple[int, int, int], ...]`): `(row, a, b)` of the active tokens in packed order.
        visual (`tuple[tuple[int, int, int, int], ...]`):
            `(packed offset, image index, a, b)`: active image tokens, `a` and `b` counted from the image's start.
        stored (`tuple[tuple[int, int, int], ...]`): `(image index, a, b)`: image tokens taken from the store.
        through (`Runs` or `None`): the packed rows that the next layer needs; `None` when it needs all.
        segments (`tuple[Segment, ...]`): the queries in packed order: those rows, or all where a model's layers cannot
            compute keys and values alone.
        num_rows (`int`): number of packed rows, padding queries included.
    """

    runs: tuple[tuple[int, int, int], ...]
    visual: tuple[tuple[int, int, int, int], ...]
    stored: tuple[tuple[int, int, int], ...]
    through: Runs | None
    segments: tuple[Segment, ...]
    num_rows: int


def merged_neighbours(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted runs without empty ones, and one run where one begins as another ends."""
    merged: list[tuple[int, int]] = []
    for a, b in runs:
        if a == b:
            continue
        if merged and merged[-1][1] == a:
            merged[-1] = (merged[-1][0], b)
        else:
            merged.append((a, b))
    return merged


def complement(runs: Runs, length: int) -> Runs:
    """The runs of `[0, length)` that are not in `runs`."""
    gaps, end = [], 0
    for a, b in runs:
        if end < a:
            gaps.append((end, a))
        end = b
    if end < length:
        gaps.append((end, length))
    return tuple(gaps)


def _row_runs(length: int, spans: Sequence[ImageSpan], layer: int) -> list[tuple[int, int]]:
    """The active runs of one row: its text and the recomputed tokens of its images."""
    runs, end = [], 0
    for span in spans:
        runs.append((end, span.start))
        runs.extend((span.start + a, span.start + b) for a, b in span.recompute[layer])
        end = span.start + span.length
    runs.append((end, length))
    return merged_neighbours(runs)


def _through(
    before: Sequence[tuple[int, int, int]], after: Sequence[tuple[int, int, int]], ghosts: int
) -> Runs | None:
    """Packed rows of a layer that the next layer needs, as runs of packed indices; `None` for all."""
    kept: list[tuple[int, int]] = []
    offset, index = 0, 0
    for row, a, b in before:
        while index < len(after) and after[index][0] == row and after[index][1] < b:
            _, start, stop = after[index]
            if start < a or stop > b:
                raise ValueError(f"active sets are not nested: {(row, start, stop)} is not inside {(row, a, b)}")
            kept.append((offset + start - a, offset + stop - a))
            index += 1
        offset += b - a
    if index < len(after):
        raise ValueError(f"active sets are not nested: {after[index]} was not computed by the layer below")
    kept.append((offset, offset + ghosts))
    merged = merged_neighbours(kept)
    return None if merged == [(0, offset + ghosts)] else tuple(merged)


def plan_prefill(
    lengths: Sequence[int],
    spans: Sequence[ImageSpan],
    num_layers: int,
    ghosts: Sequence[Segment] = (),
    kept: Sequence[int] | None = None,
    kv_only: bool = True,
) -> tuple[LayerPlan, ...]:
    """Plans every layer of a prefill.

    Args:
        lengths (sequence of `int`): number of visible tokens of each batch row.
        spans (sequence of `ImageSpan`): the images in prompt order; their index is the image index of the plan.
        num_layers (`int`): number of decoder layers.
        ghosts (sequence of `Segment`, *optional*):
            Padding tokens whose output is asked for: queries of length 1 that are nobody's key.
        kept (sequence of `int`, *optional*):
            For every row the position from which on outputs are asked for; by default all are.
        kv_only (`bool`, *optional*, defaults to `True`):
            Whether rows that the next layer does not need get keys and values only.

    Returns:
        `tuple[LayerPlan, ...]`: one plan per layer, and one more for the outputs, without queries; layers with equal
        work share one object.

    Raises:
        `ValueError`: the active sets are not nested.
    """
    sets = _active_sets(lengths, spans, num_layers)
    first = [0] * len(lengths) if kept is None else kept
    outputs = tuple((row, max(a, first[row]), b) for row, a, b in sets[-1] if b > first[row])
    sets.append(sets[-1] if outputs == sets[-1] else outputs)
    known: dict[tuple[int, int], LayerPlan] = {}
    queries: dict[int, tuple[Segment, ...]] = {}
    for active in sets:
        if id(active) not in queries:
            queries[id(active)] = tuple(Segment(row, b - a, b) for row, a, b in active) + tuple(ghosts)
    plans: list[LayerPlan] = []
    for layer, active in enumerate(sets):
        above = sets[layer + 1] if layer < num_layers else ()
        pair = (id(active), id(above))
        if pair not in known or layer == num_layers:
            known[pair] = LayerPlan(
                runs=active,
                **_images(active, spans, min(layer, num_layers - 1), outputs if layer == num_layers else None),
                through=_through(active, above, len(ghosts)) if layer < num_layers else None,
                segments=queries[id(above if kv_only else active)] if layer < num_layers else (),
                num_rows=sum(b - a for _, a, b in active) + len(ghosts),
            )
        plans.append(known[pair])
    return tuple(plans)


def _active_sets(
    lengths: Sequence[int], spans: Sequence[ImageSpan], num_layers: int
) -> list[tuple[tuple[int, int, int], ...]]:
    """`(row, a, b)` of the active tokens of every layer; layers with equal sets share one object."""
    by_row: list[list[ImageSpan]] = [[] for _ in lengths]
    for span in spans:
        by_row[span.row].append(span)
    sets: list[tuple[tuple[int, int, int], ...]] = []
    for layer in range(num_layers):
        if layer and all(span.recompute[layer] == span.recompute[layer - 1] for span in spans):
            sets.append(sets[-1])
            continue
        sets.append(
            tuple((row, a, b) for row, length in enumerate(lengths) for a, b in _row_runs(length, by_row[row], layer))
        )
    return sets


def _images(
    active: Sequence[tuple[int, int, int]],
    spans: Sequence[ImageSpan],
    layer: int,
    outputs: Sequence[tuple[int, int, int]] | None,
) -> dict[str, Any]:
    """Which image tokens are computed, and which come from the store; of the outputs only the former is asked."""
    offset_of = _Offsets(active)
    visual: list[tuple[int, int, int, int]] = []
    stored: list[tuple[int, int, int]] = []
    for index, span in enumerate(spans):
        runs = span.recompute[layer]
        if outputs is not None:
            runs = _overlap(runs, span, outputs)
        visual.extend((offset_of(span.row, span.start + a), index, a, b) for a, b in runs)
        if outputs is None:
            stored.extend((index, a, b) for a, b in complement(runs, span.length))
    return {"visual": tuple(visual), "stored": tuple(stored)}


def _overlap(runs: Runs, span: ImageSpan, outputs: Sequence[tuple[int, int, int]]) -> Runs:
    parts = []
    for a, b in runs:
        for row, start, stop in outputs:
            low, high = max(a, start - span.start), min(b, stop - span.start)
            if row == span.row and low < high:
                parts.append((low, high))
    return tuple(parts)


class _Offsets:
    """Packed index of a position, for runs in packed order."""

    def __init__(self, runs: Sequence[tuple[int, int, int]]) -> None:
        self._runs = runs  # in order of row and position
        self._offsets = list(accumulate((b - a for _, a, b in runs), initial=0))

    def __call__(self, row: int, position: int) -> int:
        index = bisect_right(self._runs, (row, position, sys.maxsize)) - 1
        if index >= 0:
            run_row, a, b = self._runs[index]
            if run_row == row and a <= position < b:
                return self._offsets[index] + position - a
        raise ValueError(f"position {position} of row {row} is not active")
