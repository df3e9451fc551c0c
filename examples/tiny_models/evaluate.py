"""Exact match of greedy answers on held-out questions: `python examples/tiny_models/evaluate.py FOLDER`.

Every answer comes from `model.generate` of the stock model. With `--reuse RATIO` each prompt is asked on a fresh cache
after an earlier prompt that shows its pictures in another context, so that their KV is reused; `RATIO` of their tokens
are recomputed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tiny_models import tasks
from tiny_models.grammar import KINDS, OF_SHAPES
from tiny_models.pictures import SIZES

BATCH_TOKENS = 4096
TRAINED: dict[str, tuple[str, ...]] = {"ordinary": tuple(KINDS), "routed": ("digit", "color", "both")}


def answers(model: Any, processor: Any, prompts: list[list[dict[str, Any]]]) -> list[str]:
    """Greedy answers to a padded batch of prompts."""
    inputs = tasks.inputs(processor, prompts).to(model.device)
    output = model.generate(**inputs, max_new_tokens=8)
    texts = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


def cells(kinds: tuple[str, ...], sizes: tuple[int, ...], layouts: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """Every kind, layout and size that is evaluated by itself."""
    return [
        (kind, layout, size)
        for kind in kinds
        for layout in layouts
        for size in ((4,) if kind in OF_SHAPES else sizes)
        if not (kind in OF_SHAPES and layout == "two") and not (layout == "two" and size > 12)
    ]


def stock(model: Any, processor: Any, cell: tuple[str, str, int], seed: int, count: int) -> dict[str, Any]:
    """Exact match in one cell."""
    kind, layout, size = cell
    per_batch = max(1, BATCH_TOKENS // (size**2 * (2 if layout == "two" else 1) + 60))
    right, asked = 0, tasks.samples(seed, count, kind, layout, size)  # type: ignore[arg-type]
    for begin in range(0, count, per_batch):
        part = asked[begin : begin + per_batch]
        said = answers(model, processor, [sample.messages for sample in part])
        right += sum(text == sample.answer for text, sample in zip(said, part, strict=True))
    return {"kind": kind, "layout": layout, "size": size, "n": count, "right": right}


def reused(
    model: Any, processor: Any, cell: tuple[str, str, int], seed: int, count: int, ratio: float
) -> list[dict[str, Any]]:
    """Exact match in one cell behind each kind of earlier prompt."""
    kind, layout, size = cell
    rows = []
    for mismatch in tasks.MISMATCHES[layout]:
        right, seen = 0, {"reused": 0, "exact": 0, "miss": 0}
        for sample in tasks.samples(seed, count, kind, layout, size):  # type: ignore[arg-type]
            model.vlcache.clear()
            for earlier in sample.mismatched[mismatch]:
                answers(model, processor, [earlier])
            right += answers(model, processor, [sample.messages])[0] == sample.answer
            for image in model.vlcache.last_request.images:
                seen[image.kv] += 1
        row = {"kind": kind, "layout": layout, "size": size, "n": count, "right": right}
        rows.append({**row, "earlier": mismatch, "ratio": ratio, "images": seen})
    return rows


def total(rows: list[dict[str, Any]], key: str) -> dict[str, dict[str, float]]:
    """Sums over all rows with the same value of `key`."""
    found: dict[str, dict[str, float]] = {}
    for value in dict.fromkeys(str(row[key]) for row in rows):
        chosen = [row for row in rows if str(row[key]) == value]
        count, right = sum(row["n"] for row in chosen), sum(row["right"] for row in chosen)
        found[value] = {"n": count, "exact_match": round(right / count, 4)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=2000, help="questions of each kind, over all layouts and sizes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=None)
    parser.add_argument("--layouts", nargs="+", choices=tasks.LAYOUTS, default=list(tasks.LAYOUTS))
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--reuse", type=float, metavar="RATIO", help="through the cache, behind earlier prompts")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()

    processor = AutoProcessor.from_pretrained(args.folder)
    kinds = tuple(args.kinds or TRAINED.get(args.folder.name, KINDS))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        options: dict[str, Any] = {}
        if args.reuse is not None:
            import vlcache_hf  # noqa: F401

            options = {
                "attn_implementation": "vlcache",
                "vlcache_config": {
                    "cache_dir": cache,
                    "schedule": args.reuse,
                    "min_tokens": 1,
                    "lossy_multi_image": True,
                },
            }
        dtype = getattr(torch, args.dtype)
        model = AutoModelForImageTextToText.from_pretrained(args.folder, dtype=dtype, **options).to(args.device)
        began = time.perf_counter()
        todo = cells(kinds, tuple(args.sizes), tuple(args.layouts))
        for cell in todo:
            count = -(-args.count // sum(kind == cell[0] for kind, _, _ in todo))
            if args.reuse is None:
                new = [stock(model, processor, cell, args.seed, count)]
            else:
                new = reused(model, processor, cell, args.seed, count, args.reuse)
            for row in new:
                print(f"{row['right'] / row['n']:.3f}", row, flush=True)
            rows += new
    keys = ("kind", "layout", "size", *(("earlier",) if args.reuse is not None else ()))
    result = {
        "command": "python " + " ".join(sys.argv),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {args.device}, {args.dtype}",
        "seconds": round(time.perf_counter() - began),
        **{f"by_{key}": total(rows, key) for key in keys},
        "rows": rows,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
