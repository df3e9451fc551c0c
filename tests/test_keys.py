"""Keys: everything that matters changes them, nothing else does."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny
from vlcache_hf.keys import ContextChain, Digest, ModelKeys, config_json, model_keys, pixel_digest

BYTES = st.lists(st.binary(max_size=6), max_size=5)


def keys(**changes) -> ModelKeys:
    fields = {
        "namespace": "",
        "transformers_version": "5.24.0",
        "vision_config": tiny.config("qwen3_vl").vision_config,
        "text_config": tiny.config("qwen3_vl").text_config,
        "vision_weights": "v",
        "text_weights": "t",
        "vision_dtype": "torch.float32",
        "text_dtype": "torch.float32",
    }
    return model_keys(**{**fields, **changes})


# --- digests


def test_a_digest_is_256_bits_in_lowercase_hex():
    for digest in (Digest().hex(), pixel_digest(torch.zeros(4, 3), [1, 2, 2]), keys().vision, keys().text):
        assert len(digest) == 64 and set(digest) <= set("0123456789abcdef")


@given(BYTES, BYTES)
@settings(deadline=None)
def test_field_lists_with_equal_concatenation_differ(one, other):
    assert (Digest(*one).hex() == Digest(*other).hex()) == (one == other)


@given(st.text(max_size=8), st.text(max_size=8))
@settings(deadline=None)
def test_a_copy_of_a_digest_is_independent(one, other):
    digest = Digest("start")
    copy = digest.copy()
    copy.add(one)
    digest.add(other)
    assert digest.hex() == Digest("start", other).hex()
    assert copy.hex() == Digest("start", one).hex()


# --- pixels


def test_equal_bytes_in_other_grids_differ():
    pixels = torch.randn(32, 12)
    digests = {pixel_digest(pixels, grid) for grid in ([1, 8, 4], [1, 4, 8], [2, 4, 4], [4, 4, 2])}
    assert len(digests) == 4


def test_equal_bytes_of_other_shapes_differ():
    pixels = torch.randn(32, 12)
    assert pixel_digest(pixels, [1, 8, 4]) != pixel_digest(pixels.view(16, 24), [1, 8, 4])


def test_equal_bytes_of_other_dtypes_differ():
    bits = torch.randint(0, 2**15, (8, 12), dtype=torch.int16)
    views = (bits, bits.view(torch.bfloat16), bits.view(torch.float16))
    assert len({pixel_digest(view, [1, 4, 2]) for view in views}) == 3


def test_equal_values_of_other_dtypes_differ():
    pixels = torch.randint(-3, 3, (8, 12)).float()
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    assert len({pixel_digest(pixels.to(dtype), [1, 4, 2]) for dtype in dtypes}) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@given(row=st.integers(0, 15), column=st.integers(0, 11))
@settings(max_examples=40, deadline=None)
def test_every_value_counts(dtype, row, column):
    pixels = torch.arange(16 * 12).view(16, 12).to(dtype)
    other = pixels.clone()
    other[row, column] += 1
    assert pixel_digest(other, [1, 4, 4]) != pixel_digest(pixels, [1, 4, 4])


def test_the_sign_of_zero_counts():
    pixels = torch.zeros(4, 3)
    assert pixel_digest(pixels, [1, 2, 2]) != pixel_digest(-pixels, [1, 2, 2])


def test_layout_in_memory_does_not_count():
    pixels = torch.randn(16, 12)
    padded = torch.randn(18, 20)
    padded[1:17, 3:15] = pixels
    views = (padded[1:17, 3:15], pixels.t().contiguous().t(), pixels.clone().requires_grad_())
    assert {pixel_digest(view, (1, 4, 4)) for view in views} == {pixel_digest(pixels, [1, 4, 4])}


def test_an_empty_image_has_a_digest():
    assert pixel_digest(torch.empty(0, 12), [0, 0, 0]) != pixel_digest(torch.empty(0, 12), [0, 2, 2])


def test_three_thousand_images_have_three_thousand_keys():
    model = keys()
    generator = torch.Generator().manual_seed(0)
    found = {model.image(pixel_digest(torch.rand(4, 12, generator=generator), [1, 2, 2])) for _ in range(3000)}
    assert len(found) == 3000


# --- the state of the model


CHANGES = {
    "namespace": "tenant",
    "transformers_version": "5.25.0",
    "vision_weights": "w",
    "text_weights": "w",
    "vision_dtype": "torch.bfloat16",
    "text_dtype": "torch.bfloat16",
}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_of_the_model_state_counts(field):
    base, other = keys(), keys(**{field: CHANGES[field]})
    pixels = pixel_digest(torch.zeros(4, 3), [1, 2, 2])
    layout = np.zeros((3, 1), np.int64)
    groups = [key.kv_group(key.image(pixels), layout) for key in (base, other)]
    assert groups[0] != groups[1]  # KV depends on the encoder's state as well, through the image key
    assert (base.image(pixels) == other.image(pixels)) == field.startswith("text")


def test_vision_and_text_keys_never_meet():
    same = tiny.config("qwen3_vl").text_config
    both = keys(vision_config=same, text_config=same, vision_weights="x", text_weights="x")
    assert both.vision != both.text


@pytest.mark.parametrize(
    "field, value",
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 2e4, "mrope_section": [4, 2, 2]}),
        ("rms_norm_eps", 1e-3),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 1),
        ("head_dim", 32),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("num_hidden_layers", 3),
        ("a_field_of_the_future", 7),
    ],
)
def test_text_config_fields_count(field, value):
    other = tiny.config("qwen3_vl").text_config
    setattr(other, field, value)
    assert config_json(other) != config_json(tiny.config("qwen3_vl").text_config)
    assert keys(text_config=other).text != keys().text


@pytest.mark.parametrize(
    "field, value",
    [
        ("spatial_merge_size", 1),
        ("deepstack_visual_indexes", [0, 2]),
        ("num_heads", 1),
        ("hidden_act", "relu"),
        ("temporal_patch_size", 1),
    ],
)
def test_vision_config_fields_count(field, value):
    other = tiny.config("qwen3_vl").vision_config
    setattr(other, field, value)
    assert keys(vision_config=other).vision != keys().vision


@pytest.mark.parametrize(
    "field, value",
    [
        ("_name_or_path", "x"),
        ("use_cache", False),
        ("id2label", {0: "x"}),
        ("architectures", ["X"]),
        ("transformers_version", "5.25.0"),
        ("dtype", "bfloat16"),  # the dtype of the computation is a key of its own
    ],
)
def test_neutral_config_fields_do_not_count(field, value):
    other = tiny.config("qwen3_vl").text_config
    setattr(other, field, value)
    assert config_json(other) == config_json(tiny.config("qwen3_vl").text_config)


def test_the_attention_kernel_does_not_count():
    one, other = tiny.config("qwen3_vl").text_config, tiny.config("qwen3_vl").text_config
    one._attn_implementation, other._attn_implementation = "eager", "vlcache"
    assert config_json(one) == config_json(other)


def test_config_json_is_canonical():
    text = config_json(tiny.config("qwen2_5_vl").text_config)
    assert json.dumps(json.loads(text), sort_keys=True) == text


@pytest.mark.parametrize("part", ["vision_config", "text_config"])
def test_architectures_of_equal_numbers_differ(part):
    configs = [getattr(tiny.config(name), part) for name in tiny.ARCHITECTURES]
    assert len({config_json(config) for config in configs}) == 3


# --- layouts and contexts


def test_sequential_and_m_rope_layouts_are_two_groups():
    model = keys()
    line = np.tile(np.arange(4), (3, 1))
    square = np.array([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])
    groups = {model.kv_group("i", layout) for layout in (line, square, square[[0, 2, 1]], square[::-1].copy())}
    assert len(groups) == 4


def test_a_strided_layout_has_the_key_of_its_values():
    wide = np.arange(24).reshape(3, 8)
    assert keys().kv_group("i", wide[:, ::2]) == keys().kv_group("i", wide[:, ::2].copy())


def positions(start: int, count: int) -> np.ndarray:
    return np.tile(np.arange(start, start + count), (3, 1))


def context(*parts: list[int] | str, start: int = 0) -> str:
    """Context of an image that follows `parts`: lists of ids and names of images of two tokens."""
    chain, at = ContextChain(), start
    for part in parts:
        if isinstance(part, str):
            chain.image(part, positions(at, 2))
            at += 2
        else:
            chain.text(np.array(part, np.int64), positions(at, len(part)))
            at += len(part)
    return chain.image("asked", positions(at, 2))


def test_a_context_does_not_depend_on_the_image_itself():
    first, second = ContextChain(), ContextChain()
    for chain in (first, second):
        chain.text(np.arange(3), positions(0, 3))
    assert first.image("a", positions(3, 2)) == second.image("b", positions(3, 2))
    assert first.image("c", positions(5, 2)) != second.image("c", positions(5, 2))


@given(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=4))
@settings(deadline=None)
def test_contexts_are_equal_for_equal_ids_only(one, other):
    assert (context(one) == context(other)) == (one == other)


def test_all_that_stands_before_counts():
    contexts = [
        context(),
        context([1]),
        context([1, 2]),
        context([2, 1]),
        context([1], "a"),
        context("a", [1]),
        context([1], "b"),
        context([1], "a", "b"),
        context([1], "b", "a"),
        context([1], start=5),
    ]
    for one, other in itertools.combinations(contexts, 2):
        assert one != other


def test_an_image_may_stand_at_the_very_start_or_behind_another():
    """There is no text then: neither a crash nor an equal digest."""
    chain = ContextChain()
    chain.text(np.empty(0, np.int64), np.empty((3, 0), np.int64))
    first = chain.image("a", positions(0, 2))
    chain.text(np.empty(0, np.int64), np.empty((3, 0), np.int64))
    assert first != chain.image("b", positions(2, 2))


def test_positions_of_the_context_and_the_start_count():
    chains = [ContextChain() for _ in range(3)]
    ids = np.array([1, 2])
    chains[0].text(ids, positions(0, 2))
    chains[1].text(ids, np.array([[0, 1], [0, 1], [0, 2]]))
    chains[2].text(ids, positions(0, 2))
    found = [chain.image("i", positions(at, 2)) for chain, at in zip(chains, (2, 2, 3))]
    assert len(set(found)) == 3


def test_asking_for_a_context_does_not_change_the_chain():
    one, other = ContextChain(), ContextChain()
    assert one.image("a", positions(0, 2)) == other.image("a", positions(0, 2))
    assert one.image("b", positions(2, 2)) == other.image("b", positions(2, 2))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_can_hash() -> None:
    """A hash that keeps threads would wait in the child for threads that a fork does not copy."""
    pixels = torch.randn(4096, 256)  # 4 MiB, more than libraries hash in one thread
    expected = pixel_digest(pixels, [1, 64, 64])
    child = os.fork()
    if not child:
        os._exit(0 if pixel_digest(pixels, [1, 64, 64]) == expected else 1)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
