"""The two trained models of examples/tiny_models: they load, they answer, and the cache does not change that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen3VLForConditionalGeneration

pytest.importorskip("sklearn")
pytest.importorskip("easy_vqa")

import vlcache_hf  # noqa: F401
from tiny_models import tasks
from tiny_models.batches import collate as collate_rows
from tiny_models.batches import encode, loss, patches
from tiny_models.grammar import conversation, question, vocabulary
from tiny_models.pictures import Picture, digit_grids, generator, shape_pictures

FOLDER = Path(tasks.__file__).parent
NAMES = ("ordinary", "routed")


def _load(name: str, **kwargs: Any) -> tuple[Any, Any]:
    model = AutoModelForImageTextToText.from_pretrained(FOLDER / name, dtype=torch.float32, **kwargs)
    return model.eval(), AutoProcessor.from_pretrained(FOLDER / name)


def _answer(model: Any, processor: Any, messages: list) -> str:
    inputs = tasks.inputs(processor, messages)
    output = model.generate(**inputs, max_new_tokens=8)
    return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def _samples() -> list[tasks.Sample]:
    """Forty held-out questions in all layouts."""
    return [
        sample
        for kind in ("digit", "color")
        for layout in tasks.LAYOUTS
        for sample in tasks.samples(seed=7, count=5, kind=kind, layout=layout, size=6)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_folder_loads_offline_and_is_small(name: str) -> None:
    model, processor = _load(name)
    assert type(model) is Qwen3VLForConditionalGeneration
    assert type(processor).__name__ == "Qwen3VLProcessor"
    assert model.config.vision_config.deepstack_visual_indexes
    assert processor.tokenizer.get_vocab() == vocabulary()
    assert sum(path.stat().st_size for path in (FOLDER / name).iterdir()) <= 6_000_000
    assert (FOLDER / name / "README.md").exists() and (FOLDER / name / "results.json").exists()


@pytest.mark.parametrize("name", NAMES)
def test_answers_with_stock_and_cold_and_warm_cache(name: str) -> None:
    stock, processor = _load(name)
    model, _ = _load(name, attn_implementation="vlcache")
    samples = _samples()
    right = {"stock": 0, "cold": 0, "warm": 0}
    for sample in samples:
        model.vlcache.clear()
        said = {"stock": _answer(stock, processor, sample.messages)}
        for state, expected in (("cold", "miss"), ("warm", "exact")):
            said[state] = _answer(model, processor, sample.messages)
            assert [image.kv for image in model.vlcache.last_request.images] == [expected] * (
                2 if sample.layout == "two" else 1
            )
        assert said["cold"] == said["warm"] == said["stock"]
        for state, text in said.items():
            right[state] += text == sample.answer
    assert min(right.values()) >= 0.9 * len(samples), right


@pytest.mark.parametrize("layout", tasks.LAYOUTS)
def test_every_mismatch_is_another_context(layout: Any) -> None:
    model, processor = _load(
        "ordinary", attn_implementation="vlcache", vlcache_config={"schedule": 0.0, "lossy_multi_image": True}
    )
    (sample,) = tasks.samples(seed=3, count=1, kind="both", layout=layout, size=4)
    assert tuple(sample.mismatched) == tasks.MISMATCHES[layout]
    for name, prompts in sample.mismatched.items():
        model.vlcache.clear()
        for prompt in prompts:
            _answer(model, processor, prompt)
        _answer(model, processor, sample.messages)
        kinds = {image.kv for image in model.vlcache.last_request.images}
        assert kinds == {"reused"}, (name, kinds)


def test_samples_depend_on_the_seed_alone() -> None:
    first, again = (tasks.samples(seed=1, count=3, kind="digit", layout="two", size=4) for _ in range(2))
    other = tasks.samples(seed=2, count=3, kind="digit", layout="two", size=4)
    assert first == again
    assert first != other
    assert tasks.samples(seed=1, count=5, kind="digit", layout="two", size=4)[:3] == first


@pytest.mark.parametrize("first", [False, True])
def test_training_sees_what_the_processor_makes(first: bool) -> None:
    processor = AutoProcessor.from_pretrained(FOLDER / "ordinary")
    rng = generator("train", 0)
    for pictures in (digit_grids(rng, 2, 6, "train"), shape_pictures(rng, 1, "train")):
        turns = [question(rng, picture) for picture in pictures]
        messages = conversation(pictures, turns, "Be brief.", first)
        row = encode(messages)
        expected = processor.apply_chat_template(
            [{**message, "content": [_with_image(part) for part in message["content"]]} for message in messages],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        pixels, grids = patches(pictures)
        assert row.ids == expected["input_ids"][0].tolist()
        assert torch.equal(grids, expected["image_grid_thw"])
        torch.testing.assert_close(pixels, expected["pixel_values"], atol=1e-6, rtol=0)


def _with_image(part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "image": part["image"].image()} if isinstance(part.get("image"), Picture) else part


def test_training_loss_is_that_of_the_stock_forward() -> None:
    model, _ = _load("ordinary")
    rng = generator("test", 5)
    pictures = digit_grids(rng, 2, 4, "test")
    rows = [encode(conversation([picture], [question(rng, picture)], "Be brief.", True)) for picture in pictures]
    batch = collate_rows(rows)
    pixels, grids = patches(pictures)
    visible = (torch.arange(batch.ids.shape[1])[None] < batch.lengths[:, None]).long()
    with torch.no_grad():
        ours, _, _ = loss(model, batch)
        stock = model(
            input_ids=batch.ids,
            attention_mask=visible,
            pixel_values=pixels,
            image_grid_thw=grids,
            mm_token_type_ids=(batch.ids == model.config.image_token_id).int(),
            labels=batch.labels,
        ).loss
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-4)


def test_hidden_text_is_hidden_from_what_follows_the_picture_only() -> None:
    rng = generator("train", 1)
    (picture,) = digit_grids(rng, 1, 4, "train")
    row = encode(conversation([picture], [question(rng, picture)], "", True))
    seen = collate_rows([row], hide=torch.tensor([True]).numpy()).mask()[0, 0] == 0
    assert not seen[row.last + 1 :, : row.first].any()
    assert seen[row.first : row.last + 1, : row.first].all()
    assert seen[-1, row.first : row.last + 1].all()


@pytest.mark.parametrize("name", NAMES)
def test_training_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "train.py"), name, "--out", str(tmp_path / "out"), "--quick"]
    subprocess.run(command + ["--work", str(tmp_path / "work")], check=True, capture_output=True)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    AutoProcessor.from_pretrained(tmp_path / "out")
