"""From how many tokens on an image is looked up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from vlcache_hf import VLCache, VLCacheConfig, attach
from vlcache_hf.threshold import HIGHEST, min_tokens, text_flops, vision_flops

QWEN3_8B = SimpleNamespace(
    text_config=SimpleNamespace(
        num_hidden_layers=36, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288,
    ),
    vision_config=SimpleNamespace(depth=27, hidden_size=1152, intermediate_size=4304, spatial_merge_size=2),
)  # fmt: skip


def test_operations_are_those_of_the_weights_that_a_token_meets() -> None:
    model = tiny.stock("qwen3_vl")
    met = sum(
        weight.numel()
        for name, weight in model.model.language_model.layers.named_parameters()
        if name.endswith("proj.weight")
    )
    assert text_flops(model.config.text_config) == 2 * met
    patch = sum(weight.numel() for weight in model.model.visual.blocks.parameters() if weight.ndim == 2)
    assert vision_flops(model.config.vision_config) == 2 * 4 * patch
    moe = tiny.config("qwen3_vl_moe").text_config
    dense = tiny.config("qwen3_vl", intermediate_size=2 * moe.moe_intermediate_size).text_config
    assert text_flops(moe) == text_flops(dense), "two experts of four"


def test_the_larger_the_model_and_the_slower_the_device_the_smaller_the_image() -> None:
    auto = VLCacheConfig(min_tokens="auto")
    assert 30 < min_tokens(auto, QWEN3_8B, "cuda") < 120
    assert min_tokens(auto, QWEN3_8B, "cpu") == 1
    assert min_tokens(auto, tiny.config("qwen3_vl"), "cuda") == HIGHEST
    assert min_tokens(VLCacheConfig(min_tokens=7), QWEN3_8B, "cuda") == 7


def test_the_default_is_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLCACHE_MIN_TOKENS")
    assert VLCacheConfig().min_tokens == "auto"
    monkeypatch.setenv("VLCACHE_MIN_TOKENS", "64")
    assert VLCacheConfig().min_tokens == 64
    monkeypatch.setenv("VLCACHE_MIN_TOKENS", "few")
    with pytest.raises(ValueError, match="VLCACHE_MIN_TOKENS must be a whole number of tokens, got 'few'"):
        VLCacheConfig()


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "often"])
def test_other_values_are_errors(value: Any) -> None:
    with pytest.raises(ValueError, match='`min_tokens` must be a whole number from 1, or "auto"'):
        VLCacheConfig(min_tokens=value)


def test_a_small_image_of_a_tiny_model_is_left_alone(tmp_path: Any) -> None:
    ours = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "min_tokens": "auto"})
    inputs = tiny.batch(tiny.prompt(tiny.text(1, 4), tiny.image(1, 8, 8), tiny.text(2, 3)))
    for settings, kind in (({}, "miss"), ({}, "miss"), ({"min_tokens": 16}, "miss"), ({"min_tokens": 16}, "exact")):
        with torch.no_grad():
            ours(**tiny.clone(inputs), logits_to_keep=1, cache=VLCache(**settings))
        assert tiny.kinds(ours) == [kind]
    large = tiny.batch(tiny.prompt(tiny.image(2, 32, 32), tiny.text(2, 3)))  # 256 tokens
    for kind in ("miss", "exact"):
        with torch.no_grad():
            ours(**tiny.clone(large), logits_to_keep=1)
        assert tiny.kinds(ours) == [kind]
