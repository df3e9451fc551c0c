"""Time to first token of every way to answer, in one run, as the paper's Tables 1, 2 and 6 have it.

    python benchmarks/ttft.py --tokens 1024 3025 5041 10000 20164 --json benchmarks/results/ttft_cpu.json
    python benchmarks/ttft.py --tokens 256 --images 8 --text 20 --json benchmarks/results/ttft_images.json
    python benchmarks/ttft.py --no-speed --pictures --memory --tokens 3025 --json benchmarks/results/ttft_picture.json

Rows: the stock model; a cold request that stores; the encoder's output alone reused ("w/o ViT"); static and dynamic
recompute; an exact hit; each from memory and from disk. Beside them, in the same run, what cannot be avoided (a stock
forward of the rows that are computed, over KV that is there already, and a copy of its bytes) and what people do by
hand (`copy.deepcopy` of a prefix cache). Variants take turns, so that a machine whose speed drifts slows all of them.
Random weights at a CPU-sized shape, fp32. The processor is part of `--pictures` only. The results go into
docs/performance.md by `python -m benchmarks.speed.report`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from . import header
from .measure import measure
from .memory import measure_memory
from .pictures import measure_pictures
from .plots import draw
from .tables import as_text
from .variants import TIERS
from .workload import TEXT_TOKENS, Workload, offline


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line.

    Args:
        arguments (sequence of `str`, *optional*): those of the process by default.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", default=["qwen3_vl"], choices=offline.ARCHITECTURES)
    parser.add_argument("--size", choices=("tiny", "demo"), default="demo", help="shape of the model")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 3025], help="image tokens, square numbers")
    parser.add_argument("--images", type=int, default=1, help="images in the prompt")
    parser.add_argument("--text", type=int, default=TEXT_TOKENS, help="text tokens in the prompt")
    parser.add_argument("--tiers", nargs="+", default=list(TIERS), choices=TIERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-seconds", type=float, default=240.0, help="per variant and size, warm-up included")
    parser.add_argument("--memory", action="store_true", help="peak memory of a request, too")
    parser.add_argument("--pictures", action="store_true", help="end to end with the processor, too")
    parser.add_argument("--no-speed", action="store_true", help="only what the two options before ask for")
    parser.add_argument("--json", type=Path, help="write the results here, and the curves beside them")
    args = parser.parse_args(arguments)
    results, pictures, memory = [], [], []
    for architecture in args.architectures:
        earlier: dict[str, tuple[int, float]] = {}
        for tokens in sorted(args.tokens):
            if not args.no_speed:
                workload = Workload(tokens, args.images, args.text)
                results.append(
                    measure(
                        architecture, args.size, workload, args.rounds, args.max_seconds, earlier, tuple(args.tiers)
                    )
                )
            if args.pictures:
                pictures += measure_pictures(architecture, args.size, tokens, args.rounds)
            if args.memory:
                memory.append(measure_memory(architecture, args.size, tokens))
            report = header.report("benchmarks/ttft.py", results, pictures=pictures, memory=memory)
            if args.json:  # after every size: the largest take long
                header.write(args.json, report)
    print(as_text(report))
    if args.json:
        draw(results, args.json.with_suffix(".png"))
