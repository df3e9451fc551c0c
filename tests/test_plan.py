from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlcache_hf.plan import ImageSpan, Segment, complement, plan_prefill


@st.composite
def prompts(draw):
    """Batches of rows with images whose recomputed sets are nested from layer to layer."""
    layers = draw(st.integers(1, 4))
    lengths, spans = [], []
    for row in range(draw(st.integers(1, 3))):
        position = draw(st.integers(0, 4))
        for _ in range(draw(st.integers(0, 3))):
            length = draw(st.integers(1, 12))
            kept = set(range(length))
            recompute = []
            for _ in range(layers):
                kept = {token for token in sorted(kept) if draw(st.booleans())} if draw(st.booleans()) else kept
                recompute.append(_runs(sorted(kept)))
            spans.append(ImageSpan(row, position, length, tuple(recompute)))
            position += length + draw(st.integers(0, 3))
        lengths.append(position + draw(st.integers(1, 3)))
    ghosts = tuple(Segment(row, 1, draw(st.integers(0, n))) for row, n in enumerate(lengths) if draw(st.booleans()))
    return layers, lengths, spans, ghosts


def _runs(tokens):
    runs = []
    for token in tokens:
        if runs and runs[-1][1] == token:
            runs[-1] = (runs[-1][0], token + 1)
        else:
            runs.append((token, token + 1))
    return tuple(runs)


def _active(lengths, spans, layer):
    active = {(row, position) for row, n in enumerate(lengths) for position in range(n)}
    for span in spans:
        for a, b in complement(span.recompute[layer], span.length):
            active -= {(span.row, span.start + token) for token in range(a, b)}
    return sorted(active)


@settings(max_examples=200, deadline=None)
@given(prompts())
def test_every_layer_computes_exactly_the_active_tokens_in_order(case):
    layers, lengths, spans, ghosts = case
    for layer, plan in enumerate(plan_prefill(lengths, spans, layers, ghosts)):
        packed = [(row, position) for row, a, b in plan.runs for position in range(a, b)]
        assert packed == _active(lengths, spans, layer)
        assert plan.num_rows == len(packed) + len(ghosts)
        assert plan.segments == tuple(Segment(row, b - a, b) for row, a, b in plan.runs) + ghosts


@settings(max_examples=200, deadline=None)
@given(prompts())
def test_narrowing_keeps_the_rows_of_the_next_layer(case):
    layers, lengths, spans, ghosts = case
    rows = None
    for plan in plan_prefill(lengths, spans, layers, ghosts):
        expected = [(row, position) for row, a, b in plan.runs for position in range(a, b)] + list(ghosts)
        if rows is None:
            rows = expected
        elif plan.narrow is not None:
            rows = [rows[i] for a, b in plan.narrow for i in range(a, b)]
        assert rows == expected


@settings(max_examples=200, deadline=None)
@given(prompts())
def test_visual_and_stored_rows_cover_each_image_once(case):
    layers, lengths, spans, ghosts = case
    for plan in plan_prefill(lengths, spans, layers, ghosts):
        packed = [(row, position) for row, a, b in plan.runs for position in range(a, b)]
        covered = {index: [] for index in range(len(spans))}
        for offset, index, a, b in plan.visual:
            span = spans[index]
            assert packed[offset : offset + b - a] == [(span.row, span.start + t) for t in range(a, b)]
            covered[index] += range(a, b)
        for index, a, b in plan.stored:
            covered[index] += range(a, b)
        assert all(sorted(tokens) == list(range(spans[index].length)) for index, tokens in covered.items())


def test_layers_with_equal_sets_share_their_segments():
    span = ImageSpan(0, 2, 6, (((0, 3),), ((0, 3),), ((0, 1),), ((0, 1),)))
    first, second, third, fourth = plan_prefill([10], [span], 4)
    assert second is first and second.narrow is None
    assert third.narrow == ((0, 3), (5, 7))
    assert fourth.segments is third.segments and fourth.narrow is None


def test_sets_that_grow_are_refused():
    with pytest.raises(ValueError, match="not nested"):
        plan_prefill([10], [ImageSpan(0, 2, 6, (((0, 1),), ((0, 3),)))], 2)
    with pytest.raises(ValueError, match="not nested"):
        plan_prefill([8], [ImageSpan(0, 2, 6, ((), ((3, 5),)))], 2)
