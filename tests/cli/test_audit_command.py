"""`vlcache audit` with a real processor and a tiny random model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("skimage")

import offline  # noqa: E402
from vlcache_hf.audit import CaseResult, Measure  # noqa: E402
from vlcache_hf.cli import main  # noqa: E402
from vlcache_hf.cli.audit import _row  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return offline.save_checkpoint(tmp_path_factory.mktemp("models") / "tiny-vl", max_pixels=65536)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    for name, picture in list(offline.photographs().items())[:2]:
        picture.thumbnail((160, 160))
        picture.save(tmp_path / f"{name}.png")
    lines = [
        {"image": "astronaut.png", "question": "Who is this?"},
        {"image": "astronaut.png", "question": "Where?"},
        {"image": "coffee.png", "question": "What is it?", "system": "Be brief.", "context": "On the table:"},
        {"image": "coffee.png", "question": "What is it?"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def audit(checkpoint: Path, prompts: Path, *more: str, status: int = 0) -> Result:
    arguments = ["--model", str(checkpoint), "--prompts", str(prompts), "--device", "cpu", "--max-new-tokens", "4"]
    result = CliRunner().invoke(main, ["audit", *arguments, *more])
    assert result.exit_code == status, (result.output, result.exception)
    return result


def test_table_and_json_file(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    shown = audit(checkpoint, prompts, "--json", str(tmp_path / "report.json"))
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "tiny-vl@" in shown.stdout and "4 prompts, answers of 4 tokens" in shown.stdout
    assert "in this order, by default: exact 1 (25 %), reused 1 (25 %), miss 2 (50 %)" in shown.stdout
    rows = {line.split("  ")[0]: line for line in shown.stdout.splitlines()[3:]}
    assert {"exact hit", "0", "0.035", "0.1", "0.3", "auto"} <= set(rows)
    assert rows["0.3"].split()[1] == "29.8%" and rows["exact hit"].split()[2] == "0.0%"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["in_operation"] == {"exact": 1, "reused": 1, "miss": 2}
    assert [case["label"] for case in report["cases"]] == ["0", "0.035", "0.1", "0.3", "auto"]
    assert all(case["prompts"] == 4 and case["first_kl"] > 1e-4 for case in report["cases"])
    assert report["cases"][2]["first_kl"] == report["cases"][4]["first_kl"], "no file is shipped for it: 0.1"
    assert report["exact"]["first_kl"] < 1e-5 and report["exact"]["flips"]["total"] == 4
    assert report["guard"]["acts"]["total"] == 4 and report["guard"]["deviation"] > 0.01
    assert not list(tmp_path.glob("*partial")), "nothing is left when all is done"
    assert not any(Path(os.environ["VLCACHE_DIR"]).iterdir()), "the user's cache is not touched"


def test_json_alone_and_choices(checkpoint: Path, prompts: Path) -> None:
    options = ("--schedule", "0,0.5", "--schedule", "0.5", "--policy", "prefix", "--policy", "suffix", "--json", "-")
    report = json.loads(audit(checkpoint, prompts, *options, "--guard", "warn", "--max-flips", "0.5").stdout)
    assert [case["label"] for case in report["cases"]] == ["0", "0.5", "0 suffix", "0.5 suffix"]
    assert report["max_flips"] == 0.5 and report["guard"]["threshold"] == 0.7


def test_broken_images_fail_alone_and_are_tried_again(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    data = (tmp_path / "coffee.png").read_bytes()
    (tmp_path / "coffee.png").write_bytes(data[: len(data) // 2])
    quick = ("--schedule", "0.1", "--partial", str(tmp_path / "kept"))
    shown = audit(checkpoint, prompts, *quick, status=1)
    assert "2 prompts" in shown.stdout
    assert "failed: line 3: " in shown.stderr and "failed: line 4: " in shown.stderr and "line 1" not in shown.stderr
    assert (tmp_path / "kept").exists()
    (tmp_path / "coffee.png").write_bytes(data)
    assert "4 prompts" in audit(checkpoint, prompts, *quick).stdout
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "/no/such/model"), "--model '/no/such/model' could not be loaded"),
        (("--prompts", "/no/such/file"), "/no/such/file"),
        (("--prompts", "bad.jsonl"), "line 2: there is no image"),
        (("--schedule", "2"), "must lie in [0, 1]"),
        (("--schedule", "1"), "recomputes everything"),
        (("--schedule", "none.json"), "none.json"),
        (("--policy", "encoder_only"), "reuses no KV"),
        (("--max-flips", "7"), "`max_flips` must be a share"),
        (("--guard-threshold", "-1"), "guard_threshold"),
        (("--json", "/no/such/folder/report.json"), "cannot be written"),
        (("--partial", "/no/such/folder/kept"), "--partial '/no/such/folder/kept' cannot be written"),
        (("--partial", "bad.jsonl"), "holds no partial results"),
    ],
)
def test_bad_usage(
    checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"image": "astronaut.png", "question": "?"}\n{"image": "gone.png", "question": "?"}')
    result = audit(checkpoint, prompts, *options, status=2)
    assert result.stdout == "" and message in result.stderr


def test_rows_fit_a_terminal() -> None:
    measures = [Measure(12.345678, 12.345678, True, True, 1.0)] * 1000
    row = _row(CaseResult.of("0.035 cacheblend", "0.035", "cacheblend", measures), 16)
    assert row == "0.035 cacheblend   100.0%  1.2e+01 1.2e+01 1.2e+01   1000  1000 (99.6-100.0 %)"
    assert len(row) <= 80
