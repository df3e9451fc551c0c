"""From how many tokens on an image is looked up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from vlcache_hf import VLCache, VLCacheConfig, attach, encoder
from vlcache_hf.worthwhile import HIGHEST, min_tokens, text_flops, vision_flops

QWEN3_8B = SimpleNamespace(
    text_config=SimpleNamespace(
        num_hidden_layers=36, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288,
    ),
    vision_config=SimpleNamespace(
        depth=27, hidden_size=1152, intermediate_size=4304, spatial_merge_size=2, model_type="qwen3_vl_vision"
    ),
)  # fmt: skip


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "qwen3_vl"])
def test_operations_are_those_of_the_weights_that_a_token_meets(architecture: str) -> None:
    model = tiny.stock(architecture)
    met = sum(
        weight.numel()
        for name, weight in model.model.language_model.layers.named_parameters()
        if name.endswith("proj.weight")
    )
    assert text_flops(model.config.text_config) == 2 * met
    patch = sum(weight.numel() for weight in model.model.visual.blocks.parameters() if weight.ndim == 2)
    assert vision_flops(model.config.vision_config) == 2 * 4 * patch


def test_of_experts_those_count_that_a_token_is_sent_to() -> None:
    moe = tiny.config("qwen3_vl_moe").text_config
    dense = tiny.config("qwen3_vl", intermediate_size=2 * moe.moe_intermediate_size).text_config
    assert text_flops(moe) == text_flops(dense), "two experts of four"


def test_the_larger_the_model_and_the_slower_the_device_the_smaller_the_image() -> None:
    auto = VLCacheConfig(min_tokens="auto")
    assert 15 < min_tokens(auto, QWEN3_8B, "cuda") < 60
    assert min_tokens(auto, QWEN3_8B, "cpu") == 1
    assert min_tokens(auto, tiny.config("qwen3_vl"), "cuda") == HIGHEST
    assert min_tokens(auto, QWEN3_8B, "meta") == 1, "weights that are loaded when they are needed"
    assert min_tokens(VLCacheConfig(min_tokens=7), QWEN3_8B, "cuda") == 7


def test_the_default_is_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLCACHE_MIN_TOKENS")
    assert VLCacheConfig().min_tokens == "auto"
    monkeypatch.setenv("VLCACHE_MIN_TOKENS", "64")
    assert VLCacheConfig().min_tokens == 64
    monkeypatch.setenv("VLCACHE_MIN_TOKENS", "few")
    with pytest.raises(ValueError, match="VLCACHE_MIN_TOKENS must be a whole number, or auto, got 'few'"):
        VLCacheConfig()


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "often"])
def test_other_values_are_errors(value: Any) -> None:
    with pytest.raises(ValueError, match='`min_tokens` must be a whole number from 1, or "auto"'):
        VLCacheConfig(min_tokens=value)


def test_small_images_are_left_to_the_stock_model(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = tiny.stock("qwen3_vl")
    ours = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "min_tokens": "auto"})
    hashed: list[int] = []
    digest = encoder.pixel_digest
    monkeypatch.setattr(encoder, "pixel_digest", lambda *args: hashed.append(1) or digest(*args))
    small = tiny.batch(tiny.prompt(tiny.text(1, 4), tiny.image(1, 8, 8), tiny.text(2, 3)))
    for _ in range(2):
        assert torch.equal(tiny.generate(ours, small), tiny.generate(stock, small))
        record = ours.vlcache.last_request
        assert record.in_full == f"all images have fewer tokens than min_tokens={HIGHEST}" and not record.images
    assert hashed == [] and list(tmp_path.rglob("*.safetensors")) == []
    for kind in ("miss", "exact"):
        with torch.no_grad():
            ours(**tiny.clone(small), logits_to_keep=1, cache=VLCache(min_tokens=16))
        assert tiny.kinds(ours) == [kind]
    large = tiny.batch(tiny.prompt(tiny.image(2, 16, 32), tiny.text(2, 3)))  # 128 tokens
    for kind in ("miss", "exact"):
        with torch.no_grad():
            ours(**tiny.clone(large), logits_to_keep=1)
        assert tiny.kinds(ours) == [kind]


def test_a_small_image_beside_a_large_one_is_computed_with_it(tmp_path: Any) -> None:
    ours = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "min_tokens": 20})
    both = tiny.batch(tiny.prompt(tiny.image(1, 8, 8), tiny.text(1, 4), tiny.image(2, 8, 12), tiny.text(2, 3)))
    expected = tiny.generate(tiny.stock("qwen3_vl"), both)
    for kinds in (["miss", "miss"], ["miss", "exact"]):
        assert torch.equal(tiny.generate(ours, both), expected)
        assert tiny.kinds(ours) == kinds
