"""Never another image's, another model's or another request's content (the failures 1-13 and 16 of the field notes).

Every test compares with the stock model, and every "warm" test asserts that it was a hit, or that it was none.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicCache

import vlcache_hf
from tests import tiny
from vlcache_hf import VLCache, encoder, keys
from vlcache_hf.cache import is_tainted
from vlcache_hf.models import serving

ROOT = Path(__file__).parents[1]
HALVES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def reference(architecture):
    """The stock model; never changed."""
    return tiny.stock(architecture)


@pytest.fixture(scope="module")
def shared(architecture):
    """A model that tests point at a store of their own."""
    return tiny.stock(architecture)


@pytest.fixture
def cached(shared, tmp_path):
    return vlcache_hf.attach(shared, {"cache_dir": tmp_path / "cache", "lossy_multi_image": True})


@pytest.fixture
def qwen3(tmp_path):
    """One architecture is enough where the store or the key is asked, not the model."""
    return ours(tmp_path)


@pytest.fixture(scope="module")
def qwen3_reference():
    return tiny.stock("qwen3_vl")


def ours(tmp_path, model=None, **settings):
    return vlcache_hf.attach(model or tiny.stock("qwen3_vl"), {"cache_dir": tmp_path / "cache", **settings})


@contextlib.contextmanager
def tower_calls(model):
    """Counts the runs of a model's vision tower itself, whoever calls it."""
    kind, count = type(model.model.visual), [0]
    original = kind.forward

    def counting(self, *args, **kwargs):
        count[0] += self is model.model.visual
        return original(self, *args, **kwargs)

    kind.forward = counting
    try:
        yield count
    finally:
        kind.forward = original


@torch.no_grad()
def logits(model, inputs, **kwargs):
    return model(**tiny.clone(inputs), logits_to_keep=1, **kwargs).logits


def same(model, reference, inputs, expected: list[str] | None = None, **kwargs) -> None:
    """Greedy tokens are those of stock, and the images were served as expected."""
    out = tiny.generate(model, inputs, 4, **kwargs)
    found = tiny.kinds(model)
    assert out.tolist() == tiny.generate(reference, inputs, 4).tolist()
    if expected is not None:
        assert found == expected


def close(model, reference, inputs, expected: list[str] | None = None) -> None:
    """The last logits are those of stock, and the images were served as expected."""
    out = logits(model, inputs)
    found = tiny.kinds(model)
    torch.testing.assert_close(out, logits(reference, inputs), atol=1e-5, rtol=1e-5)
    if expected is not None:
        assert found == expected


def ask(*pictures, before: int = 3, question: int = 1, **kwargs):
    return tiny.batch(tiny.prompt(tiny.text(0, before), *pictures, tiny.text(question, 5)), **kwargs)


def entries(tmp_path, kind="*") -> list[Path]:
    return sorted((tmp_path / "cache").glob(f"{kind}/*/*/*.safetensors"))


# --- 1-7: the image


def test_equal_bytes_in_other_grids(cached, reference):
    pixels, _ = tiny.image(0, 8, 4)
    tall, wide = ask((pixels, [1, 8, 4])), ask((pixels, [1, 4, 8]))
    assert tall["input_ids"].tolist() == wide["input_ids"].tolist()
    assert not torch.allclose(logits(reference, tall), logits(reference, wide), atol=1e-3)
    close(cached, reference, tall, ["miss"])
    close(cached, reference, wide, ["miss"])
    assert cached.vlcache.stats().vision_calls == 2
    close(cached, reference, tall, ["exact"])
    close(cached, reference, wide, ["exact"])


def test_one_template_and_many_images(cached, reference):
    requests = [ask(tiny.image(seed)) for seed in range(8)]
    assert len({str(logits(reference, request)) for request in requests}) == 8
    for request in requests:
        same(cached, reference, request, ["miss"])
    random.Random(0).shuffle(requests)
    with tower_calls(cached) as calls:
        for request in requests:
            same(cached, reference, request, ["exact"])
    assert calls == [0]


