"""Features, embeddings and videos that users pass to `forward()` and `generate()`, against the stock model."""

from __future__ import annotations

import copy

import pytest
import torch

from tests import tiny
from tests.models.conftest import bare, close, positions


def test_precomputed_features(pair, chat):
    with torch.no_grad():
        features = pair.stock.model.get_image_features(chat["pixel_values"], chat["image_grid_thw"], return_dict=True)
    inputs = bare(chat, "pixel_values")
    for _ in range(2):
        with torch.no_grad():
            expected = pair.stock(**inputs, mm_encoder_outputs={"image": copy.copy(features)}, logits_to_keep=1)
            got = pair.ours(**inputs, mm_encoder_outputs={"image": copy.copy(features)}, logits_to_keep=1)
        close(got.logits, expected.logits)
        expected, result = (
            tiny.generate(model, dict(inputs, mm_encoder_outputs={"image": features}))
            for model in (pair.stock, pair.ours)
        )
        assert result.tolist() == expected.tolist()
    assert pair.files == [] and pair.ours.vlcache.stats().requests == 0


def test_features_of_our_model(pair, chat):
    """`get_image_features` is as stock, and what it gives can be passed on."""
    with torch.no_grad():
        for owner in (lambda model: model, lambda model: model.model):
            expected, got = (
                owner(model).get_image_features(chat["pixel_values"], chat["image_grid_thw"], return_dict=True)
                for model in (pair.stock, pair.ours)
            )
            assert type(got) is type(expected)
            close(got.pooler_output[0], expected.pooler_output[0])
    result = tiny.generate(pair.ours, dict(bare(chat, "pixel_values"), mm_encoder_outputs={"image": got}))
    assert result.tolist() == tiny.generate(pair.stock, chat).tolist()


def test_pixels_and_features_fail_as_stock(pair, chat):
    with torch.no_grad():
        features = pair.stock.model.get_image_features(chat["pixel_values"], chat["image_grid_thw"], return_dict=True)
    both = dict(chat, mm_encoder_outputs={"image": features})
    for call in (lambda model: tiny.generate(model, both), lambda model: model(**both)):
        with pytest.raises(ValueError) as expected:
            call(pair.stock)
        with pytest.raises(ValueError) as got:
            call(pair.ours)
        assert str(got.value) == str(expected.value)


def test_embeddings_given(pair, chat):
    """What `inputs_embeds` show is unknown: nothing is stored, features are reused where there are pixels."""
    ids = chat["input_ids"]
    tiny.generate(pair.ours, chat)
    before = pair.files
    with torch.no_grad():
        embeds = pair.stock.get_input_embeddings()(ids)
    inputs = dict(bare(chat, "input_ids"), inputs_embeds=embeds, position_ids=positions(pair, chat))
    for _ in range(2):
        got, expected = pair.forward(inputs, logits_to_keep=1)
        close(got.logits, expected.logits)
    assert "inputs_embeds" in pair.ours.vlcache.last_request.in_full
    expected, result = (
        tiny.generate(model, bare(dict(inputs, input_ids=ids), "position_ids")) for model in (pair.stock, pair.ours)
    )
    assert result.tolist() == expected.tolist()
    expected, result = (tiny.generate(model, bare(inputs, "position_ids")) for model in (pair.stock, pair.ours))
    assert result.tolist() == expected.tolist()
    assert pair.files == before


# --- videos


def with_video(image=None, seed=9, frames=2):
    """Inputs with a video of 4 tokens a frame, and an image if given."""
    pixels = torch.randn(frames * 16, 96, generator=torch.Generator().manual_seed(seed))
    grid = torch.tensor([[frames, 4, 4]])
    parts = [tiny.text(0, 4), *([image] if image else []), tiny.text(1, 2)]
    ids, images = tiny.prompt(*parts)
    for frame in range(frames):
        ids += [*tiny.text(20 + frame, 2), tiny.VISION_START, *[tiny.VIDEO] * 4, tiny.VISION_END]
    ids += tiny.text(3, 5)
    inputs = tiny.batch((ids, images))
    inputs["mm_token_type_ids"] += 2 * (inputs["input_ids"] == tiny.VIDEO).int()
    return inputs | {"pixel_values_videos": pixels, "video_grid_thw": grid}


