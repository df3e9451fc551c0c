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


def _rows(plan, ghosts):
    return [(row, position) for row, a, b in plan.runs for position in range(a, b)] + list(ghosts)


@settings(max_examples=200, deadline=None)
@given(prompts(), st.booleans())
def test_every_layer_computes_exactly_the_active_tokens_in_order(case, kv_only):
    layers, lengths, spans, ghosts = case
    plans = plan_prefill(lengths, spans, layers, ghosts, kv_only=kv_only)
    assert len(plans) == layers + 1
    for layer, plan in enumerate(plans[:-1]):
        assert _rows(plan, ()) == _active(lengths, spans, layer)
        assert plan.num_rows == len(_rows(plan, ghosts))
        queries = plans[layer + 1] if kv_only else plan
        assert plan.segments == tuple(Segment(row, b - a, b) for row, a, b in queries.runs) + ghosts
    assert plans[-1].runs == plans[-2].runs and plans[-1].segments == () and plans[-1].through is None


@settings(max_examples=200, deadline=None)
@given(prompts(), st.data())
def test_what_goes_on_are_the_rows_of_the_next_layer_and_at_last_the_outputs(case, data):
    layers, lengths, spans, ghosts = case
    kept = [data.draw(st.integers(0, n)) for n in lengths]
    plans = plan_prefill(lengths, spans, layers, ghosts, kept)
    rows = _rows(plans[0], ghosts)
    for plan, above in zip(plans, plans[1:]):
        assert rows == _rows(plan, ghosts)
        rows = rows if plan.through is None else [rows[i] for a, b in plan.through for i in range(a, b)]
        assert rows == _rows(above, ghosts)
    wanted = [(row, position) for row, position in _active(lengths, spans, layers - 1) if position >= kept[row]]
    assert rows == wanted + list(ghosts)
    # image tokens among the outputs, for what is added to their rows behind the last layer
    packed, seen = _rows(plans[-1], ()), []
    for offset, index, a, b in plans[-1].visual:
        part = [(spans[index].row, spans[index].start + token) for token in range(a, b)]
        assert packed[offset : offset + b - a] == part
        seen += part
    images = {(s.row, s.start + token) for s in spans for a, b in s.recompute[-1] for token in range(a, b)}
    assert sorted(seen) == sorted(images & set(packed))


@settings(max_examples=200, deadline=None)
@given(prompts())
def test_visual_and_stored_rows_cover_each_image_once(case):
    layers, lengths, spans, ghosts = case
    for plan in plan_prefill(lengths, spans, layers, ghosts)[:-1]:
        packed = [(row, position) for row, a, b in plan.runs for position in range(a, b)]
        covered = {index: [] for index in range(len(spans))}
        for offset, index, a, b in plan.visual:
            span = spans[index]
            assert packed[offset : offset + b - a] == [(span.row, span.start + t) for t in range(a, b)]
            covered[index] += range(a, b)
        for index, a, b in plan.stored:
            covered[index] += range(a, b)
        assert all(sorted(tokens) == list(range(spans[index].length)) for index, tokens in covered.items())


def test_layers_with_equal_work_share_one_plan():
    span = ImageSpan(0, 2, 6, (((0, 3),), ((0, 3),), ((0, 3),), ((0, 1),), ((0, 1),)))
    first, second, third, fourth, fifth, outputs = plan_prefill([10], [span], 5, kept=[9])
    assert second is first and first.through is None
    assert third.runs is first.runs and third.through == ((0, 3), (5, 7)), "two of three image tokens get K and V only"
    assert third.segments is fourth.segments == (Segment(0, 3, 3), Segment(0, 2, 10))
    assert fifth.segments == (Segment(0, 1, 10),) and fifth.through == ((4, 5),) and outputs.runs == ((0, 9, 10),)


def test_where_keys_and_values_cannot_be_computed_alone_all_rows_are_queries():
    span = ImageSpan(0, 2, 6, (((0, 3),), ((0, 1),)))
    first, second, outputs = plan_prefill([10], [span], 2, kept=[9], kv_only=False)
    assert first.segments == (Segment(0, 5, 5), Segment(0, 2, 10)) and first.through == ((0, 3), (5, 7))
    assert second.segments == (Segment(0, 3, 3), Segment(0, 2, 10)) and second.through == ((4, 5),)
    assert outputs.segments == ()


def test_sets_that_grow_are_refused():
    with pytest.raises(ValueError, match="not nested"):
        plan_prefill([10], [ImageSpan(0, 2, 6, (((0, 1),), ((0, 3),)))], 2)
    with pytest.raises(ValueError, match="not nested"):
        plan_prefill([8], [ImageSpan(0, 2, 6, ((), ((3, 5),)))], 2)
