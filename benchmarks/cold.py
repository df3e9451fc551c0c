"""What storing costs the first token: cold requests with a store against the stock model, paired, in one run.

    python benchmarks/cold.py --tokens 1024 3025 --rounds 15 --json benchmarks/results/cold_cpu.json

Each cold request has a namespace of its own, so that nothing is ever found, and its entries go to the disk in the
background, as they do by default. Stock and cold requests take turns, and change places every round. By default the
background writer is waited for between requests, outside the measured time, so that no request pays for the one before
it; `--back-to-back` does not wait. Random weights at a CPU-sized shape, fp32, as in `benchmarks/ttft.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vlcache_hf  # noqa: E402
from benchmarks.speed import header  # noqa: E402
from benchmarks.speed.workload import Workload, offline, seconds  # noqa: E402
from vlcache_hf import VLCache  # noqa: E402

LIMIT = 1.05


def measure(architecture: Any, tokens: int, rounds: int, wait: bool) -> dict[str, Any]:
    """Times of stock and cold requests at one image size."""
    stock = offline.build_model(architecture, "demo")
    times: dict[str, list[float]] = {"stock": [], "cold": []}
    with tempfile.TemporaryDirectory(prefix="vlcache-cold-") as folder:
        settings = {"cache_dir": folder, "schedule": 0.1, "write_behind": True, "min_tokens": 1}
        ours = vlcache_hf.attach(offline.build_model(architecture, "demo"), settings)
        workload = Workload(tokens)
        inputs = workload.prompt(0, workload.pixels(ours.config))
        for index in tqdm(range(-1, rounds), desc=f"{architecture} {tokens} tokens", disable=None):
            pair: dict[str, float] = {}
            for variant in ("stock", "cold") if index % 2 else ("cold", "stock"):
                if variant == "stock":
                    pair[variant] = seconds(stock, inputs)
                    continue
                pair[variant] = seconds(ours, inputs, VLCache(namespace=f"cold {index}"))
                record = ours.vlcache.last_request
                if record.images[0].kv != "miss" or not record.images[0].stored:
                    raise RuntimeError(f"not a cold request that is stored: {record}")
                if wait:
                    ours.vlcache.flush()
            if index >= 0:  # the first pair is for thread pools, kernel choice and the weights' fingerprint
                for variant, value in pair.items():
                    times[variant].append(value)
        ours.vlcache.flush()
        stats = ours.vlcache.stats()
    ratios = [cold / plain for cold, plain in zip(times["cold"], times["stock"])]
    return {
        "architecture": architecture,
        "image_tokens": tokens,
        "rounds": rounds,
        "entry_bytes": record.bytes_written,
        "stored": stats.entries_stored,
        "dropped": stats.dropped,
        "stock_s": round(statistics.median(times["stock"]), 4),
        "cold_s": round(statistics.median(times["cold"]), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "times": {variant: [round(value, 4) for value in values] for variant, values in times.items()},
    }


def table(results: list[dict[str, Any]]) -> str:
    head = f"{'model':<12}{'tokens':>7}{'stock':>10}{'cold':>10}{'cold / stock':>14}{'min':>7}{'max':>7}{'stored':>8}"
    lines = [head]
    for row in results:
        lines.append(
            f"{row['architecture']:<12}{row['image_tokens']:>7}{row['stock_s']:>8.3f} s{row['cold_s']:>8.3f} s"
            f"{row['ratio']:>14.3f}{row['ratio_min']:>7.3f}{row['ratio_max']:>7.3f}{row['stored']:>8}"
            + ("" if row["ratio"] <= LIMIT else f"  above {LIMIT}")
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", default=["qwen3_vl"], choices=offline.ARCHITECTURES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 3025], help="image tokens, square numbers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--back-to-back", action="store_true", help="do not wait for the writer between requests")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    results = [
        measure(architecture, tokens, args.rounds, not args.back_to_back)
        for architecture in args.architectures
        for tokens in args.tokens
    ]
    print(table(results))
    if args.json:
        header.write(args.json, header.report("benchmarks/cold.py", results))


if __name__ == "__main__":
    main()
