"""Part 1: every segment attention that is there against attention written out, on random segments."""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.devices import synchronize
from vlcache_hf.attention.segments import BACKENDS, SegmentAttention, available, resolve
from vlcache_hf.plan import Segment

PAGE = 256  # fits every backend
# Of |a - b| / (1 + |b|): weights and outputs are rounded to the dtype, in bfloat16 by up to one part in 256 each.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
CALLS = 5


@dataclass(frozen=True)
class Heads:
    """Heads of a model: `query` query heads over `kv` key heads of size `dim`."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Case:
    """Segments and their tensors.

    Args:
        query (`torch.Tensor`): `[1, heads, n, head_dim]`.
        keys (`torch.Tensor`), values (`torch.Tensor`): `[batch, pool_len, kv_heads, head_dim]`; NaN where no
            segment looks.
        segments (`tuple[Segment, ...]`): the segments.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    segments: tuple[Segment, ...]

    def run(self, backend: SegmentAttention, scratch: dict[Hashable, Any]) -> torch.Tensor:
        scaling = self.query.shape[-1] ** -0.5
        return backend(self.query, self.keys, self.values, self.segments, scaling, scratch)

    def expected(self) -> torch.Tensor:
        """The answer in fp32, written out: `[1, n, heads, head_dim]`."""
        query, keys, values = (tensor.float() for tensor in (self.query[0], self.keys, self.values))
        groups, dim = query.shape[0] // keys.shape[2], query.shape[-1]
        parts, start = [], 0
        for segment in self.segments:
            rows = query[:, start : start + segment.length].unflatten(0, (-1, groups))  # [kv_heads, groups, n, dim]
            start += segment.length
            seen = keys[segment.row, : segment.kv_len].transpose(0, 1)[:, None]
            scores = rows @ seen.transpose(-1, -2) * dim**-0.5
            hidden = torch.ones(segment.length, segment.kv_len, dtype=torch.bool, device=query.device)
            hidden = hidden.triu(segment.kv_len - segment.length + 1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1) if segment.kv_len else scores
            parts.append((weights @ values[segment.row, : segment.kv_len].transpose(0, 1)[:, None]).flatten(0, 1))
        return torch.cat(parts, dim=1).transpose(0, 1)[None]


