"""A few trials of each row of the fault harness; `benchmarks/faults/RESULTS.md` has the whole of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parent.parent / "benchmarks" / "faults" / "run.py"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(not HARNESS.exists(), reason="needs the checkout")
def test_a_few_trials_of_each_fault(tmp_path):
    report = tmp_path / "report.json"
    # one process for all rows: it forks the rest, and importing torch takes longer than they do
    done = subprocess.run(
        [sys.executable, str(HARNESS), "--quick", "--json", str(report)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert report.exists(), done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert {name: row["troubles"] for name, row in rows.items() if not row["good"]} == {}
    assert done.returncode == 0, done.stderr
    for name, row in rows.items():
        if any(note.startswith("skipped") for note in row["notes"]):
            continue
        assert row["trials"] > 0, name
        assert row["hits"] > 0 or name == "flips_header", name  # else nothing was at stake
