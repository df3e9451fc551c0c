from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

import tiny
from vlcache_hf import VLCache, attach
from vlcache_hf.decide import _fits
from vlcache_hf.precision import KVShape
from vlcache_hf.store import DiskStore

A, B = tiny.image(1), tiny.image(2, 8, 12)


@pytest.fixture
def ours(tmp_path):
    return attach(tiny.stock("qwen2_5_vl"), {"cache_dir": tmp_path, "schedule": 0.25, "lossy_multi_image": True})


def ask(model, *parts, **settings):
    with torch.no_grad():
        model(**tiny.batch(tiny.prompt(*parts)), logits_to_keep=1, cache=VLCache(**settings))
    return tiny.kinds(model)


def entries(path):
    return sorted((path / "kv").rglob("*.safetensors"))


def test_entry_size_and_shape(tmp_path):
    shape = KVShape(layers=2, heads=3, head_dim=4, dtype=torch.bfloat16)
    assert shape.nbytes(10) == 2 * 2 * 3 * 4 * 10 * 2
    store = DiskStore(tmp_path, None)
    tensors = {f"{part}.{layer}": torch.zeros(10, 3, 4) for part in "kv" for layer in range(2)}
    store.put("kv", "a" * 64, "b" * 64, tensors, {})
    entry = store.get("kv", "a" * 64, "b" * 64)
    assert _fits(entry, shape, 10)
    assert not _fits(entry, shape, 11)
    assert not _fits(entry, KVShape(3, 3, 4, torch.float32), 10)
    assert not _fits(entry, KVShape(2, 4, 3, torch.float32), 10)
    assert not _fits(entry, KVShape(2, 3, 4, torch.float32, "int8"), 10)


def test_the_third_meeting_of_a_context_is_exact(ours, tmp_path):
    assert ask(ours, tiny.text(1, 4), A, tiny.text(2, 3)) == ["miss"]
    assert [ask(ours, tiny.text(3, 4), A, tiny.text(2, 3)) for _ in range(4)] == [
        ["reused"],
        ["miss"],
        ["exact"],
        ["exact"],
    ]
    assert len(entries(tmp_path)) == 2


def test_contexts_per_image_keeps_the_most_recently_used(ours, tmp_path):
    for seed in range(5):
        assert ask(ours, tiny.text(seed, 4), A, tiny.text(9, 3), reuse="exact", contexts_per_image=2) == ["miss"]
        assert len(entries(tmp_path)) == min(seed + 1, 2)
    assert ask(ours, tiny.text(4, 4), A, tiny.text(9, 3), reuse="exact") == ["exact"]
    assert ask(ours, tiny.text(0, 4), A, tiny.text(9, 3), reuse="exact") == ["miss"]


def test_reuse_exact_never_reuses(ours):
    assert ask(ours, tiny.text(1, 4), A, reuse="exact") == ["miss"]
    assert ask(ours, tiny.text(2, 4), A, tiny.text(9, 3), reuse="exact") == ["miss"]
    assert ask(ours, tiny.text(2, 4), A, tiny.text(9, 3), reuse="exact") == ["exact"]


def test_a_ratio_of_one_is_a_full_computation_and_is_stored(ours):
    ask(ours, tiny.text(1, 4), A, tiny.text(9, 3))
    assert ask(ours, tiny.text(2, 4), A, tiny.text(9, 3), schedule=1.0) == ["miss"]
    assert ask(ours, tiny.text(2, 4), A, tiny.text(9, 3)) == ["exact"]


def test_rows_behind_a_lossy_reuse_are_not_stored(ours, tmp_path):
    ask(ours, tiny.text(1, 4), A, tiny.text(9, 3))
    parts = (tiny.text(2, 4), A, tiny.text(3, 3), B, tiny.text(9, 3))
    assert ask(ours, *parts) == ["reused", "miss"]
    assert [image.stored for image in ours.vlcache.last_request.images] == [False, False]
    assert len(entries(tmp_path)) == 1
    # the second meeting computes both in full and clean, the third is exact
    assert ask(ours, *parts) == ["miss", "miss"]
    assert [image.stored for image in ours.vlcache.last_request.images] == [True, True]
    assert ask(ours, *parts) == ["exact", "exact"]


def test_by_default_several_images_are_not_reused_from_other_contexts(ours, tmp_path):
    """Their KV says which of them they are: a model would answer about the wrong one."""
    ask(ours, tiny.text(1, 4), A, tiny.text(9, 3))
    ask(ours, tiny.text(1, 4), B, tiny.text(9, 3))
    parts = (tiny.text(2, 4), B, tiny.text(3, 3), A, tiny.text(9, 3))
    inputs = tiny.batch(tiny.prompt(*parts), tiny.prompt(tiny.text(5, 4), A, tiny.text(9, 3)))
    with torch.no_grad():
        expected = tiny.stock("qwen2_5_vl")(**tiny.clone(inputs), logits_to_keep=1).logits[0]
        got = ours(**inputs, logits_to_keep=1, cache=VLCache(lossy_multi_image=False)).logits[0]
    images = ours.vlcache.last_request.images
    assert [image.kv for image in images] == ["miss", "miss", "reused"], "the other row has one image"
    assert [image.encoder for image in images] == ["hit", "hit", "hit"]
    assert [image.stored for image in images] == [True, True, False]
    assert torch.allclose(got, expected, atol=1e-5)
    assert ask(ours, *parts, lossy_multi_image=False) == ["exact", "exact"]
    with pytest.raises(ValueError, match="lossy_multi_image"):
        VLCache(lossy_multi_image=1)


