"""Held-out pictures and questions as files, for the commands: `python examples/tiny_models/export.py --out FOLDER`.

vlcache calibrate --model examples/tiny_models/routed --images FOLDER --prompts FOLDER/prompts.jsonl --out OUT
vlcache audit --model examples/tiny_models/routed --prompts FOLDER/prompts.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tiny_models.grammar import Kind, question
from tiny_models.pictures import digit_grids, generator

ASKED: tuple[Kind, ...] = ("digit", "color", "both")


def export(folder: Path, count: int, size: int, seed: int) -> Path:
    """Writes pictures, and a question about each.

    Args:
        folder (`Path`): created when missing.
        count (`int`): how many.
        size (`int`): rows = columns of image tokens: 4, 6, 8, 12 or 16.
        seed (`int`): of the layouts.

    Returns:
        `Path`: the JSON lines, with `image`, `question` and `answer`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = generator("test", seed)
    lines = []
    for index, picture in enumerate(digit_grids(rng, count, size, "test")):
        name = f"grid-{index:03}.png"
        picture.image().save(folder / name)
        asked, answer = question(rng, picture, ASKED[index % len(ASKED)])
        lines.append(json.dumps({"image": name, "question": asked, "answer": answer}))
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--count", type=int, default=80, help="pictures (default 80)")
    parser.add_argument(
        "--size", type=int, default=12, choices=(4, 6, 8, 12, 16), help="rows and columns (default 12)"
    )
    parser.add_argument("--seed", type=int, default=7, help="of the layouts (default 7)")
    args = parser.parse_args()
    print(export(args.out, args.count, args.size, args.seed))


if __name__ == "__main__":
    main()