def test_slightly_other_pixels_are_another_image(cached, reference):
    request = ask(tiny.image(0))
    same(cached, reference, request, ["miss"])
    noisy = tiny.clone(request)
    noisy["pixel_values"] += 1e-3 * torch.randn_like(noisy["pixel_values"])
    close(cached, reference, noisy, ["miss"])
    one = tiny.clone(request)
    one["pixel_values"][-1, -1] = torch.nextafter(one["pixel_values"][-1, -1], torch.tensor(9.0))
    close(cached, reference, one, ["miss"])
    close(cached, reference, request, ["exact"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_pixels_of_another_dtype(cached, reference, dtype):
    request = ask(tiny.image(0))
    same(cached, reference, request, ["miss"])
    other = {**request, "pixel_values": request["pixel_values"].to(dtype)}
    close(cached, reference, other)
    assert tiny.kinds(cached) == ["miss"]
    close(cached, reference, other, ["exact"])
    close(cached, reference, request, ["exact"])


def test_pixels_edited_in_place(cached, reference):
    request = ask(tiny.image(0))
    for kind in ("miss", "exact"):
        out = cached.generate(**request, max_new_tokens=8, do_sample=False)
        assert tiny.kinds(cached) == [kind]
        assert out.tolist() == tiny.generate(reference, request).tolist()
    request["pixel_values"].mul_(-1)
    out = cached.generate(**request, max_new_tokens=8, do_sample=False)
    assert tiny.kinds(cached) == ["miss"]
    assert out.tolist() == tiny.generate(reference, request).tolist()


@torch.no_grad()
def test_features_of_a_returned_output_outlive_an_edit_of_the_pixels(qwen3, qwen3_reference, tmp_path):
    """A hit brings no features until somebody asks for them; the caller's buffer may hold the next frame by then."""
    request = ask(tiny.image(0))
    logits(qwen3, request)
    shutil.rmtree(tmp_path / "cache" / "vit")  # evicted: a hit on the KV does not use the features
    wanted = qwen3_reference(**request).image_outputs.pooler_output[0]
    output = qwen3(**request, logits_to_keep=1)
    assert tiny.kinds(qwen3) == ["exact"]
    request["pixel_values"].zero_()
    torch.testing.assert_close(output.image_outputs.pooler_output[0], wanted, atol=1e-5, rtol=1e-5)


def test_three_thousand_images_have_three_thousand_keys(qwen3):
    pixels = torch.randn(3000 * 4, 96)
    found = serving.encode(qwen3, pixels, torch.tensor([[1, 2, 2]] * 3000), None)
    assert len({image.key for image in found.images}) == 3000


def constant_digest(monkeypatch):
    monkeypatch.setattr(encoder, "pixel_digest", lambda pixels, grid: "0" * 64)


@pytest.mark.parametrize("sizes", [((8, 8), (8, 4)), ((4, 4), (8, 8)), ((8, 4), (4, 8)), ((4, 16), (16, 4))], ids=str)
def test_colliding_digests_of_images_of_other_shapes(cached, reference, monkeypatch, sizes):
    """Were the hash broken, what can still be seen must be looked at: token count and grid."""
    constant_digest(monkeypatch)
    one, other = (ask(tiny.image(seed, *size)) for seed, size in enumerate(sizes))
    close(cached, reference, one, ["miss"])
    close(cached, reference, other, ["miss"])
    close(cached, reference, one)


def test_one_digest_for_everything(qwen3, qwen3_reference, monkeypatch):
    monkeypatch.setattr(keys.Digest, "hex", lambda self: "0" * 64)
    one, other = ask(tiny.image(0, 4, 4)), ask(tiny.image(1, 8, 8))
    close(qwen3, qwen3_reference, one, ["miss"])
    close(qwen3, qwen3_reference, other, ["miss"])


# --- 8: no more than that in the key


def test_an_image_is_found_again_wherever_it_stands(cached, reference):
    a, b = tiny.image(0), tiny.image(1, 8, 4)
    same(cached, reference, ask(a), ["miss"])
    requests = {
        "behind another": ask(b, a),
        "in front of another": ask(a, b),
        "another question": ask(a, question=7),
        "another system prompt": ask(a, before=9),
        "twice": ask(a, a),
    }
    for name, request in requests.items():
        record = record_of(cached, request)
        found = {image.key: image.kv for image in record}
        assert found[key_of(cached, a)] != "miss", name
    record = record_of(cached, ask(a, b, question=3))
    assert [image.kv for image in record][0] == "exact"


def record_of(model, request):
    tiny.generate(model, request, tokens=1)
    return model.vlcache.last_request.images


def key_of(model, picture):
    model_keys = model.vlcache.model_keys(model.model, model.vlcache.config.namespace)
    return model_keys.image(keys.pixel_digest(*picture))


def test_only_the_new_image_of_a_pair_is_encoded(cached):
    a, b, c = (tiny.image(seed) for seed in range(3))
    tiny.generate(cached, ask(a))
    seen = []
    kind = type(cached.model.visual)
    original = kind.forward

    def spy(self, pixels, *args, **kwargs):
        seen.append(pixels.clone())
        return original(self, pixels, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", spy)
        tiny.generate(cached, ask(a, b))
        tiny.generate(cached, ask(c, b, a))
    assert len(seen) == 2
    assert torch.equal(seen[0], b[0]) and torch.equal(seen[1], c[0])


def test_an_image_is_found_again_in_a_batch(cached, reference):
    a, b, c = (tiny.image(seed) for seed in range(3))
    prompts = [tiny.prompt(tiny.text(0, n), picture, tiny.text(n, 4)) for n, picture in ((3, a), (5, b), (4, c))]
    same(cached, reference, tiny.batch(prompts[0]), ["miss"])
    same(cached, reference, tiny.batch(*prompts), ["exact", "miss", "miss"])
    for side, order in itertools.product(("left", "right"), itertools.permutations(range(3))):
        request = tiny.batch(*(prompts[i] for i in order), side=side)
        close(cached, reference, request, ["exact"] * 3)


def test_batch_rows_with_one_image_are_one_miss_each_and_then_hits(cached, reference):
    rows = [tiny.prompt(tiny.text(0, 3), tiny.image(0), tiny.text(n, 4)) for n in range(3)]
    with tower_calls(cached) as calls:
        same(cached, reference, tiny.batch(*rows), ["miss"] * 3)
        same(cached, reference, tiny.batch(*rows), ["exact"] * 3)
    assert calls == [1]


def test_an_image_at_the_very_start_of_the_prompt(cached, reference):
    """No token in front of it at all."""
    ids, images = tiny.prompt(tiny.image(0), tiny.text(1, 5))
    request = tiny.batch((ids[1:], images))
    assert int(request["input_ids"][0, 0]) == tiny.IMAGE
    same(cached, reference, request, ["miss"])
    same(cached, reference, request, ["exact"])


def test_images_without_a_token_between_them(cached, reference):
    """Stock cannot make M-RoPE positions for this; with positions given it can."""
    cached.vlcache.config.reuse = "exact"
    a, b = tiny.image(0), tiny.image(1)
    for pair in ((a, b), (b, a), (a, b)):
        request = tiny.batch(([*tiny.text(0, 3), *[tiny.IMAGE] * 32, *tiny.text(1, 4)], list(pair)))
        length = request["input_ids"].shape[1]
        request["position_ids"] = torch.arange(length).view(1, 1, -1).expand(3, 1, -1)
        close(cached, reference, request)
    assert tiny.kinds(cached) == ["exact", "exact"]


# --- 10, 12: the weights


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_other_weights_in_the_same_folder(tmp_path, architecture):
    request = ask(tiny.image(0))
    auto = vlcache_hf.models.auto.AutoModelForImageTextToText
    for seed, kind in ((0, "miss"), (1, "miss"), (0, "exact"), (1, "exact")):
        stock = tiny.stock(architecture, seed)
        stock.save_pretrained(tmp_path / "model")
        model = auto.from_pretrained(
            tmp_path / "model", attn_implementation="vlcache", vlcache_config={"cache_dir": tmp_path / "cache"}
        )
        same(model, stock, request, [kind])


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.0.input_layernorm.weight",
        "model.language_model.layers.1.self_attn.k_proj.weight",
        "model.language_model.embed_tokens.weight",
        "model.visual.blocks.0.attn.qkv.weight",
        "model.visual.patch_embed.proj.weight",
    ],
)
def test_one_changed_parameter(cached, architecture, name):
    request, fresh = ask(tiny.image(0)), tiny.stock(architecture)
    same(cached, fresh, request, ["miss"])
    # what to restore: other tests use the model
    parameter = cached.get_parameter(name)
    before = parameter.detach().clone()
    try:
        with torch.no_grad():
            for model in (cached, fresh):
                model.get_parameter(name).view(-1)[100 if "norm" not in name else 3] += 0.5
        close(cached, fresh, request, ["miss"])
    finally:
        with torch.no_grad():
            parameter.copy_(before)
    assert torch.equal(parameter, before)


def test_a_changed_buffer(qwen3, qwen3_reference):
    request = ask(tiny.image(0))
    same(qwen3, qwen3_reference, request, ["miss"])
    changed = tiny.stock("qwen3_vl")
    for model in (qwen3, changed):
        model.model.language_model.rotary_emb.inv_freq.mul_(0.9)
    close(qwen3, changed, request, ["miss"])


def test_negated_channels(qwen3):
    """Top bits only; an even number of them."""
    request, changed = ask(tiny.image(0)), tiny.stock("qwen3_vl")
    same(qwen3, changed, request, ["miss"])
    with torch.no_grad():
        for model in (qwen3, changed):
            model.model.language_model.layers[1].self_attn.k_proj.weight[:, 1] *= -1
    close(qwen3, changed, request, ["miss"])


def test_edits_through_data_need_refresh(qwen3):
    request, changed = ask(tiny.image(0)), tiny.stock("qwen3_vl")
    same(qwen3, changed, request, ["miss"])
    for model in (qwen3, changed):
        model.model.language_model.layers[0].mlp.down_proj.weight.data.mul_(1.5)
    qwen3.vlcache.refresh()
    close(qwen3, changed, request, ["miss"])
    close(qwen3, changed, request, ["exact"])


def test_a_hook_that_changes_the_activations(qwen3):
    """Steering vectors: the weights are the same, the KV is not."""
    request, changed = ask(tiny.image(0)), tiny.stock("qwen3_vl")
    same(qwen3, changed, request, ["miss"])

    def steer(module, args, output):
        return (output[0] + 1, *output[1:]) if isinstance(output, tuple) else output + 1

    handles = [m.model.language_model.layers[1].register_forward_hook(steer) for m in (qwen3, changed)]
    close(qwen3, changed, request)
    close(qwen3, changed, request)
    for handle in handles:
        handle.remove()
    close(qwen3, changed, request, ["exact"])  # and what the hook touched is not taken for the model's own


def test_a_hook_on_the_vision_tower(qwen3):
    request, changed = ask(tiny.image(0)), tiny.stock("qwen3_vl")
    same(qwen3, changed, request, ["miss"])

    def steer(module, args, output):
        return output * 2

    handles = [m.model.visual.patch_embed.register_forward_hook(steer) for m in (qwen3, changed)]
    close(qwen3, changed, request)
    close(qwen3, changed, ask(tiny.image(1)))
    for handle in handles:
        handle.remove()
    close(qwen3, changed, ask(tiny.image(1)))


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_dtypes_share_a_directory_and_no_entry(tmp_path, architecture):
    request = ask(tiny.image(0))
    for kind in ("miss", "exact"):
        for dtype in HALVES:
            stock = tiny.stock(architecture, dtype=dtype)
            model = ours(tmp_path, tiny.stock(architecture, dtype=dtype))
            out = logits(model, request)
            assert tiny.kinds(model) == [kind]
            tolerance = 1e-5 if dtype == torch.float32 else 0.15
            torch.testing.assert_close(out, logits(stock, request), atol=tolerance, rtol=tolerance)
            assert out.dtype == dtype


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_autocast_is_a_dtype_of_its_own(tmp_path, architecture):
    request, stock = ask(tiny.image(0)), tiny.stock(architecture)
    model = ours(tmp_path, tiny.stock(architecture))
    close(model, stock, request, ["miss"])
    for kind in ("miss", "exact"):
        with torch.autocast("cpu", torch.bfloat16):
            out, wanted = logits(model, request), logits(stock, request)
        assert tiny.kinds(model) == [kind]
        torch.testing.assert_close(out, wanted, atol=0.15, rtol=0.15)
    close(model, stock, request, ["exact"])


@torch.no_grad()
def test_features_that_a_caller_kept_while_the_weights_changed(qwen3, qwen3_reference):
    """Stock takes yesterday's features as they are; nothing made from them is an entry of today's weights, nor is an
    entry of yesterday's weights used today."""
    qwen3.vlcache.config.reuse = "exact"
    old, changed = ask(tiny.image(0)), tiny.stock("qwen3_vl")
    moved = ask(tiny.image(0), before=6)  # a context that was not met before the change
    kept = qwen3(**old, logits_to_keep=1).image_outputs
    kept_stock = qwen3_reference(**old, logits_to_keep=1).image_outputs
    weight = qwen3.model.language_model.layers[0].self_attn.v_proj.weight
    before = weight.clone()
    for model in (qwen3, changed):
        model.model.language_model.layers[0].self_attn.v_proj.weight.mul_(-1.5)
    for request in (old, moved):
        rest = {name: value for name, value in request.items() if name != "pixel_values"}
        out = qwen3(**rest, mm_encoder_outputs={"image": kept}, logits_to_keep=1).logits
        wanted = changed(**rest, mm_encoder_outputs={"image": kept_stock}, logits_to_keep=1).logits
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    weight.copy_(before)
    close(qwen3, qwen3_reference, moved)


@torch.no_grad()
def test_features_that_a_caller_passes_again(qwen3, qwen3_reference):
    """The same with unchanged weights: nothing is encoded again."""
    old, other = ask(tiny.image(0)), ask(tiny.image(0), question=2)
    kept = qwen3(**old, logits_to_keep=1).image_outputs
    rest = {name: value for name, value in other.items() if name != "pixel_values"}
    with tower_calls(qwen3) as calls:
        out = qwen3(**rest, mm_encoder_outputs={"image": kept}, logits_to_keep=1).logits
    assert calls == [0]
    torch.testing.assert_close(out, logits(qwen3_reference, other), atol=1e-5, rtol=1e-5)


# --- 11, 14: namespaces


def test_namespaces_share_nothing(cached, reference):
    request = ask(tiny.image(0))
    for namespace in ("a", "b", "", "A"):
        for kind in ("miss", "exact"):
            same(cached, reference, request, [kind], cache=VLCache(namespace=namespace))
    # nor a lossy reuse
    same(cached, reference, ask(tiny.image(0), before=7), ["miss"], cache=VLCache(namespace="c"))


def test_a_namespace_of_the_model(tmp_path, qwen3_reference):
    request = ask(tiny.image(0))
    for namespace, kind in (("a", "miss"), ("b", "miss"), ("a", "exact"), ("b", "exact")):
        model = ours(tmp_path, namespace=namespace)
        with tower_calls(model) as calls:
            same(model, qwen3_reference, request, [kind])
        assert calls == [int(kind == "miss")]


# --- contexts, promotion, taint


def test_the_third_meeting_of_a_context_is_exact(cached, reference):
    picture = tiny.image(0)
    same(cached, reference, ask(picture), ["miss"])
    moved = ask(picture, before=9)
    assert logits(cached, moved) is not None and tiny.kinds(cached) == ["reused"]
    close(cached, reference, moved, ["miss"])
    close(cached, reference, moved, ["exact"])
    close(cached, reference, ask(picture), ["exact"])


def test_promotion_survives_a_restart(tmp_path, qwen3_reference):
    moved = ask(tiny.image(0), before=9)
    tiny.generate(ours(tmp_path), ask(tiny.image(0)))
    model = ours(tmp_path)
    tiny.generate(model, moved)
    assert tiny.kinds(model) == ["reused"]
    model = ours(tmp_path)
    same(model, qwen3_reference, moved, ["miss"])
    model = ours(tmp_path)
    same(model, qwen3_reference, moved, ["exact"])


def test_exact_reuse_is_never_lossy(cached, reference):
    picture = tiny.image(0)
    cached.vlcache.config.reuse = "exact"
    for before in (3, 6, 9):
        same(cached, reference, ask(picture, before=before), ["miss"])
    for before in (3, 6, 9):
        same(cached, reference, ask(picture, before=before), ["exact"])
    assert cached.vlcache.stats().vision_calls == 1


def test_a_lossy_reuse_is_lossy(qwen3, qwen3_reference):
    """Guards the others: were reuse never lossy, taint could not be seen."""
    tiny.generate(qwen3, ask(tiny.image(0)))
    moved = ask(tiny.image(0), before=9)
    out = logits(qwen3, moved, cache=VLCache(schedule=0.0))
    assert tiny.kinds(qwen3) == ["reused"]
    right = logits(qwen3_reference, moved)
    wrong = logits(qwen3_reference, ask(tiny.image(5), before=9))
    assert 1e-3 < (out - right).norm() < (wrong - right).norm()


def test_what_stands_behind_a_lossy_reuse_is_not_stored(cached, reference, tmp_path):
    a, b = tiny.image(0), tiny.image(1)
    same(cached, reference, ask(a), ["miss"])
    pair = ask(a, b, before=9)
    before = set(entries(tmp_path, "kv"))
    logits(cached, pair)
    assert tiny.kinds(cached) == ["reused", "miss"]
    assert [image.stored for image in cached.vlcache.last_request.images] == [False, False]
    assert set(entries(tmp_path, "kv")) == before
    close(cached, reference, pair, ["miss", "miss"])  # promoted, and b with it
    close(cached, reference, pair, ["exact", "exact"])


def test_taint_stays_in_its_batch_row(cached, reference):
    a, b = tiny.image(0), tiny.image(1)
    same(cached, reference, ask(a), ["miss"])
    rows = [tiny.prompt(tiny.text(0, 9), a, tiny.text(1, 5)), tiny.prompt(tiny.text(0, 2), b, tiny.text(1, 5))]
    logits(cached, tiny.batch(*rows))
    assert [image.kv for image in cached.vlcache.last_request.images] == ["reused", "miss"]
    assert [image.stored for image in cached.vlcache.last_request.images] == [False, True]
    close(cached, reference, tiny.batch(rows[1]), ["exact"])


def test_a_returned_cache_says_whether_it_is_tainted(cached):
    tiny.generate(cached, ask(tiny.image(0)))
    config = cached.config.text_config
    clean = tiny.generate(cached, ask(tiny.image(0)), return_dict_in_generate=True).cache
    assert tiny.kinds(cached) == ["exact"] and not is_tainted(clean)
    lossy = tiny.generate(cached, ask(tiny.image(0), before=9), return_dict_in_generate=True).cache
    assert tiny.kinds(cached) == ["reused"] and is_tainted(lossy)
    passed = DynamicCache(config=config)
    logits(cached, ask(tiny.image(0), before=6), cache=passed)
    assert tiny.kinds(cached) == ["reused"] and is_tainted(passed)


def test_nothing_is_stored_from_a_turn_on_a_tainted_cache(cached, tmp_path):
    tiny.generate(cached, ask(tiny.image(0)))
    first = ask(tiny.image(0), before=9)
    cache = tiny.generate(cached, first, return_dict_in_generate=True).cache
    assert is_tainted(cache)
    before = entries(tmp_path, "kv")
    second = ask(tiny.image(1))
    length = int(cache.get_seq_length())
    ids = second["input_ids"]
    with torch.no_grad(), contextlib.suppress(ValueError, IndexError, RuntimeError):
        # stock itself refuses some of these calls; what counts is that nothing of them is kept
        cached(
            **{**second, "attention_mask": torch.ones(1, length + ids.shape[1], dtype=torch.long)},
            cache=cache,
            position_ids=torch.arange(length, length + ids.shape[1]).view(1, 1, -1).expand(3, 1, -1),
        )
    assert entries(tmp_path, "kv") == before


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_contexts_per_image(tmp_path, qwen3_reference, limit):
    model = ours(tmp_path, contexts_per_image=limit, reuse="exact")
    for before in range(2, 8):
        same(model, qwen3_reference, ask(tiny.image(0), before=before), ["miss"])
    assert len(entries(tmp_path, "kv")) == limit and len(entries(tmp_path, "vit")) == 1
    for before in range(8 - limit, 8):
        same(model, qwen3_reference, ask(tiny.image(0), before=before), ["exact"])
    same(model, qwen3_reference, ask(tiny.image(0), before=2), ["miss"])


def test_the_context_used_last_survives(tmp_path, qwen3_reference):
    model = ours(tmp_path, contexts_per_image=2, reuse="exact")
    for before, kind in ((2, "miss"), (3, "miss"), (2, "exact"), (4, "miss"), (2, "exact"), (3, "miss")):
        same(model, qwen3_reference, ask(tiny.image(0), before=before), [kind])


def video_prompt(seed: int, picture):
    """A video of two frames, then an image."""
    pixels, grid = tiny.image(seed, 4, 4)
    ids = [*tiny.text(0, 3), tiny.VISION_START, *[tiny.VIDEO] * 4, tiny.VISION_END]
    rest, images = tiny.prompt(picture, tiny.text(1, 5))
    inputs = tiny.batch((ids + rest, images))
    inputs["mm_token_type_ids"] += 2 * (inputs["input_ids"] == tiny.VIDEO).int()
    return {**inputs, "pixel_values_videos": pixels, "video_grid_thw": torch.tensor([grid])}


def test_an_image_behind_a_video(cached, reference, tmp_path):
    picture = tiny.image(0)
    outputs = []
    for seed in (10, 11, 10, 11):
        request = video_prompt(seed, picture)
        out = tiny.generate(cached, request)
        assert out.tolist() == tiny.generate(reference, request).tolist()
        assert cached.vlcache.last_request.in_full
        outputs.append(logits(reference, request))
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
    assert entries(tmp_path, "kv") == []
    same(cached, reference, ask(picture), ["miss"])
    for seed in (10, 11):
        same(cached, reference, video_prompt(seed, picture), ["miss"])
        assert cached.vlcache.last_request.images[0].encoder == "hit"


def test_holes_in_the_mask(cached, reference):
    picture = tiny.image(0)
    cached.vlcache.config.reuse = "exact"
    whole = ask(picture, before=6)
    same(cached, reference, whole, ["miss"])
    for hole in (1, 2, 4):
        holed = tiny.clone(whole)
        holed["attention_mask"][0, hole] = 0
        close(cached, reference, holed, ["miss"])
        close(cached, reference, holed, ["exact"])
    close(cached, reference, whole, ["exact"])


def test_a_hidden_token_may_be_anything(cached, reference):
    picture = tiny.image(0)
    cached.vlcache.config.reuse = "exact"
    holed = ask(picture, before=6)
    holed["attention_mask"][0, 2] = 0
    close(cached, reference, holed, ["miss"])
    other = tiny.clone(holed)
    other["input_ids"][0, 2] = 77
    close(cached, reference, other, ["exact"])


def test_a_masked_image_token(cached, reference):
    """Stock fails on it with M-RoPE, and computes it at given positions."""
    request = ask(tiny.image(0))
    same(cached, reference, request, ["miss"])
    request["attention_mask"][0, 6] = 0
    for model in (reference, cached):
        with pytest.raises(RuntimeError, match="shape mismatch"):
            logits(model, request)
    request["position_ids"] = torch.arange(request["input_ids"].shape[1]).view(1, 1, -1).expand(3, 1, -1)
    close(cached, reference, request)
    assert cached.vlcache.last_request.in_full


def test_a_foreign_cache_before_the_image(cached, reference, tmp_path):
    """The same ids on two pasts that the ids do not show."""
    picture = tiny.image(0)
    same(cached, reference, ask(picture), ["miss"])
    before = entries(tmp_path, "kv")
    request = ask(picture)
    length = request["input_ids"].shape[1]
    wanted = {**request, "attention_mask": torch.ones(1, length + 4, dtype=torch.long)}
    wanted["position_ids"] = torch.arange(4, 4 + length).view(1, 1, -1).expand(3, 1, -1)
    for seed in (20, 21):
        results = []
        for model in (reference, cached):
            cache = DynamicCache(config=model.config.text_config)
            with torch.no_grad():
                model.model.language_model(input_ids=torch.tensor([tiny.text(seed, 4)]), cache=cache)
            results.append(logits(model, wanted, cache=cache))
        torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
        assert cached.vlcache.last_request.in_full
    assert entries(tmp_path, "kv") == before


def test_embeddings_instead_of_ids_are_unknown(cached, reference, tmp_path):
    request = ask(tiny.image(0))
    same(cached, reference, request, ["miss"])
    before = entries(tmp_path, "kv")
    positions = torch.arange(request["input_ids"].shape[1]).view(1, 1, -1).expand(3, 1, -1)
    for shift in (0.0, 1.0):
        results = []
        for model in (reference, cached):
            embeds = model.get_input_embeddings()(request["input_ids"]).detach().clone()
            embeds[0, 0] += shift  # a token of text before the image
            given = {**request, "inputs_embeds": embeds, "input_ids": None, "position_ids": positions}
            results.append(logits(model, given))
        torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
        assert cached.vlcache.last_request.in_full
    assert entries(tmp_path, "kv") == before


# --- 16: positions


@pytest.mark.parametrize("first", ["m-rope", "sequential"])
def test_layouts_do_not_mix(cached, reference, first):
    cached.vlcache.config.reuse = "lossy"
    full = ask(tiny.image(0))
    bare = {name: value for name, value in full.items() if name != "mm_token_type_ids"}
    one, other = (full, bare) if first == "m-rope" else (bare, full)
    assert tiny.generate(reference, full).tolist() != tiny.generate(reference, bare).tolist()
    same(cached, reference, one, ["miss"])
    same(cached, reference, other, ["miss"])
    same(cached, reference, one, ["exact"])
    same(cached, reference, other, ["exact"])


@pytest.mark.parametrize("rows", [3, 4])
def test_explicit_positions(cached, reference, rows):
    full = ask(tiny.image(0))
    same(cached, reference, full, ["miss"])
    length = full["input_ids"].shape[1]
    positions = torch.arange(length).view(1, 1, -1).expand(rows, 1, -1).clone()
    positions[-1] += 2
    for _ in range(2):
        close(cached, reference, {**full, "position_ids": positions})
    close(cached, reference, full, ["exact"])


# --- restarts

_CHILD = """
import json, sys
import torch, vlcache_hf
from tests import tiny
from transformers import AutoModelForImageTextToText

model = AutoModelForImageTextToText.from_pretrained(
    sys.argv[1], attn_implementation="vlcache", vlcache_config={"cache_dir": sys.argv[2]}
)
kind, calls = type(model.model.visual), 0
original = kind.forward
def counting(*args, **kwargs):
    global calls
    calls += 1
    return original(*args, **kwargs)
kind.forward = counting
request = tiny.batch(tiny.prompt(tiny.text(0, 3), tiny.image(0), tiny.text(1, 5)))
out = tiny.generate(model, request)
print(json.dumps({"tokens": out.tolist(), "kinds": tiny.kinds(model), "calls": calls}))
"""


def child(tmp_path, seed: str, cwd) -> dict:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", _CHILD, str(tmp_path / "model"), str(tmp_path / "cache")]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=cwd, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_finds_what_the_first_stored(tmp_path, qwen3_reference):
    qwen3_reference.save_pretrained(tmp_path / "model")
    wanted = tiny.generate(qwen3_reference, ask(tiny.image(0))).tolist()
    (tmp_path / "elsewhere").mkdir()
    first = child(tmp_path, "1", ROOT)
    assert first == {"tokens": wanted, "kinds": ["miss"], "calls": 1}
    second = child(tmp_path, "2", tmp_path / "elsewhere")
    assert second == {"tokens": wanted, "kinds": ["exact"], "calls": 0}


def test_a_model_built_anew_finds_what_another_stored(tmp_path, qwen3_reference):
    request = ask(tiny.image(0))
    same(ours(tmp_path), qwen3_reference, request, ["miss"])
    model = ours(tmp_path)
    with tower_calls(model) as calls:
        same(model, qwen3_reference, request, ["exact"])
    assert calls == [0]


# --- 13, 37, 38, 42: the directory


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def damage(path: Path, how: str, tmp_path: Path) -> None:
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    if how == "pickle":
        path.write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    elif how == "torch.save":
        torch.save(Bomb(tmp_path / "executed"), path)
    elif how == "folder":
        path.unlink()
        path.mkdir()
    else:
        cut = {"empty": 0, "8 bytes": 8, "header": header, "half": len(data) // 2, "one byte": len(data) - 1}[how]
        path.write_bytes(data[:cut])


@pytest.mark.parametrize("how", ["empty", "8 bytes", "header", "half", "one byte", "pickle", "torch.save", "folder"])
def test_damaged_entries_are_misses(tmp_path, qwen3, qwen3_reference, how):
    request = ask(tiny.image(0))
    same(qwen3, qwen3_reference, request, ["miss"])
    for path in entries(tmp_path):
        damage(path, how, tmp_path)
    for model in (qwen3, ours(tmp_path)):
        same(model, qwen3_reference, request, ["miss"] if model is qwen3 or how == "folder" else ["exact"])
    assert not (tmp_path / "executed").exists()


def test_pickles_planted_everywhere_are_not_read(tmp_path, qwen3_reference):
    request = ask(tiny.image(0))
    same(ours(tmp_path), qwen3_reference, request, ["miss"])
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file():
            path.write_bytes(bomb)
    model = ours(tmp_path)
    same(model, qwen3_reference, request, ["miss"])
    assert not (tmp_path / "executed").exists()
    same(model, qwen3_reference, request, ["exact"])


def test_exchanged_entries_are_misses(tmp_path, qwen3, qwen3_reference):
    one, other = ask(tiny.image(0)), ask(tiny.image(1))
    for request in (one, other):
        same(qwen3, qwen3_reference, request, ["miss"])
    for kind in ("kv", "vit"):
        first, second = entries(tmp_path, kind)
        first.rename(tmp_path / "swap")
        second.rename(first)
        (tmp_path / "swap").rename(second)
    for kind in ("miss", "exact"):
        for request in (one, other):
            same(qwen3, qwen3_reference, request, [kind])


@pytest.mark.parametrize("kind", ["kv", "vit"])
def test_a_flipped_bit_in_the_payload_is_a_miss(tmp_path, qwen3, qwen3_reference, kind):
    """safetensors does not notice it."""
    request, moved = ask(tiny.image(0)), ask(tiny.image(0), before=8)
    qwen3.vlcache.config.reuse = "exact"
    same(qwen3, qwen3_reference, request, ["miss"])
    (path,) = entries(tmp_path, kind)
    data = bytearray(path.read_bytes())
    for at in range(8 + int.from_bytes(data[:8], "little") + 3, len(data), 64):
        data[at] ^= 0x40  # an exponent bit of fp32, in many values
    path.write_bytes(data)
    close(qwen3, qwen3_reference, request if kind == "kv" else moved)


@pytest.mark.parametrize("kind", ["kv", "vit"])
def test_missing_entries_are_misses(tmp_path, qwen3, qwen3_reference, kind):
    request = ask(tiny.image(0))
    same(qwen3, qwen3_reference, request, ["miss"])
    shutil.rmtree(tmp_path / "cache" / kind)
    same(qwen3, qwen3_reference, request, ["miss"] if kind == "kv" else ["exact"])


def test_the_whole_directory_goes_away(tmp_path, qwen3, qwen3_reference):
    request = ask(tiny.image(0))
    same(qwen3, qwen3_reference, request, ["miss"])
    shutil.rmtree(tmp_path / "cache")
    same(qwen3, qwen3_reference, request, ["miss"])
    same(qwen3, qwen3_reference, request, ["exact"])


@pytest.mark.parametrize("where", ["a file", "below a file", "/proc/nothing", "/dev/null/x", "a broken link"])
def test_a_directory_that_cannot_be(tmp_path, qwen3_reference, where, caplog):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at" / "all")
    place = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "x", "a broken link": tmp_path / "link"}
    model = vlcache_hf.attach(tiny.stock("qwen3_vl"), {"cache_dir": place.get(where, where)})
    request = ask(tiny.image(0))
    with caplog.at_level(logging.WARNING, "vlcache_hf"):
        for _ in range(3):
            same(model, qwen3_reference, request)
    assert (tmp_path / "file").read_text() == "x"
    warnings = [record for record in caplog.records if "store" in record.getMessage()]
    if where != "a broken link":  # which may be made a folder
        assert tiny.kinds(model) == ["miss"]
        assert 1 <= len({record.getMessage() for record in warnings}) <= 2 and len(warnings) <= 2


def test_a_directory_that_cannot_be_written_still_serves(tmp_path, qwen3_reference, monkeypatch):
    request = ask(tiny.image(0))
    same(ours(tmp_path), qwen3_reference, request, ["miss"])
    model = ours(tmp_path)
    original = os.open

    def denied(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(tmp_path) in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, flags, *args, **kwargs)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    for name in ("mkdir", "replace", "utime", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    same(model, qwen3_reference, request, ["exact"])
    same(model, qwen3_reference, ask(tiny.image(1)), ["miss"])
    same(model, qwen3_reference, ask(tiny.image(1)), ["miss"])


def test_read_only_serves_and_writes_nothing(tmp_path, qwen3_reference):
    request = ask(tiny.image(0))
    same(ours(tmp_path), qwen3_reference, request, ["miss"])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    model = ours(tmp_path, read_only=True)
    same(model, qwen3_reference, request, ["exact"])
    same(model, qwen3_reference, ask(tiny.image(1)), ["miss"])
    same(model, qwen3_reference, ask(tiny.image(1)), ["miss"])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == before


@pytest.mark.parametrize("failing", ["write", "replace"])
def test_a_write_that_breaks_off_leaves_nothing(tmp_path, qwen3, qwen3_reference, monkeypatch, failing):
    from vlcache_hf.store import disk

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    request = ask(tiny.image(0))
    with monkeypatch.context() as patch:
        patch.setattr(*((disk, "write_entry") if failing == "write" else (os, "replace")), full)
        for _ in range(2):
            same(qwen3, qwen3_reference, request, ["miss"])
    assert entries(tmp_path) == [] and list((tmp_path / "cache" / "tmp").iterdir()) == []
    same(qwen3, qwen3_reference, request, ["miss"])
    same(qwen3, qwen3_reference, request, ["exact"])


def test_an_entry_larger_than_the_cap(tmp_path, qwen3_reference):
    model = ours(tmp_path, max_disk_bytes=1000)
    for _ in range(2):
        same(model, qwen3_reference, ask(tiny.image(0)), ["miss"])
    assert entries(tmp_path) == []


def test_text_alone_touches_no_disk(tmp_path, qwen3, qwen3_reference):
    request = tiny.batch((tiny.text(0, 9), []))
    out = tiny.generate(qwen3, request)
    assert out.tolist() == tiny.generate(qwen3_reference, request).tolist()
    assert not (tmp_path / "cache").exists() and qwen3.vlcache.last_request is None
