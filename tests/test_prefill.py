from __future__ import annotations

import pytest
import torch

import tiny
from vlcache_hf import VLCache, attach
from vlcache_hf.store import Entry, StoreReadError

A, B = tiny.image(1), tiny.image(2, 8, 12)
INPUTS = tiny.batch(tiny.prompt(tiny.text(1, 4), A, tiny.text(2, 5), B, tiny.text(3, 4)))


@pytest.fixture(scope="module")
def stock():
    return tiny.stock("qwen3_vl")


@pytest.fixture
def ours(tmp_path):
    return attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "schedule": 0.25})


def logits(model, inputs, **kwargs):
    with torch.no_grad():
        return model(**tiny.clone(inputs), logits_to_keep=1, **kwargs).logits


@pytest.mark.parametrize("breaks_at", ["k.0", "v.2", "k.3"])
def test_a_read_error_in_the_middle_is_a_miss(stock, ours, monkeypatch, breaks_at):
    logits(ours, INPUTS)
    rows = Entry.rows
    broken = []

    def failing(entry, name, start, stop):
        if name == breaks_at and not broken:
            broken.append(name)
            raise StoreReadError("the disk is gone")
        return rows(entry, name, start, stop)

    monkeypatch.setattr(Entry, "rows", failing)
    cache = VLCache()
    assert torch.allclose(logits(ours, INPUTS, cache=cache), logits(stock, INPUTS), atol=1e-5)
    assert broken and tiny.kinds(ours) == ["miss", "exact"]
    assert cache.get_seq_length() == INPUTS["input_ids"].shape[1]
    assert torch.allclose(logits(ours, INPUTS), logits(stock, INPUTS), atol=1e-5)
    assert tiny.kinds(ours) == ["exact", "exact"]


def test_unreadable_features_are_computed(stock, ours, monkeypatch):
    logits(ours, INPUTS)
    rows = Entry.rows

    def failing(entry, name, start, stop):
        if name.startswith(("pooled", "deepstack")):
            raise StoreReadError("the disk is gone")
        return rows(entry, name, start, stop)

    monkeypatch.setattr(Entry, "rows", failing)
    other = tiny.batch(tiny.prompt(tiny.text(9, 4), A, tiny.text(2, 5)))
    calls = ours.vlcache.stats().vision_calls
    logits(ours, other)
    assert tiny.kinds(ours) == ["reused"]
    assert ours.vlcache.last_request.images[0].encoder == "miss"
    assert ours.vlcache.stats().vision_calls == calls + 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_prefill_stores_nothing(stock, ours, tmp_path, error):
    layer = ours.model.language_model.layers[2]
    forward = layer.forward

    def failing(*args, **kwargs):
        raise error("stop")

    layer.forward = failing
    with pytest.raises(error):
        logits(ours, INPUTS)
    layer.forward = forward
    assert not list(tmp_path.rglob("*.safetensors"))
    assert torch.allclose(logits(ours, INPUTS), logits(stock, INPUTS), atol=1e-5)
    assert tiny.kinds(ours) == ["miss", "miss"]


def test_only_the_layers_and_rows_in_use_are_read(ours):
    tiny.generate(ours, INPUTS)
    tiny.generate(ours, INPUTS)
    token = 2 * 4 * 2 * 16 * 4  # K and V, layers, heads, head_dim, fp32
    assert [image.bytes_read for image in ours.vlcache.last_request.images] == [16 * token, 24 * token]
    other = tiny.batch(tiny.prompt(tiny.text(9, 4), A, tiny.text(2, 5)))
    tiny.generate(ours, other, cache=VLCache(schedule=0.5))
    record = ours.vlcache.last_request
    assert tiny.kinds(ours) == ["reused"]
    assert record.images[0].bytes_read == 8 * token
    assert record.bytes_read == 8 * token + 8 * 64 * 3 * 4  # and the features of the recomputed rows


def test_an_exact_hit_needs_no_features(ours, tmp_path):
    logits(ours, INPUTS)
    for file in (tmp_path / "vit").rglob("*.safetensors"):
        file.unlink()
    calls = ours.vlcache.stats().vision_calls
    tiny.generate(ours, INPUTS)
    assert tiny.kinds(ours) == ["exact", "exact"]
    assert ours.vlcache.stats().vision_calls == calls
    assert {image.encoder for image in ours.vlcache.last_request.images} == {"skipped"}
