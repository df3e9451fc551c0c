"""Time to first token from `generate()` on: the stock model against cold, reused and exact requests, in one run.

    python benchmarks/ttft.py --tokens 1024 3025 --json benchmarks/results/ttft_cpu.json

The models have random weights (time does not depend on them) at a CPU-sized shape, fp32. Variants are interleaved, so
that a machine whose speed drifts slows all of them; medians and the spread of the ratios are reported. The processor
is not part of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import offline  # noqa: E402
import vlcache_hf  # noqa: E402
from vlcache_hf import VLCache  # noqa: E402

TEXT_TOKENS = 20


def prompt(tokens: int, seed: int, pixels: torch.Tensor, before: int) -> dict[str, torch.Tensor]:
    """An image of `tokens` tokens between `before` and `TEXT_TOKENS - before` random text tokens."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(1000, 100_000, (TEXT_TOKENS,), generator=generator).tolist()
    image = [offline.VISION_START, *[offline.IMAGE_PAD] * tokens, offline.VISION_END]
    ids = torch.tensor([text[:before] + image + text[before:]])
    side = 2 * math.isqrt(tokens)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == offline.IMAGE_PAD).int(),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, side, side]]),
    }


def seconds(model: Any, inputs: dict[str, torch.Tensor], cache: VLCache | None = None) -> float:
    extra = {} if cache is None else {"cache": cache}
    start = time.perf_counter()
    model.generate(**inputs, max_new_tokens=1, do_sample=False, **extra)
    return time.perf_counter() - start


def measure(architecture: Any, tokens: int, rounds: int, ratios: list[float]) -> dict[str, Any]:
    """Medians of all variants at one image size."""
    stock = offline.build_model(architecture, "demo")
    with tempfile.TemporaryDirectory(prefix="vlcache-ttft-") as folder:
        ours = vlcache_hf.attach(offline.build_model(architecture, "demo"), {"cache_dir": folder, "schedule": 0.1})
        vision = ours.config.vision_config
        patch = 3 * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn(4 * tokens, patch, generator=torch.Generator().manual_seed(0))
        known = prompt(tokens, 0, pixels, before=TEXT_TOKENS // 2)
        times: dict[str, list[float]] = {}

        def note(variant: str, value: float, expected: str | None) -> None:
            kind = None if expected is None else ours.vlcache.last_request.images[0].kv
            if kind != expected:
                raise RuntimeError(f"{variant}: expected {expected}, got {kind}")
            times.setdefault(variant, []).append(value)

        for index in tqdm(range(-1, rounds), desc=f"{architecture} {tokens} tokens", disable=None):
            if index < 0:  # thread pools, kernel choice, the weights' fingerprint
                seconds(stock, known)
                seconds(ours, known)
                continue
            note("stock", seconds(stock, known), None)
            note("exact", seconds(ours, known), "exact")
            for ratio in ratios:
                other = prompt(tokens, 100 + index * len(ratios) + ratios.index(ratio), pixels, TEXT_TOKENS // 2)
                note(f"reused r={ratio:g}", seconds(ours, other, VLCache(schedule=ratio)), "reused")
            cold = VLCache(namespace=f"cold {index}")
            note("cold", seconds(ours, known, cold), "miss")
        entry = ours.vlcache.last_request.bytes_written
    return {
        "architecture": architecture,
        "image_tokens": tokens,
        "text_tokens": TEXT_TOKENS,
        "rounds": rounds,
        "entry_bytes": entry,
        "variants": {name: summary(times["stock"], values) for name, values in times.items()},
    }


def summary(stock: list[float], values: list[float]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(stock, values)]
    return {
        "median_s": round(statistics.median(values), 4),
        "speedup": round(statistics.median(ratios), 2),
        "speedup_min": round(min(ratios), 2),
        "speedup_max": round(max(ratios), 2),
    }


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"{'model':<12}{'tokens':>7}  {'variant':<15}{'TTFT':>9}{'speed-up':>10}{'min':>7}{'max':>7}"]
    for result in results:
        for name, row in result["variants"].items():
            lines.append(
                f"{result['architecture']:<12}{result['image_tokens']:>7}  {name:<15}{row['median_s']:>7.3f} s"
                f"{row['speedup']:>9.2f}x{row['speedup_min']:>7.2f}{row['speedup_max']:>7.2f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", default=["qwen3_vl"], choices=offline.ARCHITECTURES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 3025], help="image tokens, square numbers")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.0, 0.035, 0.1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    results = [
        measure(architecture, tokens, args.rounds, args.ratios)
        for architecture in args.architectures
        for tokens in args.tokens
    ]
    print(table(results))
    if args.json:
        report = {
            "command": "python benchmarks/ttft.py " + " ".join(sys.argv[1:]),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, fp32, CPU",
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "vlcache_hf": vlcache_hf.__version__,
            },
            "results": results,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
