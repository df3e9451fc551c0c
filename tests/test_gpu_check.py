"""`benchmarks/gpu_check.py` as far as a CPU goes: all of its code but the CUDA kernels, with tiny models."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import equality, kernels, models
from benchmarks.gpu.budget import Budget

SMALL = ["--dry-run", "--models", "1", "--rounds", "1", "--tokens", "16"]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """Exit status and results of a dry run."""
    path = tmp_path_factory.mktemp("gpu") / "results" / "gpu.json"
    status = gpu_check.main(["--dry-run", "--rounds", "1", "--json", str(path)])
    return status, json.loads(path.read_text())


def test_all_is_equal_and_nothing_is_left_out(dry_run):
    status, report = dry_run
    assert status == 0
    assert (report["failed"], report["errors"], report["left_out"]) == (0, {}, [])
    assert report["versions"]["torch"] == torch.__version__
    assert report["command"].startswith("python -m benchmarks.gpu_check --dry-run --rounds 1 --json ")
    assert "CPU" in report["machine"]
    assert set(report["missing"]) == {"flash_attention_2", "varlen"}
    assert len(report["kernels"]) == 18 and all(row["ok"] for row in report["kernels"])


@pytest.mark.parametrize("shape", models.TINY, ids=lambda shape: shape.architecture)
def test_requests_were_of_their_kind(dry_run, shape):
    rows = {row["request"]: row for row in dry_run[1]["equality"] if row["model"].startswith(shape.name + ",")}
    kinds = {request: (row["kv"], row["encoder"], row["ok"]) for request, row in rows.items()}
    assert kinds == {
        "stock, eager": (None, None, None),
        "stock, another image": (None, None, True),
        "cold": ("miss", "miss", True),
        "exact, sdpa": ("exact", "skipped", True),
        "exact, from disk": ("exact", "skipped", True),
        "reused r=1, sdpa": ("reused", "hit", True),
        "encoder only": ("miss", "hit", True),
        "reused r=0": ("reused", "skipped", None),
    }
    equal = [row for request, row in rows.items() if row["kv"] and request != "reused r=0"]
    assert all(row["error"] < 1e-5 and row["equal_tokens"] == row["tokens"] == 4 for row in equal)
    assert rows["reused r=0"]["error"] > 1e-2 and rows["stock, another image"]["error"] > 1e-2


@pytest.mark.parametrize("shape", models.TINY, ids=lambda shape: shape.architecture)
def test_timed_requests_were_hits(dry_run, shape):
    results = [result for result in dry_run[1]["timing"] if result["model"] == shape.name]
    assert [result["image_tokens"] for result in results] == [64, 144]
    for result in results:
        rows = result["rows"]
        assert rows["stock"]["speedup"] == 1 and all(row["median_s"] > 0 for row in rows.values())
        assert {name: row.get("kv") for name, row in rows.items()} == {
            "stock": None,
            "encoder only (w/o ViT), ram": "miss",
            "dynamic (0.035), ram": "reused",
            "dynamic (0.035), disk": "reused",
            "static (r=0.1), ram": "reused",
            "static (r=0.1), disk": "reused",
            "exact, ram": "exact",
            "exact, disk": "exact",
            "cold, stored in the background": "miss",
            "exact, ram as stored": "exact",
        }
        assert rows["encoder only (w/o ViT), ram"]["encoder"] == "hit"
        assert rows["exact, ram"]["bytes_read"] == rows["exact, disk"]["bytes_read"] > 0
        assert rows["exact, ram"]["recomputed"] == 0
        assert 0 < rows["dynamic (0.035), ram"]["recomputed"] < rows["static (r=0.1), ram"]["recomputed"] <= 0.1


def test_a_difference_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(kernels.TOLERANCE, torch.float32, -1.0)
    path = tmp_path / "gpu.json"
    assert gpu_check.main([*SMALL, "--parts", "kernels", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["failed"] == 6
    assert "6 comparisons, 6 FAILED" in capsys.readouterr().out


def test_nan_is_a_failure(monkeypatch):
    heads, device = kernels.Heads(2, 1, 8), torch.device("cpu")
    case = kernels.build_case(kernels.random_segments(0, 8), heads, device, torch.float32)
    broken = kernels.resolve("sdpa", device, torch.float32, heads.dim)
    monkeypatch.setattr(broken.__class__, "__call__", lambda self, query, *_: query.transpose(1, 2) * torch.nan)
    (row,) = kernels.measure_case("case", case, heads, ["sdpa"])
    assert not row["ok"] and "FAILED" in kernels.table([row])


def test_one_broken_piece_leaves_the_others(tmp_path, monkeypatch, capsys):
    def check(*args):
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(equality, "check", check)
    path = tmp_path / "gpu.json"
    assert gpu_check.main([*SMALL, "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert report["errors"] == {"equality, tiny Qwen3-VL, float32": "ZeroDivisionError: of all things"}
    assert report["kernels"] and report["timing"] and not report["failed"]
    assert "BROKE: equality, tiny Qwen3-VL, float32: ZeroDivisionError" in capsys.readouterr().out


def test_no_time_is_said_and_is_no_success(capsys):
    assert gpu_check.main([*SMALL, "--minutes", "0"]) == 1
    told = capsys.readouterr().out
    for work in ("kernels, float32", "equality, tiny Qwen3-VL, float32", "timing, tiny Qwen3-VL"):
        assert f"left out: {work}" in told


def test_budget_counts_down():
    now = iter([0.0, 10.0, 10.0, 110.0, 110.0])
    budget = Budget(2, clock=lambda: next(now))
    assert budget.left() == 110
    assert budget.allows("short", 30)
    assert not budget.allows("long", 30) and budget.left_out == ["long"]


@pytest.mark.parametrize(
    "shape, billions", list(zip(models.REAL, (8.77, 8.29, 31.07), strict=True)), ids=["8B", "7B", "30B-A3B"]
)
def test_shapes_are_those_of_the_released_models(shape, billions):
    with torch.device("meta"):
        model = models.AutoModelForImageTextToText.from_config(shape.config(), dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)
    assert model.config.text_config.num_hidden_layers == shape.text["num_hidden_layers"]


def test_twin_shares_the_weights():
    model = models.build_model(models.TINY[0], torch.device("cpu"), torch.float32)
    other = models.twin(model)
    assert other is not model and other.model.language_model.layers[0] is not model.model.language_model.layers[0]
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_image_tokens_are_a_square_number():
    config = models.TINY[0].config()
    with pytest.raises(ValueError, match="square number, got 10; 9 is one"):
        models.prompt(models.pixels(config, 10, torch.device("cpu")), 0)


def test_without_a_gpu_it_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_check.main([])
    assert "`--dry-run`" in capsys.readouterr().err


def test_wheels_are_those_of_the_constraints(tmp_path):
    """The script with a pip that only says what it was asked for."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    script = "benchmarks/gpu_wheels.sh"
    root = Path(gpu_check.__file__).parent.parent
    command, env = [root / script, "3.13", "here"], {"PYTHON": str(python), "PATH": "/usr/bin:/bin"}
    told = subprocess.run(command, env=env, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "--python-version 3.13" in told.stdout and "--dest here" in told.stdout
    pins = (root / "constraints" / "ci.txt").read_text().split()
    assert {word for word in told.stdout.split() if "==" in word} <= set(pins)
    assert {"diskcache", "xxhash", "blake3", "click", "tqdm", "transformers"} <= {
        word.split("==")[0] for word in told.stdout.split() if "==" in word
    }
