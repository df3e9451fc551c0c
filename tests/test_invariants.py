"""The design's invariants, on tiny models whose image KV depends on the context (random, wide, untied weights)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from vlcache_hf import VLCache, attach
from vlcache_hf.decide import KIND

TOLERANCE = 1e-5


@pytest.fixture(params=tiny.ARCHITECTURES, scope="module")
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def stock(architecture: str) -> Any:
    return tiny.stock(architecture)


@pytest.fixture
def ours(architecture: str, tmp_path: Path) -> Any:
    return attach(
        tiny.stock(architecture), {"cache_dir": tmp_path / "cache", "schedule": 0.25, "lossy_multi_image": True}
    )


IMAGE_A, IMAGE_B = tiny.image(1, 8, 12), tiny.image(2, 12, 8)


def logits(model: Any, inputs: dict[str, Any], keep: int = 1, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**tiny.clone(inputs), logits_to_keep=keep, **kwargs).logits


def kv(model: Any, inputs: dict[str, Any], **kwargs: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with torch.no_grad():
        cache = model(**tiny.clone(inputs), logits_to_keep=1, use_cache=True, **kwargs).cache
    return [(layer.keys, layer.values) for layer in cache.layers]


def asking(prefix: int, seed: int = 50) -> dict[str, Any]:
    """The image A behind `prefix` text tokens."""
    return tiny.batch(tiny.prompt(tiny.text(seed, prefix), IMAGE_A, tiny.text(7, 6)))


def columns(inputs: dict[str, Any], which: int = 0) -> torch.Tensor:
    """Columns of the `which`-th image of a batch of one."""
    ids = inputs["input_ids"][0]
    starts = (ids == tiny.VISION_START).nonzero().flatten()
    ends = (ids == tiny.VISION_END).nonzero().flatten()
    return torch.arange(int(starts[which]) + 1, int(ends[which]))


def test_the_image_changes_the_output_and_the_context_changes_its_kv(stock: Any) -> None:
    """Without these two, every test below would pass with a cache that is wrong."""
    other = tiny.batch(tiny.prompt(tiny.text(50, 5), tiny.image(9, 8, 12), tiny.text(7, 6)))
    assert (logits(stock, asking(5)) - logits(stock, other)).abs().max() > 1e-2
    first, second = kv(stock, asking(5)), kv(stock, asking(5, seed=51))
    at = columns(asking(5))
    assert (first[0][1][:, :, at] - second[0][1][:, :, at]).abs().max() < 1e-6
    assert all((a[1][:, :, at] - b[1][:, :, at]).abs().max() > 1e-2 for a, b in zip(first[1:], second[1:]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_full_recompute_through_the_packed_path_equals_stock(stock: Any, ours: Any, side: str) -> None:
    rows = [
        tiny.prompt(tiny.text(1, 9), IMAGE_A, tiny.text(2, 4), IMAGE_B, tiny.text(3, 3)),
        tiny.prompt(tiny.text(4, 5)),
        tiny.prompt(IMAGE_B, tiny.text(5, 8)),
    ]
    inputs = tiny.batch(*rows, side=side)
    logits(ours, tiny.batch(tiny.prompt(tiny.text(8, 2), IMAGE_A, tiny.text(9, 2))))
    difference = logits(stock, inputs, 0) - logits(ours, inputs, 0, cache=VLCache(schedule=1.0))
    assert difference.abs().max() < TOLERANCE
    assert tiny.kinds(ours) == ["miss", "miss", "miss"]
    single = tiny.batch(rows[0])
    assert torch.equal(
        tiny.generate(stock, single, 32), tiny.generate(ours, single, 32, cache=VLCache(schedule=1.0, namespace="r1"))
    )


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_an_identical_request_is_an_exact_hit_at_any_schedule(stock: Any, ours: Any, ratio: float) -> None:
    inputs = asking(5)
    expected, tokens = logits(stock, inputs), tiny.generate(stock, inputs, 32)
    assert (logits(ours, inputs, cache=VLCache(schedule=ratio)) - expected).abs().max() < TOLERANCE
    assert tiny.kinds(ours) == ["miss"]
    assert (logits(ours, inputs, cache=VLCache(schedule=ratio)) - expected).abs().max() < TOLERANCE
    assert tiny.kinds(ours) == ["exact"]
    assert torch.equal(tiny.generate(ours, inputs, 32, cache=VLCache(schedule=ratio)), tokens)
    assert tiny.kinds(ours) == ["exact"]
    assert ours.vlcache.stats().vision_calls == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_exact_hits_emit_the_stock_tokens(
    architecture: str, tmp_path: Path, dtype: torch.dtype
) -> None:
    stock = tiny.stock(architecture, dtype=dtype)
    ours = attach(tiny.stock(architecture, dtype=dtype), {"cache_dir": tmp_path, "schedule": 0.1})
    expected = tiny.generate(stock, asking(5), 16)
    assert torch.equal(tiny.generate(ours, asking(5), 16), expected)
    assert torch.equal(tiny.generate(ours, asking(5), 16), expected)
    assert tiny.kinds(ours) == ["exact"]


@pytest.mark.parametrize("prefix", [0, 7, 200])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_layer_0_of_a_reused_image_equals_stock_at_every_offset(
    stock: Any, ours: Any, prefix: int, ratio: float
) -> None:
    logits(ours, asking(5))
    inputs = asking(prefix, seed=60)
    expected = kv(stock, inputs)
    got = kv(ours, inputs, cache=VLCache(schedule=ratio))
    assert tiny.kinds(ours) == ["reused"]
    at = columns(inputs)
    for mine, theirs in zip(got[0], expected[0]):
        assert (mine[:, :, at] - theirs[:, :, at]).abs().max() < 1e-6
    # proof that rows were reused at all: behind layer 0 they carry the other context
    assert (got[1][1][:, :, at] - expected[1][1][:, :, at]).abs().max() > 1e-2


def test_layer_0_of_a_reused_second_image_equals_stock(stock: Any, ours: Any) -> None:
    logits(ours, asking(5))
    inputs = tiny.batch(tiny.prompt(tiny.text(1, 3), IMAGE_B, tiny.text(2, 4), IMAGE_A, tiny.text(3, 3)))
    expected, got = kv(stock, inputs), kv(ours, inputs)
    assert tiny.kinds(ours) == ["miss", "reused"]
    at = columns(inputs, 1)
    assert all((a[:, :, at] - b[:, :, at]).abs().max() < 1e-6 for a, b in zip(got[0], expected[0]))


def test_the_recomputed_prefix_of_the_first_reused_image_equals_stock(stock: Any, ours: Any) -> None:
    logits(ours, asking(5))
    inputs = asking(9, seed=61)
    expected, got = kv(stock, inputs), kv(ours, inputs, cache=VLCache(schedule=0.5))
    assert tiny.kinds(ours) == ["reused"]
    at = columns(inputs)
    recomputed, reused = at[: len(at) // 2], at[len(at) // 2 :]
    for (keys, values), (stock_keys, stock_values) in zip(got, expected):
        assert (keys[:, :, recomputed] - stock_keys[:, :, recomputed]).abs().max() < TOLERANCE
        assert (values[:, :, recomputed] - stock_values[:, :, recomputed]).abs().max() < TOLERANCE
    assert all((a[1][:, :, reused] - b[1][:, :, reused]).abs().max() > 1e-2 for a, b in zip(got[1:], expected[1:]))


def test_the_error_falls_with_the_ratio_and_first_tokens_beat_last_ones(stock: Any, ours: Any) -> None:
    contexts = [asking(3 + i, seed=70 + i) for i in range(12)]

    def error(ratio: float, policy: str = "prefix") -> float:
        # a namespace a point: a context that is met again would be promoted to an exact hit
        settings = {"namespace": f"{ratio}{policy}", "schedule": ratio, "policy": policy}
        logits(ours, asking(5), cache=VLCache(**settings))
        total = 0.0
        for inputs in contexts:
            total += float((logits(ours, inputs, cache=VLCache(**settings)) - logits(stock, inputs)).square().mean())
            assert tiny.kinds(ours) == (["reused"] if ratio < 1 else ["miss"])
        return total / len(contexts)

    errors = [error(ratio) for ratio in (0.0, 0.1, 0.3, 1.0)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-4 and errors[-1] < TOLERANCE**2
    assert error(0.5) < error(0.5, "suffix")


def test_a_warm_call_leaves_the_model_as_stock_would(stock: Any, ours: Any) -> None:
    modules = [name for name, _ in stock.named_modules()]
    for inputs in (asking(5), asking(5), asking(9, seed=61)):
        expected = stock.generate(**tiny.clone(inputs), max_new_tokens=4, return_dict_in_generate=True)
        got = ours.generate(**tiny.clone(inputs), max_new_tokens=4, return_dict_in_generate=True)
        assert torch.equal(ours.model.rope_deltas, stock.model.rope_deltas)
        assert type(got.cache) is type(expected.cache)
        assert got.cache.get_seq_length() == expected.cache.get_seq_length()
        assert [layer.keys.shape for layer in got.cache.layers] == [
            layer.keys.shape for layer in expected.cache.layers
        ]
    assert tiny.kinds(ours) == ["reused"]
    assert [name for name, _ in ours.named_modules()] == modules
    assert list(ours.state_dict()) == list(stock.state_dict())


def test_bytes_of_an_entry(architecture: str, tmp_path: Path) -> None:
    """Within 1 % of 2 x layers x kv_heads x head_dim x T x itemsize + features, at 1,024 tokens."""
    ours = attach(tiny.stock(architecture), {"cache_dir": tmp_path, "schedule": 0.1})
    inputs = tiny.batch(tiny.prompt(tiny.text(1, 3), tiny.image(3, 64, 64), tiny.text(2, 3)))
    logits(ours, inputs)
    tokens, levels = 1024, 2 if architecture != "qwen2_5_vl" else 0
    expected = 2 * 4 * 2 * 16 * tokens * 4 + (1 + levels) * 64 * tokens * 4
    files = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert expected <= files <= 1.01 * expected
    assert ours.vlcache.last_request.bytes_written == files
    assert len(list((tmp_path / KIND).rglob("*.safetensors"))) == 1