def named_segments(longest: int) -> dict[str, tuple[Segment, ...]]:
    """Shapes that prefills have.

    Args:
        longest (`int`): keys of the longest one.
    """
    head, image = 10, longest - 20
    tenth = head + image // 10
    return {
        "stock's causal": (Segment(0, longest // 8, longest // 8),),
        "text around a reused image": (Segment(0, tenth, tenth), Segment(0, 10, longest)),
        "two images, the first lossy": (
            Segment(0, head, head),
            Segment(0, longest // 50, longest // 2 + longest // 50),
            Segment(0, 1, longest),
        ),
        "padded batch": (
            Segment(0, 1, 0),
            Segment(0, 1, 0),
            Segment(0, longest // 20, longest // 10),
            Segment(1, longest // 20, longest // 20),
            Segment(1, 1, longest // 4),
        ),
    }


def random_segments(seed: int, longest: int) -> tuple[Segment, ...]:
    """Up to three rows of up to four segments that see at most `longest` keys, and padding that sees none."""
    chance = random.Random(seed)
    segments = [Segment(0, 1, chance.randint(1, longest))]
    for row in range(chance.randint(1, 3)):
        segments += [Segment(row, 1, 0)] * chance.randint(0, 2)
        for _ in range(chance.randint(1, 4)):
            kv_len = chance.randint(1, longest)
            segments.append(Segment(row, chance.choice([1, chance.randint(1, kv_len), kv_len]), kv_len))
    chance.shuffle(segments)
    return tuple(segments)


def build_case(
    segments: Sequence[Segment], heads: Heads, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Case:
    """Random queries, keys and values for segments."""
    generator = torch.Generator(device).manual_seed(seed)
    batch = 1 + max(segment.row for segment in segments)
    visible = [max([s.kv_len for s in segments if s.row == row], default=0) for row in range(batch)]
    pool_len = (max(visible) // PAGE + 1) * PAGE

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    keys, values = (normal(batch, pool_len, heads.kv, heads.dim) for _ in range(2))
    for row, length in enumerate(visible):
        keys[row, length:] = values[row, length:] = torch.nan
    query = normal(1, heads.query, sum(segment.length for segment in segments), heads.dim)
    return Case(query, keys, values, tuple(segments))


def measure_case(name: str, case: Case, heads: Heads, backends: Sequence[str]) -> list[dict[str, Any]]:
    """One row per backend: its largest error against the answer in fp32, and how far it is from SDPA segments."""
    device, dtype = case.query.device, case.query.dtype
    expected, tolerance = case.expected(), TOLERANCE[dtype]
    sdpa = case.run(resolve("sdpa", device, dtype, heads.dim), {})
    rows = []
    for backend_name in backends:
        backend = resolve(backend_name, device, dtype, heads.dim)
        scratch: dict[Hashable, Any] = {}
        output = case.run(backend, scratch)
        error, from_sdpa = _difference(output, expected), _difference(output, sdpa)
        rows.append(
            {
                "case": name,
                "heads": f"{heads.query}/{heads.kv} x {heads.dim}",
                "backend": backend_name,
                "error": error,
                "from_sdpa": from_sdpa,
                "tolerance": tolerance,
                "ms": round(1000 * _fastest(case, backend, scratch), 3),
                "ok": error <= tolerance and from_sdpa <= tolerance,  # not so for NaN
            }
        )
    return rows


def _difference(output: torch.Tensor, other: torch.Tensor) -> float:
    return float(((output.float() - other.float()).abs() / (1 + other.float().abs())).max())


def _fastest(case: Case, backend: SegmentAttention, scratch: dict[Hashable, Any]) -> float:
    times = []
    for _ in range(CALLS):
        synchronize(case.query.device)
        start = time.perf_counter()
        case.run(backend, scratch)
        synchronize(case.query.device)
        times.append(time.perf_counter() - start)
    return min(times)


@torch.no_grad()
def check(
    device: torch.device, dtype: torch.dtype, all_heads: Sequence[Heads], longest: int, draws: int
) -> list[dict[str, Any]]:
    """All cases.

    Args:
        device (`torch.device`): where it runs.
        dtype (`torch.dtype`): of queries, keys and values.
        all_heads (sequence of `Heads`): of the models.
        longest (`int`): keys of the longest case; random ones have up to a tenth of them.
        draws (`int`): random cases for each of `all_heads`.

    Returns:
        `list[dict]`: a row per case and backend.
    """
    rows = []
    for heads in all_heads:
        backends = available(device, dtype, heads.dim)
        cases = named_segments(longest)
        cases |= {f"random {seed}": random_segments(seed, max(longest // 10, 4)) for seed in range(draws)}
        for name, segments in cases.items():
            rows += measure_case(name, build_case(segments, heads, device, dtype), heads, backends)
    return rows


def problems(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, str]:
    """Why a backend is not among those that are checked, by its name."""
    missing = {}
    for name in BACKENDS:
        try:
            resolve(name, device, dtype, head_dim)
        except ValueError as error:
            missing[name] = str(error)
    return missing


def table(rows: list[dict[str, Any]]) -> str:
    """The worst of each backend and head shape, and every row that failed."""
    lines = [f"{'backend':<19}{'heads':<14}{'cases':>6}{'error':>10}{'from sdpa':>11}{'tolerance':>11}"]
    for backend, heads in sorted({(row["backend"], row["heads"]) for row in rows}):
        of = [row for row in rows if (row["backend"], row["heads"]) == (backend, heads)]
        error, from_sdpa = (_worst([row[key] for row in of]) for key in ("error", "from_sdpa"))
        lines.append(
            f"{backend:<19}{heads:<14}{len(of):>6}{error:>10.1e}{from_sdpa:>11.1e}{of[0]['tolerance']:>11.0e}"
            + ("" if all(row["ok"] for row in of) else "  FAILED")
        )
    lines += [f"FAILED: {row}" for row in rows if not row["ok"]]
    return "\n".join(lines)


def _worst(values: list[float]) -> float:
    """The largest; NaN where there is one."""
    return max(values, key=lambda value: (value != value, value))
