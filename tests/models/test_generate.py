"""`generate()` against the stock model, cold and warm: decoding methods, outputs, dtypes, state between calls."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from tests import tiny


class Collector(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


def test_greedy(pair, chat):
    pair.check(chat, 12)
    stats = pair.ours.vlcache.stats()
    assert (stats.exact, stats.missed, stats.vision_calls, stats.requests) == (1, 1, 1, 2)


def test_answers_depend_on_the_image(pair, chat):
    other = dict(chat, pixel_values=tiny.image(1)[0])
    first = pair.check(chat)
    second = pair.check(other)
    assert first.tolist() != second.tolist()
    assert pair.ours.vlcache.stats().reused == 0


def test_seeded_sampling(pair, chat):
    greedy = tiny.generate(pair.stock, chat)
    sampled = pair.check(chat, seed=3, do_sample=True, temperature=2.0, top_k=0)
    assert sampled.tolist() != greedy.tolist()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 3},
        {"num_beams": 3, "do_sample": True},
        {"num_return_sequences": 3, "do_sample": True},
    ],
    ids=("beams", "beams-all", "beam-sample", "sequences"),
)
def test_expanded_rows(pair, chat, kwargs):
    result = pair.check(chat, seed=5, cold=["miss"] * 3, warm=["exact"] * 3, **kwargs)
    assert len(result) == kwargs.get("num_return_sequences", 1)
    assert pair.ours.vlcache.stats().vision_calls == 1
    assert pair.ours.vlcache.stats().entries_stored == 1  # one for three beams


def test_streamer(either, chat):
    streamers = []

    def make(model):
        streamers.append(Collector())
        return {"streamer": streamers[-1]}

    expected = either.check(chat, make=make)
    assert [s.tokens for s in streamers] == [expected[0].tolist()] * 3
    assert [s.ended for s in streamers] == [1, 1, 1]


def test_without_cache(pair, chat):
    """Every step runs the whole prompt again; the store does not grow and the tower runs once."""
    expected = tiny.generate(pair.stock, chat, 6, use_cache=False)
    got, towers = pair.towers(lambda: tiny.generate(pair.ours, chat, 6, use_cache=False))
    assert got.tolist() == expected.tolist()
    assert towers == 1
    assert pair.ours.vlcache.stats().entries_stored == 1
    before = pair.files
    assert len(before) == 2  # features and KV
    pair.check(chat, 6, cold=["exact"], use_cache=False)
    assert pair.files == before


def test_chunk_for_the_active_tokens(pair, chat):
    """A hit fits a chunk that the whole prompt does not fit."""
    assert chat["input_ids"].shape[1] > 15
    pair.check(chat, tokens=8)
    expected = tiny.generate(pair.stock, chat, prefill_chunk_size=15)
    got, towers = pair.towers(lambda: tiny.generate(pair.ours, chat, prefill_chunk_size=15))
    assert got.tolist() == expected.tolist()
    assert pair.kinds == ["exact"] and towers == 0
    assert pair.ours.vlcache.last_request.in_full is None


def test_chunk_for_the_whole_prompt(either, chat):
    either.check(chat, prefill_chunk_size=512)


@pytest.mark.parametrize("size", [1, 4, 7])
def test_small_chunks_reuse_features_only(either, chat, size):
    expected = tiny.generate(either.stock, chat, prefill_chunk_size=size)
    for towers in (1, 0):
        got, ran = either.towers(lambda: tiny.generate(either.ours, chat, prefill_chunk_size=size))
        assert got.tolist() == expected.tolist()
        assert ran == towers
        assert "chunk" in either.ours.vlcache.last_request.in_full
    assert [image.encoder for image in either.ours.vlcache.last_request.images] == ["hit"]
    assert len(either.files) == 1  # no KV


def test_small_chunks_of_a_batch(either):
    rows = [
        tiny.prompt(tiny.text(0, 4), tiny.image(0), tiny.text(1, 3)),
        tiny.prompt(tiny.image(1, 4, 8), tiny.text(2, 9), tiny.image(2, 4, 4), tiny.text(3, 2)),
    ]
    inputs = tiny.batch(*rows)
    expected = tiny.generate(either.stock, inputs, prefill_chunk_size=5)
    for towers in (1, 0):
        got, ran = either.towers(lambda: tiny.generate(either.ours, inputs, prefill_chunk_size=5))
        assert got.tolist() == expected.tolist() and ran == towers


@pytest.mark.parametrize(
    "kwargs",
    [
        {"output_scores": True},
        {"output_logits": True},
        {"output_scores": True, "output_logits": True, "num_beams": 2},
        {"output_logits": True, "use_cache": False},
    ],
    ids=("scores", "logits", "beams", "no-cache"),
)
def test_dict_outputs(pair, chat, kwargs):
    images = kwargs.get("num_beams", 1)
    # without a cache the second step of the cold call meets the entry of the first
    cold = ["exact"] if kwargs.get("use_cache") is False else ["miss"] * images
    result = pair.check(chat, cold=cold, warm=["exact"] * images, return_dict_in_generate=True, **kwargs)
    if kwargs.get("use_cache") is not False:
        assert result.cache.get_seq_length() == chat["input_ids"].shape[1] + 7


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_values_of_all_rows_are_computed_in_full(make_pair, chat, name):
    for architecture in tiny.ARCHITECTURES:
        pair = make_pair(architecture, {"base_attn_implementation": "eager"})
        eager = copy.deepcopy(pair.stock)
        eager.set_attn_implementation("eager")
        kwargs = {"return_dict_in_generate": True, "output_logits": True, name: True}
        expected = tiny.generate(eager, chat, 3, **kwargs)
        pair.check(chat, 3)
        got, towers = pair.towers(lambda: tiny.generate(pair.ours, chat, 3, **kwargs))
        assert towers == 0  # features are the same for every row
        assert name in pair.ours.vlcache.last_request.in_full
        pair.same(got, expected)
        field = name.removeprefix("output_")
        assert len(got[field]) == len(expected[field]) == 3
        for step, wanted_step in zip(got[field], expected[field]):
            for one, other in zip(step, wanted_step, strict=True):
                assert (one - other).abs().max() <= 1e-4  # hidden states of these models reach 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(make_pair, chat, dtype):
    for architecture in tiny.ARCHITECTURES:
        pair = make_pair(architecture, dtype=dtype)
        pair.check(chat, 8)


def test_dtypes_do_not_share(make_pair, chat, tmp_path):
    shared = {"cache_dir": tmp_path / "shared"}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pair = make_pair("qwen3_vl", shared, dtype=dtype)
        pair.check(chat, 6)  # cold although the directory is warm for other dtypes


def test_autocast(make_pair, chat):
    for architecture in tiny.ARCHITECTURES:
        pair = make_pair(architecture)
        pair.check(chat, 8)
        with torch.autocast("cpu", torch.bfloat16):
            pair.check(chat, 8)  # cold: the fp32 entry is not for it
        pair.check(chat, 8, cold=["exact"])


def test_one_image_token(pair):
    inputs = tiny.batch(tiny.prompt(tiny.text(0, 3), tiny.image(0, 2, 2), tiny.text(1, 4)))
    assert int(inputs["mm_token_type_ids"].sum()) == 1
    pair.check(inputs)
    other = tiny.batch(tiny.prompt(tiny.text(5, 7), tiny.image(0, 2, 2), tiny.text(1, 4)))
    got = tiny.generate(pair.ours, other)
    assert got.shape == (1, other["input_ids"].shape[1] + 8) and pair.kinds == ["reused"]


@pytest.mark.parametrize("sides", [(2, 20), (20, 2), (6, 14), (2, 4)], ids=str)
def test_odd_aspect(pair, sides):
    pair.check(tiny.batch(tiny.prompt(tiny.text(0, 3), tiny.image(0, *sides), tiny.text(1, 4))))


def test_swapped_sides_are_two_images(pair):
    pixels = tiny.image(0, 4, 8)[0]
    for sides in ([1, 4, 8], [1, 8, 4]):
        pair.check(tiny.batch(tiny.prompt(tiny.text(0, 3), (pixels, sides), tiny.text(1, 4))))


def test_prompt_that_ends_in_an_image(pair):
    """The logits asked for are those of an image token: it is computed, also warm."""
    ids, images = tiny.prompt(tiny.text(0, 3), tiny.image(0), tiny.text(1, 4), tiny.image(1))
    inputs = tiny.batch((ids[:-1], images))
    assert int(inputs["input_ids"][0, -1]) == tiny.IMAGE
    expected = tiny.generate(pair.stock, inputs)
    for towers, kinds in ((1, ["miss", "miss"]), (0, ["exact", "miss"])):
        got, ran = pair.towers(lambda: tiny.generate(pair.ours, inputs))
        assert got.tolist() == expected.tolist()
        assert (ran, pair.kinds) == (towers, kinds)
