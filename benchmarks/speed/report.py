"""Writes measured tables into a Markdown file, between markers, so that no number is typed by hand.

    python -m benchmarks.speed.report benchmarks/results/ttft_*.json --into docs/performance.md --draw docs/ttft.png

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Names: `speedups ARCHITECTURE`, `floors
ARCHITECTURE`, `breakdown ARCHITECTURE VARIANT`, `shapes`, `pictures`, `memory`, `source`. What the files do not have
stays as it was. The picture has all results of one image and 20 text tokens.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import tables
from .plots import draw
from .workload import TEXT_TOKENS

SMALLEST = 1024  # tokens; what is smaller stands in the table of shapes
TABLE = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


class Reports:
    """Several reports as one.

    Args:
        reports (sequence of `dict`): as `benchmarks/ttft.py` writes them.
    """

    def __init__(self, reports: Sequence[dict[str, Any]]) -> None:
        self._reports = reports
        self._results = [result for report in reports for result in report["results"]]

    def one_image(self) -> list[dict[str, Any]]:
        """Results of one image and the usual text, smallest image first."""
        own = [r for r in self._results if r["images"] == 1 and r["text_tokens"] == TEXT_TOKENS]
        return sorted(own, key=lambda result: result["image_tokens"])

    def table(self, name: str) -> str | None:
        """A table by its name; `None` where nothing was measured for it.

        Args:
            name (`str`): what stands in the marker.
        """
        kind, *rest = name.split(" ", 2)
        if kind == "shapes":
            return tables.shapes(self._results) if self._results else None
        if kind in ("pictures", "memory"):
            rows = [row for report in self._reports for row in report.get(kind, [])]
            return getattr(tables, kind)(rows) if rows else None
        if kind == "source":
            return "\n".join(
                f"- `{report['command']}`: {report['machine']}, "
                + ", ".join(f"{package} {version}" for package, version in report["versions"].items())
                for report in self._reports
            )
        own = [
            result
            for result in self.one_image()
            if rest and result["architecture"] == rest[0] and result["image_tokens"] >= SMALLEST
        ]
        if not own:
            return None
        if kind == "breakdown":
            return tables.breakdown(own, rest[1])
        return {"speedups": tables.speedups, "floors": tables.floors}[kind](own)


def fill(text: str, reports: Reports) -> str:
    """A document with its tables.

    Args:
        text (`str`): with markers.
        reports (`Reports`): what was measured.
    """

    def filled(match: re.Match[str]) -> str:
        table = reports.table(match[2])
        return match[0] if table is None else f"{match[1]}{table}\n{match[4]}"

    return TABLE.sub(filled, text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="+", type=Path, help="reports of benchmarks/ttft.py")
    parser.add_argument("--into", type=Path, required=True, help="the Markdown file")
    parser.add_argument("--draw", type=Path, help="the picture, .png")
    args = parser.parse_args(arguments)
    reports = Reports([json.loads(path.read_text(encoding="utf-8")) for path in args.json])
    args.into.write_text(fill(args.into.read_text(encoding="utf-8"), reports), encoding="utf-8")
    if args.draw:
        draw(reports.one_image(), args.draw)


if __name__ == "__main__":
    main()
