"""`generate()` with caches that users pass or get back, against the stock model."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import CompileConfig, DynamicCache, StaticCache

from tests import tiny
from tests.models.conftest import close, files
from vlcache_hf import VLCache
from vlcache_hf.store import StoreReadError


def fails_alike(pair, ours, stock):
    """Both calls give the same tokens or the same type of exception."""
    try:
        expected = stock().tolist()
    except Exception as error:
        with pytest.raises(type(error)) as got:
            ours()
        assert str(got.value) == str(error)
        return None
    assert ours().tolist() == expected
    return expected


@pytest.mark.parametrize("with_config", [False, True], ids=["bare", "config"])
def test_dynamic_cache(pair, chat, with_config):
    made = []

    def make(model):
        made.append(DynamicCache(config=model.config if with_config else None))
        return {"cache": made[-1]}

    pair.check(chat, make=make)
    assert [cache.get_seq_length() for cache in made] == [chat["input_ids"].shape[1] + 7] * 3
    for mine, warm, theirs in zip(made[1].layers, made[2].layers, made[0].layers, strict=True):
        close(mine.keys, theirs.keys)
        close(warm.keys, theirs.keys)
        close(mine.values, theirs.values)
        close(warm.values, theirs.values)


def test_static_cache(pair, chat):
    make = lambda model: {"cache": StaticCache(config=model.config, max_cache_len=64)}  # noqa: E731
    pair.check(chat, make=make)
    pair.check(chat, make=make, cold=["exact"], return_dict_in_generate=True, output_logits=True)


def test_static_cache_of_a_batch(either):
    inputs = tiny.batch(
        tiny.prompt(tiny.text(1, 3), tiny.image(0), tiny.text(2, 5)), tiny.prompt(tiny.image(1, 4, 4), tiny.text(3, 4))
    )
    either.check(inputs, make=lambda model: {"cache": StaticCache(config=model.config, max_cache_len=64)})


def test_static_implementation_twice(pair, chat):
    """The second, shorter prompt must not see rows of the first."""
    short = tiny.batch(tiny.prompt(tiny.text(3, 2), tiny.image(1, 4, 4), tiny.text(4, 3)))
    pair.check(chat, tokens=10, cache_implementation="static")
    pair.check(short, tokens=4, cache_implementation="static")
    pair.check(chat, tokens=5, cold=["exact"], cache_implementation="static")


def test_static_beams(qwen3, chat):
    qwen3.check(chat, cold=["miss"] * 2, warm=["exact"] * 2, num_beams=2, cache_implementation="static")


@pytest.mark.parametrize("name", ["offloaded", "offloaded_static"])
def test_offloaded_implementation(qwen3, chat, name):
    try:
        tiny.generate(qwen3.stock, chat, cache_implementation=name)
    except Exception as error:
        pytest.skip(f"stock cannot do this here: {error}")
    qwen3.check(chat, cache_implementation=name)


def test_quantized_cache_of_a_hit(qwen3, chat):
    """Where no quantisation backend is installed both fail alike; where one is, nothing quantised is stored."""
    kwargs = {"cache_implementation": "quantized"}
    if fails_alike(
        qwen3, lambda: tiny.generate(qwen3.ours, chat, **kwargs), lambda: tiny.generate(qwen3.stock, chat, **kwargs)
    ):
        assert tiny.generate(qwen3.ours, chat).tolist() == tiny.generate(qwen3.stock, chat).tolist()


def compile_config(**kwargs):
    config = CompileConfig(**kwargs)
    config._compile_all_devices = True  # otherwise CPUs are left out
    return config


@pytest.mark.slow
def test_compiled_decoding(either, chat):
    """With a static cache `generate()` compiles decoding by itself; here on every device."""
    config = compile_config(backend="eager", mode=None, fullgraph=True)
    torch.compiler.reset()
    try:
        either.check(chat, cache_implementation="static", compile_config=config)
        assert either.ours._compiled_call is not None
    finally:
        either.ours._compiled_call = either.stock._compiled_call = None
        torch.compiler.reset()


def test_per_call_directory(either, chat, tmp_path):
    other = tmp_path / "other"
    either.check(chat, make=lambda model: {"cache": VLCache(cache_dir=other)})
    assert not either.cache_dir.exists() and len(files(other)) == 2
    either.check(chat)  # cold: nothing of the call's directory
    assert len(either.files) == 2


def test_per_call_namespace(either, chat):
    either.check(chat)
    either.check(chat, make=lambda model: {"cache": VLCache(model.config, namespace="tenant")})
    assert len(either.files) == 4
    either.check(chat, cold=["exact"])


def test_per_call_reuse_and_schedule(either, chat):
    other = tiny.batch(tiny.prompt(tiny.text(7, 9), tiny.image(0), tiny.text(1, 6)))
    either.check(chat)
    expected = tiny.generate(either.stock, other)
    read_only = {"read_only": True}
    tiny.generate(either.ours, other, cache=VLCache(schedule=0.0, **read_only))
    assert either.kinds == ["reused"] and either.ours.vlcache.last_request.images[0].recomputed == 0
    tiny.generate(either.ours, other, cache=VLCache(schedule=0.25, **read_only))
    assert either.ours.vlcache.last_request.images[0].recomputed == 4 * 4
    for settings in ({"schedule": 1.0}, {"reuse": "exact"}):
        got = tiny.generate(either.ours, other, cache=VLCache(**settings, **read_only))
        assert got.tolist() == expected.tolist() and either.kinds == ["miss"]
    assert len(either.files) == 2
    either.check(other, make=lambda model: {"cache": VLCache(reuse="exact")})
    assert either.ours.vlcache.config.reuse == "lossy"


def test_per_call_settings_are_checked():
    with pytest.raises(TypeError, match="cache_directory"):
        VLCache(cache_directory="x")
    with pytest.raises(ValueError, match="reuse"):
        VLCache(reuse="sometimes")


def test_per_call_cache_of_beams(qwen3, chat, tmp_path):
    make = lambda model: {"cache": VLCache(cache_dir=tmp_path / "other")}  # noqa: E731
    qwen3.check(chat, cold=["miss"] * 2, warm=["exact"] * 2, num_beams=2, make=make)
    assert not qwen3.cache_dir.exists()


# --- conversations


def turns(model, chat, question, tokens=5, **kwargs):
    """Tokens of a second turn on the cache of the first one."""
    first = tiny.generate(model, chat, tokens, return_dict_in_generate=True, **kwargs)
    ids = torch.cat([first.sequences, torch.tensor([question])], dim=-1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return tiny.generate(model, inputs, tokens, cache=first.cache), ids


def test_text_turn_on_the_returned_cache(pair, chat):
    expected, ids = turns(pair.stock, chat, tiny.text(5, 6))
    whole = dict(chat, input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == tiny.IMAGE).int())
    assert expected.tolist() == tiny.generate(pair.stock, whole, 5).tolist()
    for kinds in (["miss"], ["exact"]):
        (got, _), towers = pair.towers(lambda: turns(pair.ours, chat, tiny.text(5, 6)))
        assert got.tolist() == expected.tolist()
        assert pair.kinds == kinds and towers == (kinds == ["miss"])
    assert pair.ours.vlcache.stats().requests == 2  # the text turns asked nothing
    pair.check(whole, 5, cold=["exact"])


def test_copies_of_a_returned_cache(pair, chat):
    """Prefill once, ask several questions, each on a copy."""
    for kinds in (["miss"], ["exact"]):
        caches = [
            tiny.generate(model, chat, 1, return_dict_in_generate=True).cache for model in (pair.stock, pair.ours)
        ]
        assert pair.kinds == kinds
        assert caches[1].get_seq_length() == caches[0].get_seq_length() == chat["input_ids"].shape[1]
        before = [layer.keys.clone() for layer in caches[1].layers]
        for seed in range(3):
            ids = torch.cat([chat["input_ids"], torch.tensor([tiny.text(seed, 4 + seed)])], dim=-1)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            expected, got = (
                tiny.generate(model, inputs, 5, cache=copy.deepcopy(cache))
                for model, cache in zip((pair.stock, pair.ours), caches)
            )
            assert got.tolist() == expected.tolist()
        assert all(layer.keys.equal(keys) for layer, keys in zip(caches[1].layers, before, strict=True))


@pytest.mark.parametrize("what", ["pixels again", "another image"])
def test_images_with_a_returned_cache(either, chat, what):
    """Whatever stock makes of it - an answer or an error - ours does too; nothing is stored of it."""
    tiny.generate(either.ours, chat)
    before = either.files

    def second(model):
        first = tiny.generate(model, chat, 5, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, torch.tensor([tiny.text(5, 6)])], dim=-1)
        inputs = dict(chat, input_ids=ids)
        if what == "another image":
            more, images = tiny.prompt(tiny.text(6, 2), tiny.image(3, 4, 4), tiny.text(7, 3))
            ids = torch.cat([first.sequences, torch.tensor([more])], dim=-1)
            inputs = {"input_ids": ids, "pixel_values": images[0][0], "image_grid_thw": torch.tensor([images[0][1]])}
        inputs |= {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == tiny.IMAGE).int()}
        return tiny.generate(model, inputs, 5, cache=first.cache)

    fails_alike(either, lambda: second(either.ours), lambda: second(either.stock))
    assert [name for name in either.files if name.startswith("kv")] == [n for n in before if n.startswith("kv")]


def test_new_image_in_forward_on_a_cache(either, chat):
    """A direct call can continue a cache with an image: exact features, no KV."""
    more, images = tiny.prompt(tiny.text(6, 2), tiny.image(3, 4, 4), tiny.text(7, 3))
    ids = torch.tensor([more])
    positions = torch.arange(ids.shape[1])[None, None].expand(3, 1, -1) + chat["input_ids"].shape[1]
    logits = []
    for model in (either.stock, either.ours, either.ours):
        with torch.no_grad():
            cache = model(**tiny.clone(chat), logits_to_keep=1).cache
            mask = torch.ones(1, cache.get_seq_length() + ids.shape[1], dtype=torch.long)
            more_inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "cache": cache}
            more_inputs |= {"pixel_values": images[0][0], "image_grid_thw": torch.tensor([images[0][1]])}
            logits.append(model(**more_inputs, logits_to_keep=1).logits)
    close(logits[1], logits[0])
    close(logits[2], logits[0])
    record = either.ours.vlcache.last_request
    assert "cache" in record.in_full and [image.encoder for image in record.images] == ["hit"]
    assert len([name for name in either.files if name.startswith("kv")]) == 1


def test_cache_methods_after_a_hit(qwen3, chat):
    """crop, reorder, repeat and select work on a cache that a hit has filled."""
    tiny.generate(qwen3.ours, chat)
    caches = [tiny.generate(model, chat, 1, return_dict_in_generate=True).cache for model in (qwen3.stock, qwen3.ours)]
    assert qwen3.kinds == ["exact"]
    for cache in caches:
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        cache.batch_select_indices(torch.tensor([0, 2]))
        cache.crop(-4)
    for mine, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        close(mine.keys, theirs.keys)
        close(mine.values, theirs.values)
    caches[1].reset()
    assert caches[1].get_seq_length() == 0
    ids = SimpleNamespace(**chat).input_ids
    assert tiny.generate(qwen3.ours, chat, cache=caches[1])[0, : ids.shape[1]].tolist() == ids[0].tolist()
    assert qwen3.kinds == ["exact"]


def test_used_cache_is_empty_again_after_a_bad_entry(either, chat):
    """An entry that breaks off in the middle of the prefill: the caller's cache starts over."""
    inner = either.ours.vlcache.store
    for make in (
        lambda model: {},
        lambda model: {"cache": StaticCache(config=model.config, max_cache_len=64)},
        lambda model: {"cache": DynamicCache(config=model.config)},
    ):
        either.ours.vlcache.clear()
        tiny.generate(either.ours, chat)
        real = inner.get

        def broken(kind, group, name, real=real):
            entry = real(kind, group, name)
            if entry is not None and kind == "kv":
                rows = entry.rows

                def fail(what, *args):
                    if what == "k.2":
                        raise StoreReadError("broken")
                    return rows(what, *args)

                entry.rows = fail
            return entry

        inner.get = broken
        try:
            expected = tiny.generate(either.stock, chat, **make(either.stock))
            assert tiny.generate(either.ours, chat, **make(either.ours)).tolist() == expected.tolist()
        finally:
            del inner.get
        assert either.kinds == ["miss"]
        assert tiny.generate(either.ours, chat, **make(either.ours)).tolist() == expected.tolist()
