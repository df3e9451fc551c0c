"""Direct `forward()` with unusual positions and masks, or wrong inputs, against the stock model."""

from __future__ import annotations

import pytest
import torch

from tests import tiny
from tests.models.conftest import bare, close, positions


@pytest.mark.parametrize("axes", [3, 4])
def test_positions_given(pair, chat, axes):
    given = positions(pair, chat)
    if axes == 4:
        given = torch.cat([torch.arange(given.shape[-1]).view(1, 1, -1), given])
    pair.check_forward(dict(chat, position_ids=given))
    (got, expected), towers = pair.towers(lambda: pair.forward(chat, logits_to_keep=1))
    close(got.logits, expected.logits)
    assert pair.kinds == ["exact"] and towers == 0  # the same positions, made by the model


def test_shifted_positions_are_another_context(either, chat):
    either.check_forward(chat)
    shifted = dict(chat, position_ids=positions(either, chat) + 3)
    got, expected = either.forward(shifted, logits_to_keep=1)
    assert either.kinds == ["reused"]
    either.ours.vlcache.config.reuse = "exact"
    got, expected = either.forward(shifted, logits_to_keep=1)
    close(got.logits, expected.logits)
    assert either.kinds == ["miss"]


def test_sequential_positions(pair, chat):
    """2-D positions, one value for all three axes: a layout of its own."""
    sequential = dict(chat, position_ids=torch.arange(chat["input_ids"].shape[1])[None])
    pair.check_forward(chat)
    pair.check_forward(sequential, features=True)
    got, expected = pair.forward(chat, logits_to_keep=1)
    close(got.logits, expected.logits)
    assert pair.kinds == ["exact"]


@pytest.mark.parametrize("axes", [2, 4])
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_sequences(pair, chat, axes, use_cache):
    """Text positions that start over and no mask: stock may then hide one sequence from the other."""
    length = chat["input_ids"].shape[1]
    text = torch.cat([torch.arange(length - 4), torch.arange(4)])[None]
    given = text if axes == 2 else torch.cat([text[None], positions(pair, chat)])
    inputs = bare(dict(chat, position_ids=given), "attention_mask")
    for _ in range(2):
        got, expected = pair.forward(inputs, logits_to_keep=1, use_cache=use_cache)
        close(got.logits, expected.logits)


def test_one_row_of_positions_for_a_batch(either, chat):
    two = {name: torch.cat([value, value]) for name, value in chat.items()}
    either.check_forward(dict(two, position_ids=positions(either, chat)))


def test_missing_token_types(pair, chat):
    """A direct call without them raises with Qwen3-VL and runs on sequential positions with Qwen2.5-VL."""
    inputs = bare(chat, "mm_token_type_ids")
    tiny.generate(pair.ours, chat)
    pair.ours.model.rope_deltas = None
    for _ in range(2):
        try:
            with torch.no_grad():
                expected = pair.stock(**inputs, logits_to_keep=1)
        except ValueError as error:
            with pytest.raises(ValueError) as got, torch.no_grad():
                pair.ours(**inputs, logits_to_keep=1)
            assert str(got.value) == str(error)
        else:
            with torch.no_grad():
                close(pair.ours(**inputs, logits_to_keep=1).logits, expected.logits)
    assert pair.ours.vlcache.stats().reused == 0
    pair.check(chat, cold=["exact"])


def test_without_mask(either, chat):
    either.check_forward(bare(chat, "attention_mask"))
    (got, expected), _ = either.towers(lambda: either.forward(chat, logits_to_keep=1))
    close(got.logits, expected.logits)
    assert either.kinds == ["exact"]


@pytest.mark.parametrize("kind", [torch.bool, torch.int32, torch.float32], ids=str)
def test_mask_dtypes(either, chat, kind):
    either.check_forward(dict(chat, attention_mask=chat["attention_mask"].to(kind)))


@pytest.mark.parametrize("hole", [2, -3], ids=["before", "behind"])
def test_mask_with_a_hole(pair, chat, hole):
    """A hidden token is no part of the context: another context before the image, the same behind it."""
    pair.check_forward(chat)
    mask = chat["attention_mask"].clone()
    mask[0, hole] = 0
    holed = dict(chat, attention_mask=mask)
    pair.ours.vlcache.config.reuse = "exact"
    for kinds in (["miss"], ["exact"]) if hole == 2 else (["exact"], ["exact"]):
        got, expected = pair.forward(holed, logits_to_keep=1)
        close(got.logits, expected.logits)
        assert pair.kinds == kinds
        for mine, theirs in zip(got.cache.layers, expected.cache.layers):
            visible = mask[0].bool()
            close(mine.keys[:, :, visible], theirs.keys[:, :, visible])
            close(mine.values[:, :, visible], theirs.values[:, :, visible])
    expected, got = (tiny.generate(model, holed) for model in (pair.stock, pair.ours))
    assert got.tolist() == expected.tolist()


def test_masked_image_token(either, chat):
    mask = chat["attention_mask"].clone()
    mask[0, 8] = 0
    assert int(chat["input_ids"][0, 8]) == tiny.IMAGE
    holed = dict(chat, attention_mask=mask)
    either.check_forward(chat)
    for _ in range(2):
        try:
            got, expected = either.forward(holed, logits_to_keep=1)
        except Exception as error:
            with pytest.raises(type(error)):
                either.stock(**holed)
        else:
            close(got.logits, expected.logits)
            assert either.ours.vlcache.last_request.in_full is not None
    assert len([name for name in either.files if name.startswith("kv")]) == 1


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
def test_4d_mask(pair, chat, additive):
    length = chat["input_ids"].shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    mask[..., 8:, 1] = False
    given = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min) if additive else mask
    inputs = dict(bare(chat, "attention_mask"), position_ids=positions(pair, chat))
    pair.check_forward(chat)
    plain, _ = pair.forward(inputs, logits_to_keep=1)
    for _ in range(2):
        got, expected = pair.forward(inputs, attention_mask=given, logits_to_keep=1)
        close(got.logits, expected.logits)
        assert "4-D" in pair.ours.vlcache.last_request.in_full
    assert (got.logits - plain.logits).abs().max() > 1e-3
    assert len([name for name in pair.files if name.startswith("kv")]) == 1


@pytest.mark.parametrize("what", ["fewer", "more"])
def test_features_that_do_not_match_fail_as_stock(pair, chat, what):
    inputs = dict(chat, pixel_values=tiny.image(0, 4, 8)[0], image_grid_thw=torch.tensor([[1, 4, 8]]))
    if what == "more":
        inputs = dict(
            chat, pixel_values=chat["pixel_values"].repeat(2, 1), image_grid_thw=chat["image_grid_thw"].repeat(2, 1)
        )
    with pytest.raises(Exception) as expected, torch.no_grad():
        pair.stock(**inputs)
    with pytest.raises(type(expected.value)) as got, torch.no_grad():
        pair.ours(**inputs)
    assert str(got.value) == str(expected.value)
    pair.check(chat)
