"""What an image cache changes, on a CPU, in about two minutes: `python examples/demo.py` (or `make demo`).

A Qwen3-VL of 205 million **random** weights answers questions about real photographs and documents. It cannot see
anything, so its answers are gibberish; what is real is the work it does for them. Every request goes to the stock model
and to the same checkpoint loaded with `attn_implementation="vlcache"`, first with an empty cache, then again after a
restart in a new process. Exit status 1 if a lossless answer differs from the stock model's, or a hit did not happen.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import offline
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from vlcache_hf import VLCacheConfig

DOCUMENTS = Path(__file__).resolve().parent.parent / ".demo" / "documents"
WIDTH = 96


@dataclass(frozen=True)
class Request:
    """One question, and what the cache should make of it."""

    question: str
    expect: str
    before: str = ""

    @property
    def shown(self) -> str:
        return f"{self.before} [image]" if self.before else f"[image] {self.question}"


# With the image in front, all that its KV depends on is the system turn: any question after it is a lossless hit. Text
# in front of the image is another context, and the paper's method takes over.
FIRST_SIGHT = (
    Request("What is shown here?", expect="miss"),
    Request("What is shown here?", expect="exact"),
    Request("Count the blue things.", expect="exact"),
    Request("Answer.", expect="reused", before="Be brief. Is there text?"),
)
AFTER_RESTART = (
    Request("Where was this made?", expect="exact"),
    Request("Answer.", expect="reused", before="In French: which season?"),
)


@dataclass
class Tally:
    """Results over all requests of one process."""

    times: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    reused_same: list[bool] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class FirstTokenTimer(BaseStreamer):
    """Notes when the first token comes out; `generate` hands over the prompt first, then each token."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.calls = 0
        self.seconds = float("nan")

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.seconds = time.perf_counter() - self.start

    def end(self) -> None:
        pass


def answer(model: Any, inputs: Any, new_tokens: int) -> tuple[list[int], float]:
    """Greedy token ids of the answer, and the milliseconds until the first of them."""
    timer = FirstTokenTimer()
    output = model.generate(**inputs, max_new_tokens=new_tokens, streamer=timer)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), 1000 * timer.seconds


def pictures(quick: bool) -> dict[str, Image.Image]:
    """A few photographs and documents, from 250 to 1,250 visual tokens each."""
    photographs, documents = offline.photographs(), offline.documents(DOCUMENTS)
    chosen = {"astronaut": photographs["astronaut"], "galaxies": photographs["hubble_deep_field"]}
    # The documents of `make demo`; without them, the scan that comes with scikit-image.
    found = [(shown, documents[name]) for shown, name in (("invoice", "borderless-1"), ("report", "borderless"))
             if name in documents]
    chosen.update(found or [("page", documents["page"])])
    return dict(list(chosen.items())[:1]) if quick else chosen


