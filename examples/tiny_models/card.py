"""Writes the table of a model card from `results.json`: `python examples/tiny_models/card.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results -->", "<!-- end of results -->"
LAYOUTS = {"after": "question after", "before": "question before", "turns": "third turn", "two": "two pictures"}


def table(result: dict[str, Any]) -> str:
    """Markdown of the exact match in every layout and size, and in total."""
    sizes = sorted({row["size"] for row in result["rows"]})
    lines = ["| question | layout | " + " | ".join(f"{size} x {size}" for size in sizes) + " |"]
    lines.append("|---" * (len(sizes) + 2) + "|")
    for kind in dict.fromkeys(row["kind"] for row in result["rows"]):
        for layout in LAYOUTS:
            found = {row["size"]: row for row in result["rows"] if (row["kind"], row["layout"]) == (kind, layout)}
            if found:
                shares = [f"{found[size]['right'] / found[size]['n']:.3f}" if size in found else "" for size in sizes]
                lines.append(f"| {kind} | {LAYOUTS[layout]} | " + " | ".join(shares) + " |")
    totals = [f"{kind} {value['exact_match']:.4f} (n = {value['n']})" for kind, value in result["by_kind"].items()]
    totals += [
        f"{size} x {size} {value['exact_match']:.4f} (n = {value['n']})" for size, value in result["by_size"].items()
    ]
    per_cell = sorted({row["n"] for row in result["rows"]})
    return "\n".join(
        [
            "\n".join(lines),
            "",
            f"n = {' or '.join(map(str, per_cell))} held-out questions in each place of the table. All: "
            + "; ".join(totals) + ".",
            "",
            f"`{result['command']}`, torch {result['torch']}, {result['machine']}.",
        ]
    )  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    card = folder / "README.md"
    head, _, rest = card.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    result = json.loads((folder / "results.json").read_text())
    card.write_text(f"{head}{BEGIN}\n{table(result)}\n{END}{tail}")


if __name__ == "__main__":
    main()
