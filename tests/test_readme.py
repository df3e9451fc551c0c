"""The README's quick start runs as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _block(language: str) -> str:
    quick_start = README.split("## Quick start")[1].split("\n## ")[0]
    return re.search(rf"```{language}\n(.*?)```", quick_start, re.DOTALL)[1]


def test_quick_start(tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    environment = {
        # as a reader has it: the threshold of the other tests is not set
        **{name: value for name, value in os.environ.items() if name != "VLCACHE_MIN_TOKENS"},
        "HF_HUB_OFFLINE": "1",
        "VLCACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    command = next(line for line in _block("bash").splitlines() if "offline.py" in line).split("#")[0].split()
    assert command[:2] == ["python", "examples/offline.py"]
    subprocess.run([sys.executable, str(ROOT / command[1]), *command[2:]], cwd=tmp_path, check=True, env=environment)
    done = subprocess.run(
        [sys.executable, "-c", _block("python")],
        cwd=tmp_path,
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "kv exact, encoder skipped, recomputed 0.0 %" in done.stdout
    assert "2 requests (0 in full); images: 1 exact, 0 reused, 1 missed" in done.stdout


def test_settings_table_lists_every_setting() -> None:
    from vlcache_hf import VLCacheConfig

    table = README.split("## Settings")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(VLCacheConfig.__dataclass_fields__)