@pytest.mark.parametrize("storage", ["auto", "int8"])
@pytest.mark.parametrize("guard", ["off", "escalate"])
def test_a_new_order_of_images_becomes_exact(storage, guard, tmp_path):
    """As it is by default, in each architecture: nothing that is not stock's, unless the store itself is lossy."""
    for architecture in tiny.ARCHITECTURES:
        settings = {"cache_dir": tmp_path / architecture, "storage_dtype": storage, "guard": guard}
        ours = attach(tiny.stock(architecture), settings)
        for picture in (A, B, A):
            ask(ours, tiny.text(1, 4), picture, tiny.text(9, 3))
        inputs = tiny.batch(tiny.prompt(tiny.text(1, 4), B, tiny.text(3, 3), A, A, tiny.text(9, 3)))
        expected = tiny.generate(tiny.stock(architecture), inputs, num_beams=2)
        kinds = []
        for _ in range(4):
            got = tiny.generate(ours, inputs, num_beams=2)
            kinds.append(tiny.kinds(ours)[:3])
            if storage == "auto":
                assert torch.equal(got, expected)
        assert "reused" not in sum(kinds, []) and kinds[-1] == ["exact", "exact", "exact"], kinds


def test_taint_stays_in_its_row(ours, tmp_path):
    ask(ours, tiny.text(1, 4), A, tiny.text(9, 3))
    lossy = tiny.prompt(tiny.text(2, 4), A, tiny.text(9, 3))
    clean = tiny.prompt(tiny.text(2, 4), B, tiny.text(9, 3))
    with torch.no_grad():
        ours(**tiny.batch(lossy, clean), logits_to_keep=1)
    assert tiny.kinds(ours) == ["reused", "miss"]
    assert [image.stored for image in ours.vlcache.last_request.images] == [False, True]


def test_an_exact_entry_behind_a_lossy_reuse_is_served(ours, tmp_path):
    parts = (tiny.text(2, 4), A, tiny.text(3, 3), B, tiny.text(9, 3))
    ask(ours, *parts)
    (file,) = [file for file in entries(tmp_path) if _tokens(file) == 16]
    file.unlink()
    ask(ours, tiny.text(1, 4), A, tiny.text(9, 3))
    assert ask(ours, *parts) == ["reused", "exact"]


def _tokens(file):
    with safe_open(file, "pt") as handle:
        return handle.get_slice("k.0").get_shape()[0]


def test_outputs_of_image_tokens_are_computed(ours):
    ask(ours, tiny.text(1, 4), A)
    ids, images = tiny.prompt(tiny.text(1, 4), A)
    inputs = tiny.batch((ids[:-1], images))  # the prompt ends inside the vision span: its last token is an image token
    with torch.no_grad():
        expected = tiny.stock("qwen2_5_vl")(**inputs, logits_to_keep=1).logits
        for _ in range(2):
            got = ours(**inputs, logits_to_keep=1).logits
            assert torch.allclose(got, expected, atol=1e-5)
            assert tiny.kinds(ours) == ["miss"]


def test_an_entry_larger_than_the_cap_is_never_copied(tmp_path):
    ours = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "max_disk_bytes": 1000, "schedule": 0.1})
    assert ask(ours, tiny.text(1, 4), A, tiny.text(9, 3)) == ["miss"]
    assert not ours.vlcache.last_request.images[0].stored
    assert ours.vlcache.last_request.bytes_written == 0
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_same_image_twice_in_a_prompt_has_two_contexts(ours, tmp_path):
    parts = (tiny.text(1, 2), A, tiny.text(2, 2), A, tiny.text(9, 3))
    assert ask(ours, *parts) == ["miss", "miss"]
    assert ours.vlcache.stats().vision_calls == 1
    assert len(entries(tmp_path)) == 2
    assert ask(ours, *parts) == ["exact", "exact"]


def test_equal_rows_of_a_batch_are_stored_once(ours, tmp_path):
    row = tiny.prompt(tiny.text(1, 4), A, tiny.text(9, 3))
    with torch.no_grad():
        ours(**tiny.batch(row, row), logits_to_keep=1)
    assert tiny.kinds(ours) == ["miss", "miss"]
    assert [image.stored for image in ours.vlcache.last_request.images] == [True, False]
    assert len(entries(tmp_path)) == 1
