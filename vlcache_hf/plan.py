"""What a prefill computes: pure integer planning, no torch (paper section 4.1, "Basic Algorithm").

Positions count the *visible* tokens of a batch row, those that the attention mask keeps, from 0.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

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

    Args:
        segments (`tuple[Segment, ...]`): the queries in packed order.
        runs (`tuple[tuple[int, int, int], ...]`): `(row, a, b)` of the active tokens in packed order.
        visual (`tuple[tuple[int, int, int, int], ...]`):
            `(packed offset, image index, a, b)`: active image tokens, `a` and `b` counted from the image's start.
        stored (`tuple[tuple[int, int, int], ...]`): `(image index, a, b)`: image tokens taken from the store.
        narrow (`Runs` or `None`): which packed rows of the layer below go on; `None` when all do.
        num_rows (`int`): number of packed rows, padding queries included.
    """

    segments: tuple[Segment, ...]
    runs: tuple[tuple[int, int, int], ...]
    visual: tuple[tuple[int, int, int, int], ...]
    stored: tuple[tuple[int, int, int], ...]
    narrow: Runs | None
    num_rows: int


def _merge(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
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
    return _merge(runs)


def _narrow(before: Sequence[tuple[int, int, int]], after: Sequence[tuple[int, int, int]], ghosts: int) -> Runs | None:
    """Packed rows of the layer below that the next layer keeps, as runs of packed indices."""
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
    merged = _merge(kept)
    return None if merged == [(0, offset + ghosts)] else tuple(merged)


def plan_prefill(
    lengths: Sequence[int], spans: Sequence[ImageSpan], num_layers: int, ghosts: Sequence[Segment] = ()
) -> tuple[LayerPlan, ...]:
    """Plans every layer of a prefill.

    Args:
        lengths (sequence of `int`): number of visible tokens of each batch row.
        spans (sequence of `ImageSpan`): the images in prompt order; their index is the image index of the plan.
        num_layers (`int`): number of decoder layers.
        ghosts (sequence of `Segment`, *optional*):
            Padding tokens whose output is asked for: queries of length 1 that are nobody's key.

    Returns:
        `tuple[LayerPlan, ...]`: one plan per layer; layers with equal active sets share one object.

    Raises:
        `ValueError`: the active sets are not nested.
    """
    by_row: list[list[tuple[int, ImageSpan]]] = [[] for _ in lengths]
    for index, span in enumerate(spans):
        by_row[span.row].append((index, span))
    plans: list[LayerPlan] = []
    for layer in range(num_layers):
        if layer and all(span.recompute[layer] == span.recompute[layer - 1] for span in spans):
            same = plans[-1]
            plans.append(same if same.narrow is None else _unnarrowed(same))
            continue
        runs: list[tuple[int, int, int]] = []
        for row, length in enumerate(lengths):
            runs.extend((row, a, b) for a, b in _row_runs(length, [span for _, span in by_row[row]], layer))
        visual: list[tuple[int, int, int, int]] = []
        stored: list[tuple[int, int, int]] = []
        offset_of = _Offsets(runs)
        for row_spans in by_row:
            for index, span in row_spans:
                for a, b in span.recompute[layer]:
                    visual.append((offset_of(span.row, span.start + a), index, a, b))
                stored.extend((index, a, b) for a, b in complement(span.recompute[layer], span.length))
        segments = tuple(Segment(row, b - a, b) for row, a, b in runs) + tuple(ghosts)
        plans.append(
            LayerPlan(
                segments=segments,
                runs=tuple(runs),
                visual=tuple(visual),
                stored=tuple(stored),
                narrow=_narrow(plans[-1].runs, runs, len(ghosts)) if plans else None,
                num_rows=sum(segment.length for segment in segments),
            )
        )
    return tuple(plans)


def _unnarrowed(plan: LayerPlan) -> LayerPlan:
    """`plan` for a layer above the one that narrowed: the same active set, nothing left to drop."""
    return replace(plan, narrow=None)


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
