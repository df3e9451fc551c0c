"""Runs the fault harness: what can go wrong with the store is made to go wrong, and answers are compared with stock.

    python benchmarks/faults/run.py [--rows kills_random crowd ...] [--json benchmarks/faults/results.json]

Each row runs in a process of its own. The exit status is 0 when every row is good: no wrong answer, no exception, no
hang, and no more bytes than the cap and one entry for each live writer.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: processes are forked, and a pool would not survive it
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "tests"), str(HERE.parent.parent)]

import crowd  # noqa: E402
import errnos  # noqa: E402
import flips  # noqa: E402
import kills  # noqa: E402
import server  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from harness import Child, Row, Task, collect  # noqa: E402

import vlcache_hf  # noqa: E402

ROW_SECONDS = 1200.0
MEMORY = Path("/dev/shm")  # tens of thousands of small transactions; nothing there depends on the file system
ROWS: dict[str, Callable[[Task], Row]] = {
    row.__name__: row for module in (kills, crowd, errnos, flips, server) for row in module.ROWS
}
NAMES = ", ".join(ROWS)


def run_row(name: str, base: Path | None, quick: bool, seed: int) -> Row:
    """One row, in a process of its own."""
    if base is None and name.startswith("errnos") and os.access(MEMORY, os.W_OK):
        base = MEMORY
    folder = Path(tempfile.mkdtemp(prefix=f"vlcache-{name}-", dir=base))
    start = time.monotonic()

    def work(begin: Callable[[], None]) -> dict[str, Any]:
        return ROWS[name](Task(folder, quick, seed)).__dict__

    whole = Row(name)
    counts = collect(whole, Child(work), name, ROW_SECONDS)
    row = whole if counts is None else Row(**counts)
    row.seconds = round(time.monotonic() - start, 1)
    shutil.rmtree(folder, ignore_errors=True)
    return row


def table(rows: list[Row]) -> str:
    """The rows in 100 columns."""
    lines = [
        f"{'':<42}{'trials':>6}{'hits':>7}{'misses':>7}{'wrong':>6}{'exc':>4}{'hang':>5}{'fail':>5}"
        f"{'over / allowed':>17}"
    ]
    for row in rows:
        over = "-" if row.over is None else f"{_kib(row.over)} / {_kib(row.allowed)}"
        lines.append(
            f"{row.name[:42]:<42}{row.trials:>6}{row.hits:>7}{row.misses:>7}{row.wrong:>6}{row.exceptions:>4}"
            f"{row.hangs:>5}{row.failures:>5}{over:>17}" + ("" if row.good else " !")
        )
    return "\n".join(lines)


def _kib(count: int) -> str:
    return f"{count / 1024:.0f}K"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW", help=NAMES)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true", help="a few trials of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where stores are made (default: the system's temporary folder)")
    args = parser.parse_args()
    # thousands of faults are made, and each new store warns of each kind once
    logging.getLogger("vlcache_hf").setLevel(logging.ERROR)
    rows = []
    for name in args.rows:
        row = run_row(name, args.dir, args.quick, args.seed)
        rows.append(row)
        print(table([row]).splitlines()[-1], flush=True)
        for text in row.troubles:
            print(f"    {text}", file=sys.stderr, flush=True)
    print()
    print(table(rows))
    if args.json:
        report = {
            "command": " ".join(["python", "benchmarks/faults/run.py", *sys.argv[1:]]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, fp32",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "vlcache_hf": vlcache_hf.__version__,
            },
            "seed": args.seed,
            "rows": {name: {**row.__dict__, "good": row.good} for name, row in zip(args.rows, rows)},
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
