"""What every benchmark says of itself beside its numbers."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import vlcache_hf


def report(script: str, results: Any, **more: Any) -> dict[str, Any]:
    """Results with the command, the machine and the versions.

    Args:
        script (`str`): what was run, e.g. `benchmarks/ttft.py`; its arguments are those of this process.
        results: JSON values.
        **more: further fields.
    """
    return {
        "command": " ".join(["python", script, *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {_processor()}, {torch.get_num_threads()} threads, fp32, CPU",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "vlcache_hf": vlcache_hf.__version__,
        },
        "results": results,
        **more,
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    """The CPU as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
