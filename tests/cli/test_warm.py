"""`vlcache warm` with a real processor and a tiny random model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("skimage")

import offline  # noqa: E402
from vlcache_hf import VLCacheConfig  # noqa: E402
from vlcache_hf.cli import main  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return offline.save_checkpoint(tmp_path_factory.mktemp("models") / "tiny-vl")


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for name, picture in list(offline.photographs().items())[:3]:
        picture.thumbnail((160, 160))
        picture.save(folder / f"{name}.png")
    picture.save(folder / "more" / "UPPER.JPEG")
    (folder / "readme.txt").write_text("no image")
    return folder


def warm(checkpoint, images, *more, status=0):
    arguments = ["warm", "--json", "--model", str(checkpoint), "--images", str(images), "--device", "cpu", *more]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == status, (result.output, result.exception)
    return json.loads(result.stdout)


def load(checkpoint, **settings):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(
        checkpoint, attn_implementation="vlcache", vlcache_config=VLCacheConfig(**settings)
    )
    return model, AutoProcessor.from_pretrained(checkpoint)


def test_warm_then_resume_then_serve(checkpoint, images, tmp_path):
    cache = ("--cache-dir", str(tmp_path / "c"))
    first = warm(checkpoint, images, *cache)
    assert (first["stored"], first["present"], first["failed"]) == (4, 0, [])
    assert first["bytes_written"] > 0 and first["seconds"] > 0
    again = warm(checkpoint, images, *cache)
    assert (again["stored"], again["present"], again["bytes_written"]) == (0, 4, 0)
    (images / "coffee.png").rename(images / "moved.png")
    picture = offline.photographs()["rocket"]
    picture.save(images / "new.png")
    assert warm(checkpoint, images, *cache, "--batch-size", "3")["stored"] == 1

    model, processor = load(checkpoint, cache_dir=tmp_path / "c")
    inputs = offline.ask(processor, offline._open(images / "moved.png"), "Another question?", system="")
    model.generate(**inputs, max_new_tokens=2)
    assert [image.kv for image in model.vlcache.last_request.images] == ["exact"]

    listed = json.loads(CliRunner().invoke(main, ["ls", "--json", *cache]).stdout)
    assert {row["model"].split("@")[0] for row in listed["entries"]} == {"tiny-vl"}
    assert len({row["model"] for row in listed["entries"]}) == 1
    kv = [row for row in listed["entries"] if row["kind"] == "kv"]
    assert len(kv) == 5 and all(row["tokens"] > 0 for row in kv)
    assert json.loads(CliRunner().invoke(main, ["verify", "--json", *cache]).stdout)["good"] == 10


def test_broken_images_are_skipped(checkpoint, images, tmp_path):
    data = (images / "coffee.png").read_bytes()
    (images / "cut.png").write_bytes(data[: len(data) // 2])
    (images / "text.jpg").write_text("no image")
    offline.Image.new("RGB", (2000, 3)).save(images / "thread.png")  # the processor refuses so narrow an image
    report = warm(checkpoint, images, "--cache-dir", str(tmp_path / "c"), "--batch-size", "8", status=1)
    assert report["stored"] == 4
    assert {Path(row["path"]).name for row in report["failed"]} == {"cut.png", "text.jpg", "thread.png"}
    assert all(row["problem"] and "\n" not in row["problem"] for row in report["failed"])


def test_context_and_namespace(checkpoint, images, tmp_path):
    cache = ("--cache-dir", str(tmp_path / "c"))
    assert warm(checkpoint, images, *cache)["stored"] == 4
    assert warm(checkpoint, images, *cache, "--prompt", "What is it?")["present"] == 4
    # stored for this context too, at the first run, although the image could be reused from another one
    assert warm(checkpoint, images, *cache, "--system", "You are brief.")["stored"] == 4
    assert warm(checkpoint, images, *cache, "--system", "You are brief.")["present"] == 4
    assert warm(checkpoint, images, *cache, "--namespace", "tenant")["stored"] == 4
    assert warm(checkpoint, images, *cache, "--dtype", "bfloat16")["stored"] == 4


def test_copies_of_an_image_are_one(checkpoint, images, tmp_path):
    (images / "copy.png").write_bytes((images / "coffee.png").read_bytes())
    report = warm(checkpoint, images, "--cache-dir", str(tmp_path / "c"), "--batch-size", "8")
    assert (report["stored"], report["present"]) == (4, 1)


def test_a_cap_that_is_too_small(checkpoint, images, tmp_path):
    arguments = ("--cache-dir", str(tmp_path / "c"), "--max-bytes")
    report = warm(checkpoint, images, *arguments, "10KiB", status=1)
    assert (report["stored"], len(report["failed"])) == (0, 4)
    assert "not stored" in report["failed"][0]["problem"]
    result = CliRunner().invoke(
        main, ["warm", "--model", str(checkpoint), "--images", str(images), *arguments, "200KiB", "--device", "cpu"]
    )
    assert "more than the cap of 200.0 KiB" in result.stderr
    assert result.stdout.startswith("4 images stored, 0 present, 0 failed; ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--model": "/no/such/model"}, "--model '/no/such/model' could not be loaded"),
        ({"--device": "toaster"}, "device toaster"),
        ({"--images": "/no/such/folder"}, "/no/such/folder"),
        ({"--images": "empty"}, "holds no images"),
        ({"--batch-size": "0"}, "0 is not in the range"),
        ({"--max-bytes": "much"}, "'much' is no size"),
    ],
)
def test_bad_usage(checkpoint, images, tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    options = {"--model": str(checkpoint), "--images": str(images), "--cache-dir": str(tmp_path / "c"), **change}
    result = CliRunner().invoke(main, ["warm", *(part for option in options.items() for part in option)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not (tmp_path / "c").exists()


def test_a_server_that_cannot_be_used_is_told_before_the_model_is_loaded(images, monkeypatch):
    for name in [name for name in sys.modules if name == "redis" or name.startswith("redis.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setenv("VLCACHE_REMOTE", "redis://:hush@h")
    result = CliRunner().invoke(main, ["warm", "--model", "/no/such/model", "--images", str(images)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pip install 'vlcache-hf[remote]'" in result.stderr and "hush" not in result.stderr
    result = CliRunner().invoke(main, ["info"])
    assert result.exit_code == 2 and "pip install 'vlcache-hf[remote]'" in result.stderr


def test_a_model_without_a_cache(tmp_path, images):
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(vision_config={"model_type": "clip_vision_model", **small}, text_config=small)
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "llava")
    offline.build_processor().save_pretrained(tmp_path / "llava")
    result = CliRunner().invoke(
        main, ["warm", "--model", str(tmp_path / "llava"), "--images", str(images), "--cache-dir", str(tmp_path / "c")]
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Qwen3-VL" in result.stderr


def test_as_a_process(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLCACHE_DIR": str(tmp_path / "none")}
    command = [sys.executable, "-m", "vlcache_hf"]
    done = subprocess.run([*command, "info", "--json"], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["cache_dir"] == str(tmp_path / "none")
    wrong = subprocess.run([*command, "prune"], env=environment, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("Error: Nothing to prune by.")
