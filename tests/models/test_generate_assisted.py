"""Assisted and prompt-lookup decoding against the stock model."""

from __future__ import annotations

import copy

import pytest

import vlcache_hf
from tests import tiny


def draft(architecture, seed=1, layers=2):
    model = tiny.stock(architecture, seed=seed, num_hidden_layers=layers)
    model.generation_config.num_assistant_tokens = 3
    return model


@pytest.fixture
def shared(make_pair, tmp_path):
    """Targets of both families with one cache directory for all models of the test."""
    return lambda architecture: make_pair(architecture, {"cache_dir": tmp_path / "shared"})


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("assistant", ["stock", "vlcache", "same weights"])
def test_assistant(shared, chat, tmp_path, architecture, assistant):
    pair = shared(architecture)
    model = copy.deepcopy(pair.stock) if assistant == "same weights" else draft(architecture)
    theirs = copy.deepcopy(model)
    if assistant != "stock":
        vlcache_hf.attach(model, {"cache_dir": tmp_path / "shared", "schedule": 0.5})
    greedy = tiny.generate(pair.stock, chat, 12)
    expected = tiny.generate(pair.stock, chat, 12, assistant_model=theirs)
    assert expected.tolist() == greedy.tolist()
    for towers in (1, 0):
        got, ran = pair.towers(lambda: tiny.generate(pair.ours, chat, 12, assistant_model=model))
        assert got.tolist() == greedy.tolist()
        assert ran == towers
        assert pair.kinds == ["exact" if towers == 0 else "miss"]
    # the assistant gets the target's features from `generate()`: they are not its own, and nothing is stored of them
    assert pair.ours.vlcache.stats().entries_stored == 1
    if assistant != "stock":
        assert model.vlcache.stats().entries_stored == 0 and model.vlcache.stats().exact == 0
    pair.check(chat, 12, cold=["exact"])


def test_assistant_shares_no_entries_by_itself(shared, chat, tmp_path):
    """On one directory, other weights or layers are other keys."""
    pair = shared("qwen3_vl")
    pair.check(chat)
    for model in (draft("qwen3_vl", 1, 4), draft("qwen3_vl", 0, 2), draft("qwen3_vl", 1, 2)):
        expected = tiny.generate(model, chat)
        vlcache_hf.attach(model, {"cache_dir": tmp_path / "shared", "schedule": 0.5})
        assert tiny.generate(model, chat).tolist() == expected.tolist()
        assert tiny.kinds(model) == ["miss"]
        assert tiny.generate(model, chat).tolist() == expected.tolist()
        assert tiny.kinds(model) == ["exact"]
    pair.check(chat, cold=["exact"])


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "qwen3_vl"])
def test_prompt_lookup(make_pair, architecture):
    """Stock raises on some prompts with images and equals greedy decoding on others; ours does the same."""
    image, word = tiny.image(0), tiny.text(0, 4)
    for parts in ([tiny.text(1, 3), image, word, word], [image, word, word], [word, image, word]):
        pair = make_pair(architecture)
        inputs = tiny.batch(tiny.prompt(*parts))
        kwargs = {"prompt_lookup_num_tokens": 3}
        try:
            expected = tiny.generate(pair.stock, inputs, 10, **kwargs)
        except Exception as error:
            for _ in range(2):
                with pytest.raises(type(error)) as got:
                    tiny.generate(pair.ours, inputs, 10, **kwargs)
                assert str(got.value) == str(error)
        else:
            pair.check(inputs, 10, **kwargs)
            assert expected.tolist() == tiny.generate(pair.stock, inputs, 10).tolist()
        pair.ours.vlcache.clear()
        pair.check(inputs, 10)


def test_assistant_and_sampling(shared, chat, tmp_path):
    pair = shared("qwen3_vl")
    model = draft("qwen3_vl")
    theirs = copy.deepcopy(model)
    vlcache_hf.attach(model, {"cache_dir": tmp_path / "shared"})
    pair.check(
        chat,
        seed=4,
        do_sample=True,
        make=lambda target: {"assistant_model": theirs if target is pair.stock else model},
    )
