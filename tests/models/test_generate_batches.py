"""`generate()` of ragged batches, repeated images and text-only prompts against the stock model."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny

ROWS = [
    tiny.prompt(tiny.text(0, 7)),
    tiny.prompt(tiny.text(1, 3), tiny.image(0), tiny.text(2, 5)),
    tiny.prompt(tiny.text(3, 4), tiny.image(1, 4, 8), tiny.text(4, 2), tiny.image(2, 4, 4), tiny.text(5, 6)),
]


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_batch(pair, side):
    inputs = tiny.batch(*ROWS, side=side)
    result = pair.check(inputs)
    if side == "left":
        width = inputs["input_ids"].shape[1]
        for row, line in zip(ROWS, result):
            single = tiny.generate(pair.stock, tiny.batch(row))
            assert line[width:].tolist() == single[0, len(row[0]) :].tolist()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("warm", list(itertools.product([False, True], repeat=2)), ids=str)
def test_any_subset_of_rows_warm(either, side, warm):
    for row, is_warm in zip(ROWS[1:], warm):
        if is_warm:
            either.check(tiny.batch(row))
    inputs = tiny.batch(*ROWS, side=side)
    kinds = ["exact" if is_warm else "miss" for is_warm in (warm[0], warm[1], warm[1])]
    expected = tiny.generate(either.stock, inputs)
    got, towers = either.towers(lambda: tiny.generate(either.ours, inputs))
    assert got.tolist() == expected.tolist()
    assert either.kinds == kinds
    assert towers == (0 if all(warm) else 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_batch_serves_single_rows(either, side):
    inputs = tiny.batch(*ROWS, side=side)
    tiny.generate(either.ours, inputs)
    for row in ROWS[1:]:
        either.check(tiny.batch(row), cold=["exact"] * len(row[1]))


def test_padding_leaves_no_trace_in_entries(make_pair):
    """An entry of a padded row is that of a single call, up to kernel noise."""
    stored = []
    for inputs in (tiny.batch(ROWS[1]), tiny.batch(*ROWS), tiny.batch(*ROWS, side="right")):
        pair = make_pair("qwen3_vl")
        tiny.generate(pair.ours, inputs, 1)
        key = pair.ours.vlcache.last_request.images[0].key
        tensors = [load_file(pair.cache_dir / name) for name in pair.files if name.startswith("kv")]
        tensors += [load_file(pair.cache_dir / name) for name in pair.files if key in name]
        stored.append([part for part in tensors if next(iter(part.values())).shape[0] == 16])
    assert all(len(parts) == 2 for parts in stored)
    for other in stored[1:]:
        for part, wanted in zip(other, stored[0]):
            assert part.keys() == wanted.keys()
            assert all((part[name] - wanted[name]).abs().max() <= 1e-4 for name in wanted)


@pytest.mark.parametrize("kwargs", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_ragged_beams(either, kwargs):
    inputs = tiny.batch(*ROWS)
    copies = kwargs.get("num_beams", 2)
    either.check(inputs, seed=2, cold=["miss"] * 3 * copies, warm=["exact"] * 3 * copies, **kwargs)
    assert either.ours.vlcache.stats().vision_calls == 1
    assert either.ours.vlcache.stats().entries_stored == 3


def test_rows_of_equal_content(either):
    """Two rows of one image and context: one entry, both served."""
    inputs = tiny.batch(ROWS[1], ROWS[1])
    either.check(inputs)
    assert either.ours.vlcache.stats().entries_stored == 1
    assert len(either.files) == 2


def test_image_twice_in_a_prompt(pair):
    """The second copy stands in another context: the first copy and what lies between."""
    inputs = tiny.batch(tiny.prompt(tiny.text(0, 3), tiny.image(0), tiny.text(1, 2), tiny.image(0), tiny.text(2, 4)))
    pair.check(inputs)
    assert pair.ours.vlcache.stats().vision_calls == 1
    images = pair.ours.vlcache.last_request.images
    assert images[0].key == images[1].key
    assert len(pair.files) == 3  # features once, KV of two contexts


def test_images_side_by_side(either):
    """Without text between them, as far as the vision tokens allow."""
    ids, images = tiny.prompt(tiny.image(0, 4, 4), tiny.image(1, 4, 4), tiny.text(0, 4))
    either.check(tiny.batch((ids, images)))
    at = ids.index(tiny.VISION_END)
    bare = ids[:at] + ids[at + 2 :]  # ... IMAGE IMAGE ... with nothing in between
    inputs = tiny.batch((bare, images))
    # token types of one run: stock lays it out as it can, or fails; ours must do the same
    try:
        expected = tiny.generate(either.stock, inputs).tolist()
    except Exception as error:
        with pytest.raises(type(error)):
            tiny.generate(either.ours, inputs)
    else:
        assert tiny.generate(either.ours, inputs).tolist() == expected


def test_image_first(pair):
    pair.check(tiny.batch(tiny.prompt(tiny.image(0), tiny.text(0, 4))))


def test_order_of_images_matters(make_pair):
    for architecture in ("qwen2_5_vl", "qwen3_vl"):
        pair = make_pair(architecture, {"reuse": "exact"})
        for order in ((0, 1), (1, 0)):
            first, second = (tiny.image(seed, 4, 4) for seed in order)
            pair.check(
                tiny.batch(tiny.prompt(tiny.text(0, 3), first, tiny.text(1, 3), second, tiny.text(2, 3))),
            )
        assert pair.ours.vlcache.stats().vision_calls == 1


def test_text_only(pair, chat):
    text = tiny.batch(tiny.prompt(tiny.text(0, 9)))
    for _ in range(2):
        assert tiny.generate(pair.ours, text).tolist() == tiny.generate(pair.stock, text).tolist()
        got, expected = pair.forward(text)
        assert (got.logits - expected.logits).abs().max() <= 1e-5
    assert pair.ours.vlcache.stats().requests == 0
    assert pair.ours.vlcache.last_request is None
    assert not pair.cache_dir.exists()
    pair.check(chat)
    before = pair.files
    assert tiny.generate(pair.ours, text).tolist() == tiny.generate(pair.stock, text).tolist()
    assert pair.files == before and pair.ours.vlcache.stats().requests == 2


def test_text_only_batch(qwen3):
    inputs = tiny.batch(tiny.prompt(tiny.text(0, 9)), tiny.prompt(tiny.text(1, 4)))
    assert (
        tiny.generate(qwen3.ours, inputs, num_beams=2).tolist()
        == tiny.generate(qwen3.stock, inputs, num_beams=2).tolist()
    )
    assert qwen3.ours.vlcache.stats().requests == 0


def test_text_only_with_unusable_directory(make_pair, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    text = tiny.batch(tiny.prompt(tiny.text(0, 9)))
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nothing"):
        pair = make_pair("qwen3_vl", {"cache_dir": folder})
        assert tiny.generate(pair.ours, text).tolist() == tiny.generate(pair.stock, text).tolist()
        assert pair.ours.vlcache.stats().faults == 0
    assert not caplog.records


def test_image_with_unusable_directory(make_pair, tmp_path, chat, caplog):
    (tmp_path / "file").write_text("")
    pair = make_pair("qwen3_vl", {"cache_dir": tmp_path / "file" / "below"})
    for _ in range(2):
        assert tiny.generate(pair.ours, chat).tolist() == tiny.generate(pair.stock, chat).tolist()
        assert pair.kinds == ["miss"]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(set(warnings)) <= 2


@pytest.mark.skipif(os.name != "posix", reason="needs modes")
def test_entries_are_private(qwen3, chat):
    mask = os.umask(0)
    try:
        tiny.generate(qwen3.ours, chat, 1)
    finally:
        os.umask(mask)
    assert qwen3.cache_dir.stat().st_mode & 0o077 == 0
    assert qwen3.files and all((qwen3.cache_dir / name).stat().st_mode & 0o077 == 0 for name in qwen3.files)


def test_many_images_of_one_template(qwen3):
    """Equal ids, different pixels: each its own answer, also warm and in another order."""
    prompts = [tiny.batch(tiny.prompt(tiny.text(0, 3), tiny.image(seed, 4, 4), tiny.text(1, 3))) for seed in range(8)]
    expected = [tiny.generate(qwen3.stock, inputs, 4).tolist() for inputs in prompts]
    assert len({tuple(line[0]) for line in expected}) > 4
    assert [tiny.generate(qwen3.ours, inputs, 4).tolist() for inputs in prompts] == expected
    for index in torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist():
        assert tiny.generate(qwen3.ours, prompts[index], 4).tolist() == expected[index]
        assert qwen3.kinds == ["exact"]
