"""The guard: recomputed rows tell how far the stored ones are from what the context gives."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from vlcache_hf import RecomputeSchedule, VLCache, attach
from vlcache_hf.plan import ImageSpan, plan_prefill
from vlcache_hf.policies import LargestDeviation, Prefix, Suffix
from vlcache_hf.watch import PROBE_TOKENS, Watch, probe_layer, with_probe

IMAGE, MORE = tiny.image(1, 8, 12), tiny.image(5, 4, 8)
TOKENS = 24
FIRST, OTHER = tiny.text(1, 5), tiny.text(2, 5)


@pytest.fixture
def ours(tmp_path: Path) -> Any:
    return attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "schedule": 0.0})


def ask(model: Any, *parts: Any, **settings: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**tiny.batch(tiny.prompt(*parts)), logits_to_keep=1, cache=VLCache(**settings)).logits


def guards(model: Any) -> list[tuple[str, str]]:
    return [(image.kv, image.guarded) for image in model.vlcache.last_request.images]


def test_probe() -> None:
    assert [probe_layer(layers) for layers in (1, 2, 4, 6, 36)] == [1, 1, 2, 3, 18]
    assert with_probe([(), (), (), ()], 2) == (((0, 2),), ((0, 2),), ((0, 2),), ())
    assert with_probe([((0, 30),), ((3, 5), (9, 11)), (), ()], 64) == (((0, 30),), ((0, 8), (9, 11)), ((0, 8),), ())


@given(tokens=st.integers(1, 300), ratios=st.lists(st.floats(0, 1), min_size=2, max_size=9))
def test_the_sample_keeps_sets_nested(tokens: int, ratios: list[float]) -> None:
    counts = sorted((int(ratio * tokens) for ratio in ratios), reverse=True)
    for policy in (Prefix(), Suffix()):
        runs = with_probe(policy.runs(counts, tokens), tokens)
        plan_prefill([tokens], [ImageSpan(0, 0, tokens, runs)], len(counts))


def test_deviation() -> None:
    watch = Watch(2, None)
    assert [watch.compares_kv(layer) for layer in range(4)] == [False, True, True, False]
    true = torch.ones(9, 2, 8), torch.full((9, 2, 8), 2.0)
    factors = torch.ones(9, 1, 1)
    factors[0], factors[8] = 0.7, 5.0
    watch.add_kv(1, 0, 0, true, (true[0] * 9, true[1] * factors))
    watch.add_kv(2, 0, 0, true, (true[0], true[1] * 0.9))
    watch.add_kv(2, 0, 20, true, (true[0], true[1] * 7))
    watch.add_kv(1, 3, 0, true, true)
    # of the values of the first eight tokens, and of the layer where they differ most: 0.3 of one of eight
    assert watch.deviations() == {0: pytest.approx(0.3 / 8**0.5, rel=1e-4), 3: 0.0}
    selecting = Watch(None, LargestDeviation("kv", layer=2))
    assert [selecting.compares_kv(layer) for layer in range(4)] == [False, False, True, False]
    assert not selecting.compares_attention(2)


def test_off_it_costs_nothing(ours: Any) -> None:
    ask(ours, FIRST, IMAGE, tiny.text(7, 6))
    ask(ours, OTHER, IMAGE, tiny.text(7, 6))
    (record,) = ours.vlcache.last_request.images
    assert (record.kv, record.recomputed, record.deviation, record.guarded) == ("reused", 0, None, "")


def test_it_warns_once_and_says_how_far(ours: Any, caplog: pytest.LogCaptureFixture) -> None:
    ask(ours, FIRST, IMAGE, tiny.text(7, 6))
    with caplog.at_level(logging.WARNING, "vlcache_hf"):
        for seed in (2, 3):
            ask(ours, tiny.text(seed, 5), IMAGE, tiny.text(7, 6), guard="warn", guard_threshold=0.01)
            assert guards(ours) == [("reused", "warned")]
    assert len([r for r in caplog.records if "guard_threshold=0.01" in r.getMessage()]) == 1
    (record,) = ours.vlcache.last_request.images
    assert 0.01 < record.deviation < 2 and f"deviation {record.deviation:.3f}, warned" in str(
        ours.vlcache.last_request
    )
    # the sample, in layers 0 to 2, although the schedule recomputes nothing
    assert record.recomputed == 3 * PROBE_TOKENS
    assert ours.vlcache.stats().warned == 2


def test_it_escalates_to_stock_and_the_context_is_stored(ours: Any) -> None:
    parts = (OTHER, IMAGE, tiny.text(7, 6))
    ask(ours, FIRST, IMAGE, tiny.text(7, 6))
    expected = _stock(*parts)
    got = ask(ours, *parts, guard="escalate", guard_threshold=0.01)
    record = ours.vlcache.last_request
    assert guards(ours) == [("miss", "escalated")] and record.images[0].stored and record.images[0].deviation > 0.01
    assert (got - expected).abs().max() < 1e-5
    text = len(tiny.prompt(*parts)[0]) - TOKENS
    assert record.abandoned == 3 * (text + PROBE_TOKENS), "layers 0 to 2 were computed in vain"
    assert ours.vlcache.stats().escalated == 1
    assert (ask(ours, *parts, guard="escalate", guard_threshold=0.01) - expected).abs().max() < 1e-5
    assert guards(ours) == [("exact", "")]


def test_below_the_threshold_it_stays_quiet(ours: Any) -> None:
    ask(ours, FIRST, IMAGE, tiny.text(7, 6))
    plain = ask(ours, OTHER, IMAGE, tiny.text(7, 6), schedule=0.5)
    got = ask(
        ours, OTHER, IMAGE, tiny.text(7, 6), schedule=0.5, guard="escalate", guard_threshold=100.0, read_only=True
    )
    record = ours.vlcache.last_request
    assert guards(ours) == [("reused", "")] and record.abandoned == 0 and record.images[0].deviation > 0.01
    # half of the tokens are more than the sample: nothing more is computed than without the guard
    assert record.images[0].recomputed == 4 * TOKENS // 2
    assert torch.equal(got, plain)


def test_only_the_image_that_differs_is_computed_in_full(ours: Any) -> None:
    """Behind an image in its own context, and before one: kinds, values, and what is stored."""
    ask(ours, FIRST, IMAGE, tiny.text(7, 6))
    ask(ours, tiny.text(3, 2), MORE, tiny.text(7, 6))
    parts = (FIRST, IMAGE, OTHER, MORE, tiny.text(7, 6))
    got = ask(ours, *parts, guard="escalate", guard_threshold=0.01, lossy_multi_image=True)
    assert guards(ours) == [("exact", ""), ("miss", "escalated")]
    assert (got - _stock(*parts)).abs().max() < 1e-5
    assert [image.stored for image in ours.vlcache.last_request.images] == [False, True]


def test_in_a_batch_each_row_is_judged_alone(ours: Any) -> None:
    ask(ours, FIRST, IMAGE, tiny.text(7, 6))
    same, other = tiny.prompt(FIRST, IMAGE, [9, 9]), tiny.prompt(OTHER, IMAGE, tiny.text(7, 6))
    batch = tiny.batch(same, other)
    with torch.no_grad():
        expected = tiny.stock("qwen3_vl")(**tiny.clone(batch), logits_to_keep=1).logits
        got = ours(**batch, logits_to_keep=1, cache=VLCache(guard="escalate", guard_threshold=0.01)).logits
    assert guards(ours) == [("exact", ""), ("miss", "escalated")]
    assert (got - expected).abs().max() < 1e-5


@pytest.mark.parametrize("mode", ["beams", "sample", "static"])
def test_generate_restarts_cleanly(mode: str, ours: Any) -> None:
    stock = tiny.stock("qwen3_vl")
    ask(ours, FIRST, IMAGE, tiny.text(7, 6))
    inputs = tiny.batch(tiny.prompt(OTHER, IMAGE, tiny.text(7, 6)))
    extra = {"beams": {"num_beams": 2}, "sample": {}, "static": {"cache_implementation": "static"}}[mode]
    ours.vlcache.config.guard, ours.vlcache.config.guard_threshold = "escalate", 0.01
    assert torch.equal(tiny.generate(ours, inputs, 6, **extra), tiny.generate(stock, inputs, 6, **extra))
    assert set(guards(ours)) == {("miss", "escalated")}


def test_with_a_selective_policy(ours: Any) -> None:
    ask(ours, FIRST, IMAGE, tiny.text(7, 6))
    got = ask(ours, OTHER, IMAGE, tiny.text(7, 6), policy="cacheblend", guard="escalate", guard_threshold=0.01)
    assert guards(ours) == [("miss", "escalated")]
    assert (got - _stock(OTHER, IMAGE, tiny.text(7, 6))).abs().max() < 1e-5


def test_an_unreadable_entry_under_watch_is_a_miss(ours: Any, tmp_path: Path) -> None:
    ask(ours, FIRST, IMAGE, tiny.text(7, 6))
    (file,) = (tmp_path / "kv").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    got = ask(ours, OTHER, IMAGE, tiny.text(7, 6), guard="escalate")
    assert guards(ours) == [("miss", "")]
    assert (got - _stock(OTHER, IMAGE, tiny.text(7, 6))).abs().max() < 1e-5


def _stock(*parts: Any) -> torch.Tensor:
    with torch.no_grad():
        return tiny.stock("qwen3_vl")(**tiny.batch(tiny.prompt(*parts)), logits_to_keep=1).logits


def test_the_threshold_is_that_of_the_settings_else_of_the_schedule(ours: Any) -> None:
    ask(ours, FIRST, IMAGE, tiny.text(7, 6))
    low, high = (RecomputeSchedule((0.0,) * 4, guard_threshold=limit) for limit in (0.01, 100.0))
    for seed, settings, guarded in (
        (2, {"schedule": high}, ""),
        (3, {"schedule": low}, "warned"),
        (4, {"schedule": low, "guard_threshold": 100.0}, ""),
        (5, {"schedule": high, "guard_threshold": 0.01}, "warned"),
    ):
        ask(ours, tiny.text(seed, 5), IMAGE, tiny.text(7, 6), guard="warn", **settings)
        assert guards(ours) == [("reused", guarded)]