def serve(checkpoint: Path, cache: Path, requests: tuple[Request, ...], args: argparse.Namespace) -> Tally:
    """Load the stock model and ours, ask both everything, and print a row for each request."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    stock = AutoModelForImageTextToText.from_pretrained(checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(
        checkpoint,
        attn_implementation="vlcache",
        vlcache_config=VLCacheConfig(cache_dir=cache, schedule=args.schedule),
    )
    # The first call of a process pays for thread pools and kernel choice. That is no part of the comparison; neither is
    # this picture part of what follows.
    blank = offline.ask(processor, Image.new("RGB", (320, 320), "grey"), "Warm up.")
    for either in (stock, model):
        answer(either, blank, 2)

    print(f"{'image':<10}{'tokens':>7}  {'question':<35}{'KV':<8}{'ViT':<8}{'stock':>8}{'vlcache':>9}   same answer")
    print("-" * WIDTH)
    tally = Tally()
    for name, picture in pictures(args.quick).items():
        for request in requests:
            inputs = offline.ask(processor, picture, request.question, before=request.before)
            expected, stock_ms = answer(stock, inputs, args.new_tokens)
            got, our_ms = answer(model, inputs, args.new_tokens)
            (record,) = model.vlcache.last_request.images
            same = got == expected
            if record.kv != request.expect:
                tally.problems.append(f"{name}, {request.shown!r}: expected {request.expect}, got {record.kv}")
            if record.kv == "reused":
                tally.reused_same.append(same)
            elif not same:
                tally.problems.append(f"{name}, {request.shown!r}: a lossless answer differs from the stock model's")
            tally.times.setdefault(record.kv, []).append((stock_ms, our_ms))
            shown = request.shown if len(request.shown) <= 34 else request.shown[:31] + "..."
            print(
                f"{name:<10}{record.tokens:>7}  {shown:<35}{record.kv:<8}{record.encoder:<8}"
                f"{stock_ms:>5.0f} ms{our_ms:>6.0f} ms   {'yes' if same else 'no'}",
                flush=True,
            )
    print("\nThe last request, as `print(model.vlcache.last_request)` shows it:")
    print(model.vlcache.last_request)
    print("\nAll requests of this process, `print(model.vlcache.stats())`:")
    print(model.vlcache.stats())
    return tally


def conclude(tally: Tally) -> int:
    """Print the medians and what went wrong. Returns the exit status."""
    print()
    for kind, pairs in tally.times.items():
        ratio = statistics.median(stock / ours for stock, ours in pairs)
        print(f"{kind:<7} first token {ratio:4.1f} times as fast as stock (median of {len(pairs)})")
    if tally.reused_same:
        same, total = sum(tally.reused_same), len(tally.reused_same)
        print(f"reused is lossy: {same} of {total} answers of these random weights are the stock model's, word for word")
    for problem in tally.problems:
        print(f"FAILED: {problem}")
    return 1 if tally.problems else 0


def heading(text: str) -> None:
    print(f"\n{text}\n{'=' * len(text)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=offline.ARCHITECTURES, default="qwen3_vl")
    parser.add_argument("--schedule", type=float, default=0.1, help="share of a reused image's tokens recomputed")
    parser.add_argument("--new-tokens", type=int, default=6, help="length of the answers")
    parser.add_argument("--work-dir", type=Path, help="keep checkpoint and cache here (default: a temporary folder)")
    parser.add_argument("--quick", action="store_true", help="tiny model, one picture: only whether it works")
    parser.add_argument("--restarted", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

    warnings.simplefilter("ignore", UserWarning)
    logging.disable_progress_bar()
    if args.work_dir is None:
        with tempfile.TemporaryDirectory(prefix="vlcache-demo-") as folder:
            return run(Path(folder), args)
    return run(args.work_dir, args)


def run(work: Path, args: argparse.Namespace) -> int:
    """Both acts of the demo; the second runs in a process of its own."""
    checkpoint, cache = work / "checkpoint", work / "cache"
    if args.restarted:
        return conclude(serve(checkpoint, cache, AFTER_RESTART, args))
    if cache.exists():
        print(f"{cache} is left from an earlier run, so nothing would be a first sight. Remove it or choose another "
              "--work-dir.", file=sys.stderr)
        return 2

    print(__doc__.partition("\n\n")[2])
    print(f"Building the {args.architecture} checkpoint ...", flush=True)
    offline.save_checkpoint(checkpoint, args.architecture, "tiny" if args.quick else "demo")

    heading("1. An empty cache")
    status = conclude(serve(checkpoint, cache, FIRST_SIGHT, args))

    heading("2. A new process, the same cache folder")
    command = [sys.executable, __file__, "--restarted", "--work-dir", str(work), *forwarded(args)]
    status |= subprocess.run(command, check=False).returncode

    files = [path for path in cache.rglob("*") if path.is_file()]
    print(f"\nOn disk: {len(files)} files, {sum(path.stat().st_size for path in files) / 2**20:.0f} MiB in {cache}")
    print("OK: every hit happened, every lossless answer equals the stock model's." if not status else "FAILED, see above.")
    return 1 if status else 0


def forwarded(args: argparse.Namespace) -> list[str]:
    """The options of this run, for the second process."""
    options = ["--architecture", args.architecture, "--schedule", str(args.schedule)]
    options += ["--new-tokens", str(args.new_tokens)]
    return options + (["--quick"] if args.quick else [])


if __name__ == "__main__":
    sys.exit(main())