def for_qwen25(inputs):
    """Qwen2.5-VL: one run of all video tokens, and seconds per grid."""
    ids = inputs["input_ids"][0].tolist()
    if tiny.VIDEO in ids:
        first = ids.index(tiny.VIDEO)
        head = ids[:first]
        tail = ids[len(ids) - ids[::-1].index(tiny.VIDEO) :]
        ids = head + [tiny.VIDEO] * ids.count(tiny.VIDEO) + tail
    ids = torch.tensor([ids])
    types = (ids == tiny.IMAGE).int() + 2 * (ids == tiny.VIDEO).int()
    return dict(inputs, input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types)


@pytest.mark.parametrize("with_image", [False, True], ids=["video", "image+video"])
def test_video(pair, with_image):
    """Computed in full; the image's features are reused, its KV is neither read nor stored."""
    inputs = with_video(tiny.image(0) if with_image else None)
    if pair.stock.config.model_type == "qwen2_5_vl":
        inputs = for_qwen25(inputs)
    for _ in range(2):
        expected, got = tiny.generate(pair.stock, inputs), tiny.generate(pair.ours, inputs)
        assert got.tolist() == expected.tolist()
    assert not [name for name in pair.files if name.startswith("kv")]
    if with_image:
        record = pair.ours.vlcache.last_request
        assert "video" in record.in_full and [image.encoder for image in record.images] == ["hit"]
    else:
        assert pair.ours.vlcache.stats().requests == 0


@pytest.mark.parametrize("with_image", [False, True], ids=["video", "image+video"])
def test_video_in_forward(pair, with_image):
    inputs = with_video(tiny.image(0) if with_image else None)
    if pair.stock.config.model_type == "qwen2_5_vl":
        inputs = for_qwen25(inputs)
    for _ in range(2):
        got, expected = pair.forward(inputs, logits_to_keep=1)
        close(got.logits, expected.logits)
    assert not [name for name in pair.files if name.startswith("kv")]


def test_video_beams(either):
    inputs = with_video(tiny.image(0))
    if either.stock.config.model_type == "qwen2_5_vl":
        inputs = for_qwen25(inputs)
    expected = tiny.generate(either.stock, inputs, num_beams=2)
    for _ in range(2):
        assert tiny.generate(either.ours, inputs, num_beams=2).tolist() == expected.tolist()


def test_other_video_before_the_image(qwen3):
    """Equal ids and image, another video: the image's KV differs and must not be reused as exact."""
    image = tiny.image(0)
    for seed in (1, 2, 1):
        inputs = with_video(None, seed=seed)
        more, images = tiny.prompt(image, tiny.text(4, 3))
        ids = torch.cat([inputs["input_ids"], torch.tensor([more])], dim=-1)
        types = (ids == tiny.IMAGE).int() + 2 * (ids == tiny.VIDEO).int()
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
        inputs |= {"pixel_values": images[0][0], "image_grid_thw": torch.tensor([images[0][1]])}
        assert tiny.generate(qwen3.ours, inputs).tolist() == tiny.generate(qwen3.stock, inputs).tolist()
        assert qwen3.kinds == ["miss"]


def test_images_and_video_tokens_that_do_not_match_fail_as_stock(qwen3, chat):
    ids = chat["input_ids"].clone()
    ids[0, -2] = tiny.VIDEO  # a video token and no video: stock takes its plain embedding
    inputs = dict(chat, input_ids=ids)
    for _ in range(2):
        try:
            expected = tiny.generate(qwen3.stock, inputs).tolist()
        except Exception as error:
            with pytest.raises(type(error)):
                tiny.generate(qwen3.ours, inputs)
        else:
            assert tiny.generate(qwen3.ours, inputs).tolist() == expected
