"""What an image cache changes, on a CPU, in about two minutes: `python examples/demo.py` (or `make demo`).

First a tiny trained model answers questions about digits and shapes. Then a larger Qwen3-VL with RANDOM weights is
asked about real photographs and documents: it understands nothing, so its answers are gibberish and not shown; what is
real is the work that goes into them. Every request goes to the stock model and to the same checkpoint loaded with
attn_implementation="vlcache". Exit status 1 if a hit does not happen or a lossless answer is not the stock model's.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

import demo_answers
import offline
from vlcache_hf import VLCacheConfig

DOCUMENTS = Path(__file__).resolve().parent.parent / ".demo" / "documents"


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
    Request("What is this?", expect="miss"),
    Request("What is this?", expect="exact"),
    Request("What is blue?", expect="exact"),
    Request("Answer.", expect="reused", before="Any text in it?"),
)
AFTER_RESTART = (
    Request("Who made it?", expect="exact"),
    Request("Answer.", expect="reused", before="Be brief. When?"),
)


@dataclass
class Answer:
    """What one model made of one request."""

    tokens: list[int]
    first_logits: torch.Tensor
    milliseconds: float

    def likeness(self, other: Answer) -> float:
        """Correlation of the logits of the first token: 1.0 is the same prediction."""
        return torch.corrcoef(torch.stack([self.first_logits, other.first_logits]))[0, 1].item()


@dataclass
class Tally:
    """Results over all requests of one process."""

    times: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    reused: list[float] = field(default_factory=list)
    other_image: list[float] = field(default_factory=list)
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


def answer(model: Any, inputs: Any, new_tokens: int) -> Answer:
    """Greedy answer of one model, timed to the first token."""
    timer = FirstTokenTimer()
    output = model.generate(
        **inputs, max_new_tokens=new_tokens, streamer=timer, return_dict_in_generate=True, output_logits=True
    )
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return Answer(tokens, output.logits[0][0].float(), 1000 * timer.seconds)


def pictures(quick: bool) -> dict[str, Image.Image]:
    """A few photographs and documents, from 250 to 1,250 visual tokens each."""
    photographs, documents = offline.photographs(), offline.documents(DOCUMENTS)
    chosen = {"astronaut": photographs["astronaut"], "galaxies": photographs["hubble_deep_field"]}
    if quick:
        return chosen
    # The documents of `make demo`; without them, the scan that comes with scikit-image.
    names = {"borderless-1": "invoice", "borderless": "report"} if "borderless" in documents else {"page": "page"}
    return chosen | {shown: documents[name] for name, shown in names.items()}


def serve(checkpoint: Path, cache: Path, requests: tuple[Request, ...], args: argparse.Namespace) -> Tally:
    """Load the stock model and ours, ask both everything, and print a row for each request."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    stock: Any = AutoModelForImageTextToText.from_pretrained(checkpoint)
    model: Any = AutoModelForImageTextToText.from_pretrained(
        checkpoint,
        attn_implementation="vlcache",
        vlcache_config=VLCacheConfig(cache_dir=cache, schedule=args.schedule, min_tokens=1),
    )
    # The first call of a process pays for thread pools and kernel choice. That is no part of the comparison; neither
    # is this picture part of what follows.
    blank = offline.ask(processor, Image.new("RGB", (320, 320), "grey"), "Warm up.")
    for either in (stock, model):
        answer(either, blank, 2)

    print(f"{'':<58}{'first token after':>18}    as stock?")
    print(f"{'image':<10}{'tokens':>6}  {'prompt':<26}{'KV':<7}{'ViT':<9}{'stock':>7}{'vlcache':>9}    answer logits")
    print("-" * 88)
    tally = Tally()
    seen: dict[Request, list[Answer]] = {}
    for name, picture in pictures(args.quick).items():
        for request in requests:
            inputs = offline.ask(processor, picture, request.question, before=request.before)
            theirs = answer(stock, inputs, args.new_tokens)
            ours = answer(model, inputs, args.new_tokens)
            (record,) = model.vlcache.last_request.images

            same, likeness = ours.tokens == theirs.tokens, ours.likeness(theirs)
            tally.other_image += [theirs.likeness(earlier) for earlier in seen.setdefault(request, [])]
            seen[request].append(theirs)
            tally.times.setdefault(record.kv, []).append((theirs.milliseconds, ours.milliseconds))
            if record.kv != request.expect:
                tally.problems.append(f"{name}, {request.shown}: expected {request.expect}, got {record.kv}")
            if record.kv == "reused":
                tally.reused.append(likeness)
            elif not same:
                tally.problems.append(f"{name}, {request.shown}: {record.kv}, but the answer differs from stock")
            times = f"{theirs.milliseconds:>4.0f} ms{ours.milliseconds:>6.0f} ms"
            verdict = f"{'yes' if same else 'no':<6} {likeness:.3f}"
            prompt = f"{name:<10}{record.tokens:>6}  {request.shown:<26}"
            print(f"{prompt}{record.kv:<7}{record.encoder:<9}{times}    {verdict}", flush=True)
    print("\nprint(model.vlcache.last_request):")
    print(model.vlcache.last_request)
    print("\nprint(model.vlcache.stats()):")
    print(model.vlcache.stats())
    return tally


def conclude(tally: Tally) -> int:
    """Print the medians and what went wrong. Returns the exit status."""
    print()
    for kind, pairs in tally.times.items():
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        print(f"{kind + ':':<7} first token {ratio:.1f} times as fast as stock (median of {len(pairs)})")
    if tally.reused:
        ours, other = statistics.median(tally.reused), statistics.median(tally.other_image)
        print(
            f"Reused is the lossy case: its logits correlate with stock's at {ours:.2f}; stock's own on two different"
        )
        print(f"images at {other:.2f}. Random weights have no clear favourite word, so the words may still differ.")
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
    parser.add_argument("--quick", action="store_true", help="tiny model, two photographs: only whether it works")
    parser.add_argument("--restarted", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

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
        print(
            f"{cache} is left from an earlier run: nothing would be a first sight. Remove it first.", file=sys.stderr
        )
        return 2

    start = time.perf_counter()
    print((__doc__ or "").partition("\n\n")[2])
    offline.save_checkpoint(checkpoint, args.architecture, "tiny" if args.quick else "demo")

    heading("1. Answers")
    status = demo_answers.show(work / "answers")

    heading("2. Speed, from an empty cache")
    status |= conclude(serve(checkpoint, cache, FIRST_SIGHT, args))

    heading("3. A new process, the same cache folder")
    command = [sys.executable, __file__, "--restarted", "--work-dir", str(work), "--architecture", args.architecture]
    command += ["--schedule", str(args.schedule), "--new-tokens", str(args.new_tokens)]
    command += ["--quick"] if args.quick else []
    status |= subprocess.run(command, check=False).returncode

    files = [path for path in cache.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 2**20
    print(f"\nThe cache holds {len(files)} files, {size:.0f} MiB. The demo took {time.perf_counter() - start:.0f} s.")
    print("FAILED, see above." if status else "OK: every hit happened, every lossless answer is the stock model's.")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
