"""Models whose KV is not reused, and what a request leaves in memory."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import vlcache_hf
from tests import tiny
from tests.models.conftest import close


@pytest.fixture
def long_image():
    return tiny.batch(tiny.prompt(tiny.text(0, 3), tiny.image(0, 8, 12), tiny.text(1, 5)))


def features_only(pair, inputs, reason):
    """Equal to stock, the tower once, and no KV."""
    for towers in (1, 0):
        expected = tiny.generate(pair.stock, inputs)
        got, ran = pair.towers(lambda: tiny.generate(pair.ours, inputs))
        assert got.tolist() == expected.tolist()
        assert ran == towers and reason in pair.ours.vlcache.last_request.in_full
    got, expected = pair.forward(inputs, logits_to_keep=1)
    close(got.logits, expected.logits)
    assert not [name for name in pair.files if name.startswith("kv")]


@pytest.mark.parametrize("layers", [None, ["sliding_attention", "full_attention"] * 2], ids=["top", "mixed"])
def test_sliding_window(make_pair, long_image, layers):
    text = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    pair = make_pair("qwen2_5_vl", **text, **({"layer_types": layers} if layers else {}))
    assert "sliding_attention" in pair.ours.config.text_config.layer_types
    features_only(pair, long_image, "full attention")


def test_dynamic_rope(make_pair, chat, long_image):
    """Frequencies depend on the length: a long prompt between short ones changes nothing."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    pair = make_pair("qwen3_vl", rope_parameters=rope, max_position_embeddings=16)
    features_only(pair, chat, "RoPE")
    features_only(pair, long_image, "RoPE")
    assert tiny.generate(pair.ours, chat).tolist() == tiny.generate(pair.stock, chat).tolist()


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rope(make_pair, chat, kind):
    """Frequencies that are fixed: hits as always, and entries of their own."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    make_pair("qwen3_vl", rope_parameters=rope).check(chat)


# --- memory


def test_nothing_of_a_request_stays_alive(qwen3, chat):
    for _ in range(2):
        inputs = tiny.clone(chat)
        pixels = weakref.ref(inputs["pixel_values"])
        result = qwen3.ours.generate(**inputs, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
        keys = weakref.ref(result.cache.layers[0].keys)
        del inputs, result
        gc.collect()
        assert pixels() is None and keys() is None
        inputs = tiny.clone(chat)
        pixels = weakref.ref(inputs["pixel_values"])
        with torch.no_grad():
            output = qwen3.ours(**inputs, logits_to_keep=1)
        del inputs, output
        gc.collect()
        assert pixels() is None


def test_an_output_keeps_neither_model_nor_pixels(qwen3, chat):
    """A kept output holds features, as stock, not the request's pixels or the model."""
    ours = vlcache_hf.attach(copy.deepcopy(qwen3.ours), {"cache_dir": qwen3.cache_dir})
    outputs = []
    for _ in range(2):
        inputs = tiny.clone(chat)
        pixels = weakref.ref(inputs["pixel_values"])
        with torch.no_grad():
            outputs.append(ours(**inputs, logits_to_keep=1))
        del inputs
        gc.collect()
        assert outputs[-1].image_outputs.pooler_output[0].shape == (16, 64)
        assert pixels() is None
    core = weakref.ref(ours.model)
    del ours
    gc.collect()
    assert core() is None


def test_features_of_a_kept_output_are_of_its_time(qwen3, chat):
    """The output of a hit, looked at after the weights have changed."""
    ours, stock = (copy.deepcopy(model) for model in (qwen3.ours, qwen3.stock))
    with torch.no_grad():
        wanted = stock(**chat, logits_to_keep=1).image_outputs.pooler_output[0]
        output = [ours(**chat, logits_to_keep=1) for _ in range(2)][1]
        assert tiny.kinds(ours) == ["exact"]
        ours.model.visual.merger.linear_fc2.weight.mul_(2)
        ours.vlcache.clear()
        close(output.image_outputs.pooler_output[0], wanted)
