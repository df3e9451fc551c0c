"""Which tokens are recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from vlcache_hf import VLCache, attach
from vlcache_hf.plan import ImageSpan, plan_prefill
from vlcache_hf.policies import POLICIES, FirstTokens, LargestDeviation, Prefix, Random, nested_runs, resolve_policy

IMAGE = tiny.image(1, 8, 12)
TOKENS = 24
FIRST, OTHER = tiny.text(1, 5), tiny.text(2, 5)


def tokens_of(runs: Any) -> set[int]:
    return {token for a, b in runs for token in range(a, b)}


def size(runs: Any) -> int:
    return sum(b - a for a, b in runs)


@given(
    length=st.integers(1, 60),
    ratios=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    name=st.sampled_from([name for name in POLICIES if name not in ("cacheblend", "kvshare")]),
)
def test_every_policy_gives_nested_sets(length: int, ratios: list[float], name: str) -> None:
    counts = sorted((int(ratio * length) for ratio in ratios), reverse=True)
    runs = resolve_policy(name).runs(counts, length)
    assert len(runs) == len(counts)
    expected = {"none": [0] * len(counts), "full": [length] * len(counts), "encoder_only": [length] * len(counts)}
    expected |= dict.fromkeys(("epic", "mpic"), [min(32, length)] * len(counts))
    assert [size(layer) for layer in runs] == expected.get(name, counts)
    assert all(tokens_of(below) >= tokens_of(above) for below, above in zip(runs, runs[1:]))
    plan_prefill([length + 3], [ImageSpan(0, 2, length, runs)], len(counts))  # the planner refuses what is not nested


@given(scores=st.lists(st.floats(0, 10), min_size=3, max_size=40), ratio=st.floats(0, 1))
def test_the_largest_scores_are_chosen(scores: list[float], ratio: float) -> None:
    count = int(ratio * len(scores))
    runs = LargestDeviation("kv", layer=1).chosen(scores, [count] * 4)
    assert [size(layer) for layer in runs] == [len(scores), len(scores), count, count]
    chosen = tokens_of(runs[2])
    assert all(scores[a] >= scores[b] for a in chosen for b in range(len(scores)) if b not in chosen)


def test_runs_are_merged() -> None:
    assert nested_runs([3, 4, 0, 1, 2], [5, 3, 2, 0]) == (((0, 5),), ((0, 1), (3, 5)), ((3, 5),), ())
    assert Prefix().runs([3, 0], 10) == (((0, 3),), ())
    assert FirstTokens(2).runs([9, 9], 10) == (((0, 2),), ((0, 2),))
    assert Random(1).runs([4], 10) == Random(1).runs([4], 10) != Random(2).runs([4], 10)


@pytest.mark.parametrize("bad", ["best", Prefix, 3, None])
def test_what_is_no_policy_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="`policy` must be one of 'prefix'"):
        resolve_policy(bad)


# --- in a model


@pytest.fixture
def ours(tmp_path: Path) -> Any:
    return attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "schedule": 0.25, "lossy_multi_image": True})


def inputs(before: list[int]) -> dict[str, torch.Tensor]:
    return tiny.batch(tiny.prompt(before, IMAGE, tiny.text(7, 6)))


def run(model: Any, before: list[int], **settings: Any) -> torch.Tensor:
    cache = {"cache": VLCache(**settings)} if settings else {}
    with torch.no_grad():
        return model(**inputs(before), logits_to_keep=1, **cache).logits


def reused(model: Any, **settings: Any) -> tuple[torch.Tensor, Any]:
    """Another context behind a first one, in a namespace of its own."""
    settings["namespace"] = str(settings)
    run(model, FIRST, **settings)
    return run(model, OTHER, **settings), model.vlcache.last_request.images[0]


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("full", "encoder_only", "epic", "mpic")])
def test_what_is_recomputed_is_counted(name: str, ours: Any) -> None:
    _, record = reused(ours, policy=name)
    assert record.kv == "reused"
    full_layers = {"cacheblend": 2, "kvshare": 2}.get(name, 0)
    per_layer = 0 if name == "none" else TOKENS // 4
    assert record.recomputed == full_layers * TOKENS + (4 - full_layers) * per_layer


@pytest.mark.parametrize("name", ["full", "epic", "mpic"])
def test_policies_that_recompute_all_tokens_equal_stock(name: str, ours: Any) -> None:
    # 24 tokens are fewer than the 32 first ones of EPIC
    got, record = reused(ours, policy=name)
    assert record.kv == "reused" and record.recomputed == 4 * TOKENS and record.encoder == "hit"
    assert (got - run(tiny.stock("qwen3_vl"), OTHER)).abs().max() < 1e-5


def test_encoder_only_neither_reads_nor_stores_kv(ours: Any, tmp_path: Path) -> None:
    expected = run(tiny.stock("qwen3_vl"), FIRST)
    for encoder in ("miss", "hit"):
        got = run(ours, FIRST, policy="encoder_only")
        record = ours.vlcache.last_request.images[0]
        assert (record.kv, record.encoder, record.stored) == ("miss", encoder, False)
        assert (got - expected).abs().max() < 1e-5
    assert not (tmp_path / "kv").exists()
    run(ours, FIRST)
    run(ours, FIRST, policy="encoder_only")
    assert tiny.kinds(ours) == ["miss"], "although an entry of this very context exists"


@pytest.mark.parametrize("by", ["kv", "attention"])
def test_a_selective_policy_sees_what_differs(by: str, ours: Any) -> None:
    """With all tokens chosen it equals stock; with a quarter it errs less than with none."""
    expected = run(tiny.stock("qwen3_vl"), OTHER)
    everything, record = reused(ours, policy=LargestDeviation(by), schedule=0.99999)
    assert record.kv == "reused" and record.recomputed == 2 * TOKENS + 2 * (TOKENS - 1)
    errors = {}
    for ratio in (0.0, 0.25, 0.75):
        got, _ = reused(ours, policy=LargestDeviation(by), schedule=ratio)
        errors[ratio] = float((got - expected).norm())
    assert errors[0.75] < errors[0.25] < errors[0.0]
    assert (everything - expected).norm() < errors[0.75]


def test_cacheblend_chooses_by_the_difference_of_keys_and_values(ours: Any) -> None:
    stock = tiny.stock("qwen3_vl")

    def layer_one(before: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = inputs(before)
        with torch.no_grad():
            layer = stock(**batch, logits_to_keep=1, use_cache=True).cache.layers[1]
        at = (batch["input_ids"][0] == tiny.IMAGE).nonzero().flatten()
        return layer.keys[0, :, at], layer.values[0, :, at]

    # both contexts are equally long, so that RoPE turns stored and computed keys alike
    scores = sum(
        (new - old).square().sum((0, 2)) / new.square().sum() for new, old in zip(layer_one(OTHER), layer_one(FIRST))
    )
    wanted = set(scores.topk(TOKENS // 4).indices.tolist())
    chosen: list[Any] = []

    class Spy(LargestDeviation):
        def chosen(self, scores: Any, counts: Any) -> Any:
            chosen.append(super().chosen(scores, counts))
            return chosen[-1]

    _, record = reused(ours, policy=Spy("kv"))
    assert record.kv == "reused"
    assert tokens_of(chosen[0][2]) == tokens_of(chosen[0][3]) == wanted


def test_a_selective_policy_in_a_batch_with_other_images(ours: Any) -> None:
    stock, more = tiny.stock("qwen3_vl"), tiny.image(5, 4, 8)
    rows = tiny.batch(
        tiny.prompt(OTHER, IMAGE, tiny.text(3, 2), more, tiny.text(7, 6)), tiny.prompt(tiny.text(4, 3), more, [5])
    )
    run(ours, FIRST)
    with torch.no_grad():
        expected = stock(**tiny.clone(rows), logits_to_keep=1).logits
        got = ours(**tiny.clone(rows), logits_to_keep=1, cache=VLCache(policy="cacheblend")).logits
    assert tiny.kinds(ours) == ["reused", "miss", "miss"]
    assert (got[1] - expected[1]).abs().max() < 1e-5, "the other row is computed as ever"
    assert 1e-4 < (got[0] - expected[0]).abs().max() < 5


class Chooses:
    """A policy of a user's."""

    def __init__(self, runs: Any) -> None:
        self._runs = runs

    def __repr__(self) -> str:
        return "Chooses()"

    def runs(self, counts: Any, length: int) -> Any:
        return self._runs


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([((0, 2),)] * 2 + [((3, 5),)] * 2, r"layer 2 has \[\(3, 5\)\], which is not within \[\(0, 2\)\]"),
        ([((0, 25),)] * 4, r"layer 0 has \[\(0, 25\)\], which is not within \[\(0, 24\)\]"),
        ([((-3, 2),)] * 4, "is not within"),
        ([((0, 2),)] * 3, "runs of 3 layers where the model has 4"),
        ([((0, 2),)] * 5, "runs of 5 layers where the model has 4"),
        ([((4, 6), (0, 2))] * 4, "not sorted and disjoint"),
        ([((0, 4), (2, 6))] * 4, "not sorted and disjoint"),
        ([((5, 2),)] * 4, "not sorted and disjoint"),
        ([((0.0, 2.5),)] * 4, r"must return runs \(a, b\)"),
        ([1, 2, 3, 4], r"must return runs \(a, b\)"),
        (None, r"must return runs \(a, b\)"),
    ],
)
def test_a_policy_that_breaks_the_rules_is_named(tmp_path: Path, runs: Any, message: str) -> None:
    ours = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "schedule": 0.5, "policy": Chooses(runs)})
    tiny.generate(ours, tiny.batch(tiny.prompt(FIRST, IMAGE)), 1)
    with pytest.raises(ValueError, match=r"`policy` Chooses\(\) chose wrong tokens of an image of 24.*" + message):
        tiny.generate(ours, tiny.batch(tiny.prompt(OTHER, IMAGE)), 1)


def test_a_policy_may_return_lists_and_touching_runs(tmp_path: Path) -> None:
    runs = [[[0, 2], [2, 4], [6, 6]], [[0, 4]], [[1, 3]], []]
    ours = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "schedule": 0.5, "policy": Chooses(runs)})
    tiny.generate(ours, tiny.batch(tiny.prompt(FIRST, IMAGE)), 1)
    tiny.generate(ours, tiny.batch(tiny.prompt(OTHER, IMAGE)), 1)
    (record,) = ours.vlcache.last_request.images
    assert (record.kv, record.recomputed) == ("reused", 4 + 4 + 2)


def test_a_selective_policy_checks_its_settings() -> None:
    with pytest.raises(ValueError, match='`by` must be "kv" or "attention", got \'keys\''):
        LargestDeviation("keys")
    for layer in (0, -1, 1.5):
        with pytest.raises(ValueError, match="`layer` must be a layer from 1 on"):
            LargestDeviation("kv", layer=layer)  # type: ignore[arg-type]
