from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import tiny
from vlcache_hf import VLCache, VLCacheConfig, attach
from vlcache_hf.cache import is_tainted


@pytest.fixture
def ours(tmp_path):
    return attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path / "cache", "schedule": 0.25})


INPUTS = tiny.batch(tiny.prompt(tiny.text(1, 4), tiny.image(1), tiny.text(2, 5)))
OTHER = tiny.batch(tiny.prompt(tiny.text(3, 7), tiny.image(1), tiny.text(2, 5)))


def forward(model, inputs, **kwargs):
    with torch.no_grad():
        return model(**tiny.clone(inputs), logits_to_keep=1, **kwargs)


def test_settings_apply_over_those_of_the_model():
    config = VLCacheConfig(cache_dir="/a", schedule=0.1)
    merged = VLCache(schedule=0.3, reuse="exact").applied_to(config)
    assert (merged.schedule, merged.reuse, merged.cache_dir) == (0.3, "exact", "/a")
    assert config.schedule == 0.1


def test_unknown_settings_are_refused():
    with pytest.raises(TypeError, match="Unknown VLCache setting.*colour"):
        VLCache(colour="red")


def test_a_cache_chooses_another_store(ours, tmp_path):
    forward(ours, INPUTS)
    forward(ours, INPUTS, cache=VLCache(cache_dir=tmp_path / "other"))
    assert tiny.kinds(ours) == ["miss"]
    assert (tmp_path / "other").is_dir()
    forward(ours, INPUTS, cache=VLCache(cache_dir=tmp_path / "other"))
    assert tiny.kinds(ours) == ["exact"]


def test_read_only_serves_and_writes_nothing(ours):
    forward(ours, INPUTS)
    before = ours.vlcache.store.nbytes()
    forward(ours, INPUTS, cache=VLCache(read_only=True))
    assert tiny.kinds(ours) == ["exact"]
    for _ in range(3):
        forward(ours, OTHER, cache=VLCache(read_only=True))
        assert tiny.kinds(ours) == ["reused"]
    assert ours.vlcache.store.nbytes() == before


def test_the_returned_cache_is_marked_when_it_is_lossy(ours):
    assert not is_tainted(None)
    assert not is_tainted(forward(ours, INPUTS).cache)
    lossy = forward(ours, OTHER).cache
    assert tiny.kinds(ours) == ["reused"]
    assert is_tainted(lossy) and is_tainted(copy.deepcopy(lossy))
    assert not is_tainted(forward(ours, INPUTS).cache)


@pytest.mark.parametrize(
    "make", [lambda c: DynamicCache(), lambda c: DynamicCache(config=c), lambda c: VLCache(config=c)]
)
def test_dynamic_caches_are_filled_without_a_copy(ours, make):
    forward(ours, INPUTS)
    cache = make(ours.config)
    assert forward(ours, INPUTS, cache=cache).cache is cache
    assert tiny.kinds(ours) == ["exact"]
    expected = forward(tiny.stock("qwen3_vl"), INPUTS).cache
    assert len(cache.layers) == len(expected.layers)
    for mine, theirs in zip(cache.layers, expected.layers):
        assert torch.allclose(mine.keys, theirs.keys, atol=1e-5)
        assert torch.allclose(mine.values, theirs.values, atol=1e-5)


def test_static_cache_is_filled_in_place(ours):
    forward(ours, INPUTS)
    caches = []
    for model in (tiny.stock("qwen3_vl"), ours):
        cache = StaticCache(config=model.config.get_text_config(), max_cache_len=64)
        forward(model, INPUTS, cache=cache)
        caches.append(cache)
    assert tiny.kinds(ours) == ["exact"]
    assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length()) == INPUTS["input_ids"].shape[1]
    for theirs, mine in zip(*(cache.layers for cache in caches)):
        assert torch.allclose(mine.keys, theirs.keys, atol=1e-5)
        assert torch.allclose(mine.values, theirs.values, atol=1e-5)


def test_padding_columns_are_zero_and_the_others_equal_stock(ours):
    inputs = tiny.batch(tiny.prompt(tiny.text(1, 4), tiny.image(1), tiny.text(2, 5)), tiny.prompt(tiny.text(5, 6)))
    inputs["attention_mask"][0, 2] = 0  # a hole, besides the padding of the second row
    got, expected = (forward(model, inputs).cache for model in (ours, tiny.stock("qwen3_vl")))
    visible = inputs["attention_mask"].bool()
    for mine, theirs in zip(got.layers, expected.layers):
        assert torch.allclose(mine.keys.transpose(1, 2)[visible], theirs.keys.transpose(1, 2)[visible], atol=1e-5)
        assert not mine.keys.transpose(1, 2)[~visible].any()
