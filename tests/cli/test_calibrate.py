"""`vlcache calibrate` with a real processor and a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("skimage")

import offline  # noqa: E402
from vlcache_hf import RecomputeSchedule, VLCacheConfig  # noqa: E402
from vlcache_hf.calibration import run as run_module  # noqa: E402
from vlcache_hf.calibration.samples import AUXILIARY, QUESTIONS, from_file, from_folder  # noqa: E402
from vlcache_hf.cli import main  # noqa: E402

SMALL = ("--samples", "3", "--held-out", "2", "--max-new-tokens", "4", "--device", "cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return offline.save_checkpoint(tmp_path_factory.mktemp("models") / "tiny-vl")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    (folder / "more").mkdir()
    for index, (name, picture) in enumerate(list(offline.photographs().items())[:3]):
        picture.resize((256, 256)).save(folder / ("more" if index == 2 else ".") / f"{name}.png")
    return folder


def calibrate(checkpoint: Path, images: Path, *more: Any, status: int = 0) -> Any:
    arguments = ["calibrate", "--model", checkpoint, "--images", images, *more]
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result


@pytest.mark.slow
def test_schedules_for_several_budgets_and_what_loads_them(checkpoint: Path, images: Path, tmp_path: Path) -> None:
    result = calibrate(
        checkpoint, images, *SMALL, "--budget", "0.05", "0.1", "--seed", "3", "--out", tmp_path / "o", "--json"
    )
    report = json.loads(result.stdout)
    assert list(report["budgets"]) == list(report["held_out"]) == ["0.05", "0.1"]
    assert report["settings"]["seed"] == 3 and report["settings"]["num_samples"] == 3
    assert report["settings"]["model"].startswith("tiny-vl@")
    assert report["held_out"]["0.05"]["refined"]["samples"] == 2
    assert report["base_mse"] > 0 and report["seconds"] > 0
    for budget in (0.05, 0.1):
        schedule = RecomputeSchedule.from_pretrained(tmp_path / "o" / f"mean-{budget}")
        assert (schedule.model_id, schedule.model_type, schedule.calibrated) == ("tiny-vl", "qwen3_vl", True)
        assert 0 < schedule.mean <= budget + 1e-9
        assert str(checkpoint.parent) not in json.dumps(schedule.to_dict())  # a path is nobody's business
        VLCacheConfig(schedule=str(tmp_path / "o" / f"mean-{budget}"))


def test_the_table_for_people_and_plots(checkpoint: Path, images: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = calibrate(
        checkpoint, images, *SMALL, "--budget", "0.1", "--method", "greedy", "--out", tmp_path / "o", "--plots"
    )
    lines = result.stdout.splitlines()
    assert "points on 3 samples" in lines[0]
    assert f"mean 0.1: {tmp_path}/o/mean-0.1/vlcache_schedule.json" in lines
    assert [line.split()[0] for line in lines if " of 2" in line] == ["uniform", "greedy*", "optimal"]
    assert {path.name for path in (tmp_path / "o").glob("*.png")} == {"curves.png", "schedules.png"}


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_file(
    checkpoint: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*SMALL, "--budget=0.1", "--held-out", "0", "--out")
    calibrate(checkpoint, images, *options, tmp_path / "whole")
    real, calls = run_module.measure, []

    def fails_at_the_third(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(run_module, "measure", fails_at_the_third)
    calibrate(checkpoint, images, *options, tmp_path / "cut", status=1)
    assert not (tmp_path / "cut" / "mean-0.1").exists()
    calls[:] = [1, 1, 1]
    calibrate(checkpoint, images, *options, tmp_path / "cut")
    assert len(calls) == 4
    files = [tmp_path / part / "mean-0.1" / "vlcache_schedule.json" for part in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
    result = calibrate(checkpoint, images, *options, tmp_path / "cut", "--seed", "1", status=2)
    assert "another samples, seed" in result.stderr


def test_prompts_from_a_file(checkpoint: Path, images: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"image": "coffee.png", "question": f"What is {index}?", "answer": "A cup"} for index in range(4)]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    options = ("--prompts", file, "--samples", 3, "--held-out", 1, "--budget", 0.1, "--method", "optimal")
    calibrate(checkpoint, images, *options, "--device", "cpu", "--out", tmp_path / "o")
    first = json.loads((tmp_path / "o" / "calibration.jsonl").read_text().splitlines()[1])
    assert len(first["result"]["answer"]) >= 3  # the tokens of "A cup" and the end of the turn
    result = calibrate(checkpoint, images, "--prompts", file, "--out", tmp_path / "p", status=2)
    assert "has 4 prompts, 60 are asked for" in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "line 1: a prompt is"),
        ('{"image": "coffee.png"}', "line 1: a prompt is"),
        ('{"image": 3, "question": "?"}', "line 1: a prompt is"),
        ('{"image": "gone.png", "question": "?"}', "there is no image"),
        ('{"image": "coffee.png", "question": "?", "anser": "x"}', "unknown key(s) ['anser']"),
    ],
)
def test_lines_that_are_no_prompt(images: Path, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError) as raised:
        from_file(file, images, 1)
    assert message in str(raised.value)


def test_samples_of_a_folder(images: Path) -> None:
    asked, kept = from_folder(images, 16, 8, seed=0)

    def content(sample: Any) -> tuple[str, str]:
        text, image = sample.messages[-1]["content"]
        assert sample.auxiliary[-1]["content"] == [{"type": "text", "text": AUXILIARY}, image]
        return image["image"], text["text"]

    pairs = [content(sample) for sample in asked + kept]
    assert len(set(pairs)) == 24 and {text for _, text in pairs} == set(QUESTIONS)
    shown, unseen = ({content(sample)[0] for sample in part} for part in (asked, kept))
    assert len(shown) == 2 and len(unseen) == 1 and not shown & unseen
    assert from_folder(images, 16, 8, seed=0) == (asked, kept) != from_folder(images, 16, 8, seed=1)
    assert len({content(sample) for sample in from_folder(images / "more", 8)[0]}) == 8
    with pytest.raises(ValueError, match="2 image.s. for 17 samples"):
        from_folder(images, 17, 8)


def test_push_to_hub(checkpoint: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = []
    monkeypatch.setattr(
        RecomputeSchedule, "push_to_hub", lambda self, repo_id: pushed.append((self, repo_id)), raising=False
    )
    options = (*SMALL, "--method", "optimal", "--push-to-hub", "me/schedule", "--out", tmp_path / "o")
    result = calibrate(checkpoint, images, *options, "--budget", "0.05", "0.1", status=2)
    assert "there are 2 budgets" in result.stderr
    calibrate(checkpoint, images, *options, "--budget", "0.1")
    assert pushed == [(RecomputeSchedule.from_pretrained(tmp_path / "o" / "mean-0.1"), "me/schedule")]


def test_misuse(checkpoint: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ("--out", tmp_path / "o")
    assert "for 40 samples" in calibrate(checkpoint, images, *out, status=2).stderr
    assert "could not be loaded" in calibrate(tmp_path, images, *SMALL, *out, status=2).stderr
    assert "2" in calibrate(checkpoint, images, *out, "--budget", "2", status=2).stderr
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "vlcache-hf[plots]" in calibrate(checkpoint, images, *SMALL, *out, "--plots", status=2).stderr
    assert not (tmp_path / "o").exists()
