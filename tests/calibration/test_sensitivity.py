"""Points of the curves against slow computations that share nothing with them, and the curves' own rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache

import tiny
from tests.calibration.conftest import sample
from vlcache_hf import RecomputeSchedule
from vlcache_hf.calibration import TokenSample
from vlcache_hf.calibration.allocation import grid
from vlcache_hf.calibration.probe import Probe, prepare, reuse
from vlcache_hf.calibration.sensitivity import SampleCurves, SensitivityCurves, counts, measure
from vlcache_hf.calibration.workspace import Workspace

TOKENS = 64
NONE, FULL = [0] * 4, [TOKENS] * 4


@pytest.fixture(scope="module")
def workspace() -> Any:
    with Workspace() as opened:
        yield opened


@pytest.fixture
def prepared(ours: Any, workspace: Workspace) -> Any:
    return prepare(ours, sample(1), workspace, 6)


@pytest.fixture
def probe(ours: Any, prepared: Any, workspace: Workspace) -> Probe:
    return Probe(ours, prepared, workspace, 1.0)


class Patched(DynamicCache):
    """Puts given rows in the place of an image's own, whatever a forward computes for them."""

    def __init__(self, rows: list[tuple[torch.Tensor, torch.Tensor]], start: int) -> None:
        super().__init__()
        self.rows, self.start = rows, start

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        part = slice(self.start, self.start + TOKENS)
        keys, values = keys.clone(), values.clone()
        keys[:, :, part], values[:, :, part] = self.rows[layer_idx]
        return super().update(keys, values, layer_idx, *args, **kwargs)


def by_stock(stock: Any, given: TokenSample, answer: tuple[int, ...], true: list[int]) -> float:
    """The error of a point, by full forwards of the stock model."""

    def positions(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        names = ("input_ids", "image_grid_thw", "attention_mask", "mm_token_type_ids")
        return stock.model.get_rope_index(**{name: inputs[name] for name in names})[0]

    def rows(cache: Any, start: int) -> list[Any]:
        part = slice(start, start + TOKENS)
        return [(layer.keys[:, :, part], layer.values[:, :, part]) for layer in cache.layers]

    start, other = (int((part["input_ids"][0] == tiny.IMAGE).nonzero()[0]) for part in (given.inputs, given.auxiliary))
    ids = torch.cat([given.inputs["input_ids"], torch.tensor([answer[:-1]])], dim=1)
    inputs = {
        **given.inputs,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == tiny.IMAGE).int(),
    }
    with torch.no_grad():
        expected = stock(**inputs, use_cache=True, logits_to_keep=len(answer))
        # the auxiliary prompt moved along, so that its keys come out at the positions of the image in the prompt
        moved = positions(given.auxiliary) + start - other
        foreign = rows(stock(**given.auxiliary, position_ids=moved, use_cache=True).cache, other)
        mixed = [
            tuple(torch.cat([a[:, :, :count], b[:, :, count:]], dim=2) for a, b in zip(mine, theirs))
            for mine, theirs, count in zip(rows(expected.cache, start), foreign, true)
        ]
        found = stock(**inputs, cache=Patched(mixed, start), logits_to_keep=len(answer))
    return float((found.logits - expected.logits).square().mean())


POINTS = [NONE, [0, 16, 0, 0], [0, 0, 5, 0], [0, 0, 0, 1], [0, 0, 0, 63], [64, 32, 8, 0], [10, 10, 10, 10]]


def test_points_are_those_of_full_stock_forwards(stock: Any, prepared: Any, probe: Probe) -> None:
    found = [point.mse for point in probe(POINTS)]
    expected = [by_stock(stock, sample(1), prepared.answer, point) for point in POINTS]
    assert found == pytest.approx(expected, rel=1e-3)
    assert min(expected) > 1e-4 and len({round(mse, 6) for mse in expected}) == len(POINTS)


def test_a_point_alone_and_in_a_batch(probe: Probe) -> None:
    together = [point.mse for point in probe(POINTS)]
    assert [probe([point])[0].mse for point in POINTS] == pytest.approx(together, rel=1e-4)
    probe._batch = 2
    assert [point.mse for point in probe(POINTS)] == pytest.approx(together, rel=1e-4)


def test_everything_true_is_no_error_and_layer_0_is_never_wrong(probe: Probe) -> None:
    full, none, *layer_0 = probe([FULL, NONE, [1, 0, 0, 0], [32, 0, 0, 0], [TOKENS, 0, 0, 0]])
    assert full.mse < 1e-10 and not full.flipped
    assert none.mse > 1e-3
    assert [point.mse for point in layer_0] == pytest.approx([none.mse] * 3, rel=1e-4)


@pytest.mark.parametrize("ratios", [(0.0,) * 4, (0.5, 0.25, 0.1, 0.0), (1.0, 1.0, 0.02, 0.02)])
def test_whole_schedules_are_real_requests(
    ours: Any, prepared: Any, probe: Probe, workspace: Workspace, ratios: tuple[float, ...]
) -> None:
    schedule = RecomputeSchedule(ratios)
    point, _ = reuse(ours, prepared, workspace, schedule=schedule)
    assert ours.vlcache.last_request.images[0].recomputed == sum(schedule.tokens(TOKENS))
    (composed,) = probe([schedule.tokens(TOKENS)])
    assert composed.mse == pytest.approx(point.mse, rel=1e-3)
    assert composed.flipped == point.flipped


