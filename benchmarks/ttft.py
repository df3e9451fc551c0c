"""Time to first token: see `benchmarks/speed/main.py`, or `python benchmarks/ttft.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.speed.main import main  # noqa: E402

if __name__ == "__main__":
    main()
