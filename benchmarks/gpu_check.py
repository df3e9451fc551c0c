"""What needs a GPU to be known, in one run of a few minutes: is it equal to stock, and how fast is it.

    python -m benchmarks.gpu_check --minutes 8 --json benchmarks/results/gpu.json

Run it from the root of the checkout. The models have random weights, made on the device, at the shapes of the released
Qwen3-VL-8B, Qwen2.5-VL-7B and Qwen3-VL-30B-A3B (in bf16 the last takes 58 GiB). Nothing is fetched. In this order:

1. `kernels`: every segment attention that is there (flash-attn 2, torch's varlen, SDPA) against attention written out
   in fp32 and against SDPA segments, on random segments with grouped queries, behind which the keys are NaN.
2. `equality`: the real widths with 4 layers, in bf16 and fp32. Cold requests, exact hits from memory and from disk,
   r = 1 and encoder-only requests against stock: logits of every step and greedy tokens.
3. `timing`: time to first token of the whole models in bf16 with 20 text tokens: stock, encoder only, dynamic (the
   shipped schedule), static 0.1 and exact, from memory and from disk (page cache); medians of interleaved rounds, and
   peak memory. Every request is checked to be of its kind.

Parts 2 and 3 of the first model come before those of the others. No work is started that would not end within
`--minutes`; what was left out is printed. A piece that breaks is reported and the others go on. The exit status is 1
if something was not equal, or broke, or if there was time for nothing. `--json` is written after every piece of work.
The cache takes up to 15 GB in `$TMPDIR`, and twice as much memory. `--dry-run` runs the same code in fp32 on a CPU
with tiny models.

For a machine without a package index that has torch and an older Transformers: where there is an index,
`benchmarks/gpu_wheels.sh 3.12 wheels` downloads what it lacks, for that Python and Linux on x86-64. Then there:

    python -m pip install --no-index --no-deps --upgrade --target site wheels/*.whl
    PYTHONPATH=site python -m benchmarks.gpu_check --json gpu.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import vlcache_hf
from benchmarks.gpu import devices, equality, kernels, models, timing
from benchmarks.gpu.budget import Budget

PARTS = ("kernels", "equality", "timing")
BUILDING_S = 20.0
SECONDS_PER_TOKEN = 3e-3  # of all rows at one size


@dataclass(frozen=True)
class Setting:
    """How large everything is.

    Args:
        device (`torch.device`): where it runs.
        shapes (`tuple[Shape, ...]`): the models, in order of importance.
        dtypes (`tuple[torch.dtype, ...]`): of parts 1 and 2; the first one is that of part 3.
        longest (`int`): keys of the longest case of part 1.
        draws (`int`): its random cases for each model.
        equality_tokens (`int`): image tokens of part 2.
        new_tokens (`int`): greedy tokens of part 2.
        tokens (`tuple[int, ...]`): image tokens of part 3, in order of importance.
        rounds (`int`): rounds of part 3.
    """

    device: torch.device
    shapes: tuple[models.Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    longest: int
    draws: int
    equality_tokens: int
    new_tokens: int
    tokens: tuple[int, ...]
    rounds: int


class Check:
    """One run.

    Args:
        setting (`Setting`): how large everything is.
        budget (`Budget`): its time.
        path (`Path`, *optional*): where the results are written.
        command (`str`): what was called.
    """

    def __init__(self, setting: Setting, budget: Budget, path: Path | None, command: str) -> None:
        self.setting, self.budget, self.path, self.command = setting, budget, path, command
        self.kernels: list[dict[str, Any]] = []
        self.missing: dict[str, str] = {}
        self.equality: list[dict[str, Any]] = []
        self.timing: list[dict[str, Any]] = []

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Rows that should be equal and are not."""
        return [row for row in self.kernels + self.equality if row["ok"] is False]

    def run(self, parts: Sequence[str]) -> int:
        """All parts, in order of importance; returns the exit status.

        Args:
            parts (sequence of `str`): which of `PARTS`.
        """
        first, *others = self.setting.shapes
        if "kernels" in parts:
            self._check_kernels()
        for shapes in ([first], others):
            if "equality" in parts:
                for shape in shapes:
                    self._check_equality(shape)
            if "timing" in parts:
                for shape in shapes:
                    self._measure(shape)
        print("\n" + self.report())
        self._write()
        return 1 if self.failed or self.budget.errors or not self.budget.seconds else 0

    def _check_kernels(self) -> None:
        setting = self.setting
        for dtype in setting.dtypes:
            work = f"kernels, {_name(dtype)}"
            if not self.budget.allows(work, BUILDING_S):
                continue
            with self.budget.guarded(work):
                heads = [
                    kernels.Heads(shape.text["num_attention_heads"], shape.text["num_key_value_heads"], shape.head_dim)
                    for shape in setting.shapes
                ]
                self.missing |= kernels.problems(setting.device, dtype, heads[0].dim)
                rows = kernels.check(setting.device, dtype, heads, setting.longest, setting.draws)
                self.kernels += [{"dtype": _name(dtype), **row} for row in rows]
                print(kernels.table(rows), flush=True)
            self._finish_work()

    def _check_equality(self, shape: models.Shape) -> None:
        setting = self.setting
        for dtype in setting.dtypes:
            work = f"equality, {shape.name}, {_name(dtype)}"
            if not self.budget.allows(work, 2 * BUILDING_S):
                continue
            with self.budget.guarded(work):
                rows = equality.check(
                    shape.shallow(4), setting.device, dtype, setting.equality_tokens, setting.new_tokens
                )
                self.equality += rows
                print(equality.table(rows), flush=True)
            self._finish_work()

    def _measure(self, shape: models.Shape) -> None:
        setting = self.setting
        work = f"timing, {shape.name}"
        if not self.budget.allows(work, BUILDING_S + self._needs(min(setting.tokens))):
            return
        with self.budget.guarded(work):
            with timing.open_pair(shape, setting.device, setting.dtypes[0]) as pair:
                for tokens in setting.tokens:
                    self._measure_size(pair, tokens, f"{work}, {tokens} tokens")
        self._finish_work()
        results = [result for result in self.timing if result["model"] == shape.name]
        if results:
            print(timing.table(results), flush=True)

    def _measure_size(self, pair: timing.Pair, tokens: int, work: str) -> None:
        if not self.budget.allows(work, self._needs(tokens)):
            return
        with self.budget.guarded(work):
            self.timing.append(
                timing.measure(pair, tokens, self.setting.rounds, lambda: self.budget.left() > self._needs(tokens) / 4)
            )
        self._finish_work()

    def _needs(self, tokens: int) -> float:
        return 5 + SECONDS_PER_TOKEN * tokens

    def _finish_work(self) -> None:
        devices.release(self.setting.device)
        self._write()

    def report(self) -> str:
        """What came out, in words."""
        lines = [f"{len(self.kernels) + len(self.equality)} comparisons, {len(self.failed)} FAILED"]
        lines += [f"FAILED: {row}" for row in self.failed]
        lines += [f"BROKE: {work}: {error}" for work, error in self.budget.errors.items()]
        lines += [f"not there: {problem}" for problem in self.missing.values()]
        lines += [f"left out: {work}" for work in self.budget.left_out]
        return "\n".join(lines)

    def _write(self) -> None:
        if self.path is None:
            return
        report = {
            "command": self.command,
            "machine": devices.describe(self.setting.device),
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "vlcache_hf": vlcache_hf.__version__,
            },
            "failed": len(self.failed),
            "errors": self.budget.errors,
            "left_out": self.budget.left_out,
            "missing": self.missing,
            "seconds": self.budget.seconds,
            "kernels": self.kernels,
            "equality": self.equality,
            "timing": self.timing,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(report, indent=2) + "\n")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="start no work that would not end within these")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--models", type=int, default=3, choices=(1, 2, 3), help="the first so many of the three")
    parser.add_argument("--tokens", nargs="+", type=int, help="image tokens of part 3, square numbers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true", help="tiny models in fp32 on the CPU")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args(argv)
    dtypes: tuple[torch.dtype, ...]
    if args.dry_run:
        device, shapes, dtypes = torch.device("cpu"), models.TINY, (torch.float32,)
        sizes: dict[str, Any] = {"longest": 200, "draws": 2, "equality_tokens": 64, "new_tokens": 4}
        tokens = args.tokens or [64, 144]
    elif torch.cuda.is_available():
        device, shapes, dtypes = torch.device("cuda"), models.REAL, (torch.bfloat16, torch.float32)
        sizes = {"longest": 20_000, "draws": 6, "equality_tokens": 1024, "new_tokens": 8}
        tokens = args.tokens or [1024, 5041, 19_881, 3025, 10_000]
    else:
        parser.error("there is no CUDA device; `--dry-run` runs tiny models on the CPU")
    setting = Setting(
        device=device, shapes=shapes[: args.models], dtypes=dtypes, tokens=tuple(tokens), rounds=args.rounds, **sizes
    )
    words = sys.argv[1:] if argv is None else argv
    command = " ".join(["python -m benchmarks.gpu_check", *words])
    print(
        f"{devices.describe(device)}, torch {torch.__version__}, transformers {transformers.__version__}", flush=True
    )
    return Check(setting, Budget(args.minutes), args.json, command).run(args.parts)


if __name__ == "__main__":
    sys.exit(main())
