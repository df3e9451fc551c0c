"""`lmms-eval --model vlcache` on a task of its own, a tiny random model and the real processor."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("skimage")

import offline  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent

needs_lmms_eval = pytest.mark.skipif(
    importlib.util.find_spec("lmms_eval") is None
    or not any(point.name == "vlcache" for point in entry_points(group="lmms_eval.models")),
    reason="lmms-eval is not installed, or vlcache-hf is not, so that its entry point cannot be found",
)

TASK = """\
task: local_vqa
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/data.jsonl
test_split: test
output_type: generate_until
doc_to_visual: !function utils.visual
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
generation_kwargs:
  max_new_tokens: 4
  temperature: 0
  do_sample: false
process_results: !function utils.process
metric_list:
  - metric: same
    aggregation: mean
    higher_is_better: true
"""
UTILS = """\
from PIL import Image


def visual(doc):
    return [Image.open(path).convert("RGB") for path in doc["images"]]


def process(doc, results):
    return {"same": float(results[0] == doc["answer"])}
"""
# images of each prompt: two prompts about the first, and one with both
PROMPTS = (("astronaut",), ("astronaut",), ("coffee",), ("astronaut", "coffee"))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    pictures = offline.photographs()
    for name in ("astronaut", "coffee"):
        pictures[name].thumbnail((256, 256))
        pictures[name].save(folder / f"{name}.png")
    rows = [
        {"images": [str(folder / f"{name}.png") for name in names], "question": f"What is it, {index}?", "answer": "?"}
        for index, names in enumerate(PROMPTS)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "local_vqa.yaml").write_text(TASK.format(folder=folder))
    (folder / "utils.py").write_text(UTILS)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: offline.save_checkpoint(folder / name, name) for name in ("qwen2_5_vl", "qwen3_vl")}


def evaluate(task: Path, out: Path, model: str, checkpoint: Path, *options: str, batch: int = 1) -> list[str]:
    """Runs lmms-eval; returns the answers in the order of the prompts. Its exit status is 0 also when it failed."""
    arguments = [f"pretrained={checkpoint}", "device_map=cpu", "max_pixels=65536", "min_pixels=1024", *options]
    command = [sys.executable, "-m", "lmms_eval", "--model", model, "--model_args", ",".join(arguments)]
    command += ["--tasks", "local_vqa", "--include_path", str(task), "--batch_size", str(batch), "--device", "cpu"]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(out / "home"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [*command, "--output_path", str(out), "--log_samples"],
        env=environment,
        cwd=out,
        capture_output=True,
        text=True,
        check=False,
    )
    files = list(out.glob("*/*_samples_local_vqa.jsonl"))
    assert len(files) == 1 and list(out.glob("*/*_results.json")), done.stdout + done.stderr
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    return [row["filtered_resps"][0] for row in sorted(rows, key=lambda row: row["doc_id"])]


def counts(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


@needs_lmms_eval
@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "batch"), [("qwen3_vl", 1), ("qwen3_vl", 2), ("qwen2_5_vl", 1)])
def test_the_papers_protocol(
    task: Path, checkpoints: dict[str, Path], tmp_path: Path, architecture: str, batch: int
) -> None:
    options = ("schedule=0.1", f"cache_dir={tmp_path / 'cache'}", f"stats={tmp_path / 'stats' / 'run.json'}")
    answers = evaluate(task, tmp_path, "vlcache", checkpoints[architecture], *options, batch=batch)
    assert len(answers) == 4
    found = counts(tmp_path / "stats" / "run.json")
    # every image of a formal prompt is met in the auxiliary prompt's context, the repeated ones too
    assert (found["exact"], found["reused"], found["missed"], found["in_full"]) == (0, 5, 0, 0)
    assert (found["auxiliary"], found["present"]) == (5, 3)
    assert 0 < found["recomputed"] <= 0.1 * found["tokens"]
    assert found["settings"]["schedule"] == "0.1" and found["settings"]["auxiliary"] is True
    assert (tmp_path / "cache" / "kv").is_dir()
    assert len(list((tmp_path / "cache" / "kv").rglob("*.safetensors"))) == 2, "formal prompts store nothing"


@needs_lmms_eval
@pytest.mark.slow
def test_in_operation_and_in_full_it_answers_as_stock(
    task: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    def answers(name: str, model: str, *options: str) -> list[str]:
        (tmp_path / name).mkdir()
        return evaluate(task, tmp_path / name, model, checkpoints["qwen3_vl"], *options)

    stock = answers("stock", "qwen3_vl")
    off = answers("off", "vlcache", "auxiliary=off", "reuse=exact", f"stats={tmp_path / 'off.json'}")
    found = counts(tmp_path / "off.json")
    assert (found["exact"], found["reused"], found["missed"], found["auxiliary"]) == (2, 0, 3, 0)
    full = answers("full", "vlcache", "schedule=1.0", f"stats={tmp_path / 'full.json'}")
    found = counts(tmp_path / "full.json")
    assert (found["exact"], found["reused"], found["missed"], found["auxiliary"]) == (0, 0, 5, 0)
    assert found["recomputed"] == found["tokens"]
    assert stock == off == full and len(set(stock)) > 1


def test_the_library_does_not_need_lmms_eval() -> None:
    code = "import sys, vlcache_hf, vlcache_hf.integrations.lmms_eval; assert 'lmms_eval' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