def test_the_answer_is_what_stock_generates(stock: Any, prepared: Any) -> None:
    length = sample(1).inputs["input_ids"].shape[1]
    suppressed = {"suppress_tokens": [tiny.IMAGE, tiny.VIDEO]}
    assert prepared.answer == tuple(tiny.generate(stock, sample(1).inputs, 6, **suppressed)[0, length:].tolist())
    logits = prepared.logits.clone()
    logits[:, suppressed["suppress_tokens"]] = -torch.inf
    assert logits.argmax(-1).tolist() == list(prepared.answer)


def test_a_given_answer_is_teacher_forced(ours: Any, workspace: Workspace) -> None:
    prepared = prepare(ours, sample(1, answer=(5, 6, 7)), workspace, 6)
    assert prepared.answer == (5, 6, 7) and prepared.logits.shape == (3, tiny.VOCAB)
    assert prepared.inputs["input_ids"][0, -2:].tolist() == [5, 6]


def test_the_users_cache_is_not_touched(ours: Any, probe: Probe) -> None:
    assert not Path(ours.vlcache.config.cache_dir).exists()


def test_samples_that_measure_nothing_are_refused(ours: Any, workspace: Workspace) -> None:
    image = tiny.image(1, 16, 16)
    one, two = (
        tiny.batch(tiny.prompt(tiny.text(1, 3), *images, tiny.text(2, 5))) for images in ([image], [image, image])
    )
    with pytest.raises(ValueError, match=r"`messages` has 1 prompt\(s\) with 2 image"):
        prepare(ours, TokenSample(two, one), workspace, 4)
    with pytest.raises(ValueError, match=r"`auxiliary` has 1 prompt\(s\) with 0 image"):
        prepare(ours, TokenSample(one, tiny.batch(tiny.prompt(tiny.text(1, 3)))), workspace, 4)
    same = TokenSample(one, tiny.batch(tiny.prompt(tiny.text(1, 3), image, tiny.text(9, 2))))
    with pytest.raises(ValueError, match="same context"):
        Probe(ours, prepare(ours, same, workspace, 4), workspace, 0.3)


def test_a_request_that_is_secretly_cold_is_an_error(ours: Any, prepared: Any, workspace: Workspace) -> None:
    workspace.clear()
    with pytest.raises(RuntimeError, match="should have been reused"):
        reuse(ours, prepared, workspace)


class Counted:
    """A made-up sample: errors that add up over layers, and which counts were asked for."""

    def __init__(self, *curves: Any) -> None:
        self.curves, self.asked = curves, []

    def __call__(self, points: Any) -> list[float]:
        self.asked += [tuple(point) for point in points]
        return [1.0 + sum(curve(count) for curve, count in zip(self.curves, point)) for point in points]


def test_straight_curves_need_few_points_and_bends_more() -> None:
    straight, bent = (lambda count: -count / 1000), (lambda count: -0.5 * min(count, 37) / 37)
    evaluate = Counted(lambda count: 0.0, straight, bent)
    found = measure(evaluate, 1000, 3, grid(), 0.01)
    assert found.base == 1.0 and found.layers[0] == {0: 1.0}
    assert len(found.layers[1]) == 7 + 6  # the coarse ratios and the middles between them
    assert 13 < len(found.layers[2]) < 25
    assert len(evaluate.asked) == len(set(evaluate.asked)) == 1 + sum(len(curve) - 1 for curve in found.layers)
    values = found.on(grid())
    exact = [[1 + curve(count) for count in counts(grid(), 1000)] for curve in evaluate.curves]
    assert np.abs(values - exact).max() <= 0.01
    assert np.abs(values[1] - exact[1]).max() < 1e-12


@given(
    tokens=st.integers(1, 3000),
    seed=st.integers(0, 1000),
    tolerance=st.sampled_from([0.0, 0.01, 0.1]),
)
@settings(max_examples=60, deadline=None)
def test_measured_points_are_on_the_grid_distinct_and_exact(tokens: int, seed: int, tolerance: float) -> None:
    rng = np.random.default_rng(seed)
    noise = rng.random(tokens + 1)
    evaluate = Counted(lambda count: 0.0, lambda count: noise[count] if count else 0.0)
    found = measure(evaluate, tokens, 2, grid(), tolerance)
    assert len(evaluate.asked) == len(set(evaluate.asked))
    assert set(found.layers[1]) <= set(counts(grid(), tokens))
    assert {0, counts(grid(), tokens)[-1]} <= set(found.layers[1])
    assert found.on(grid())[1, 0] == 1.0 and found.on(grid())[1, -1] == found.layers[1][max(found.layers[1])]
    assert SampleCurves.from_dict(found.to_dict()) == found


def test_counts_are_those_of_schedules() -> None:
    for tokens in (1, 3, 7, 64, 100, 999, 1024):
        assert counts(grid(), tokens) == [RecomputeSchedule((ratio,)).tokens(tokens)[0] for ratio in grid()]


def test_no_error_at_all_needs_no_points() -> None:
    evaluate = Counted(lambda count: -1.0, lambda count: -1.0)
    assert measure(evaluate, 100, 2, grid(), 0.02).layers == ({0: -1.0}, {0: -1.0})
    assert len(evaluate.asked) == 1


def test_mean_and_standard_error() -> None:
    samples = [SampleCurves(500, base, ({0: base}, {0: base, 150: base / 2})) for base in (1.0, 3.0)]
    curves = SensitivityCurves.over(samples, grid())
    assert curves.base == 2.0 and curves.points == 4
    assert curves.mean[1, -1] == 1.0 and curves.mean[1, 75] == pytest.approx(1.5) and curves.mean[0, -1] == 2.0
    assert curves.error[1, 0] == pytest.approx(1.0)
