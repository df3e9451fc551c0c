"""Part 3: time to first token from `generate()` on, as the rows of the paper's Table 1."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import torch

import vlcache_hf
from benchmarks.gpu import models
from benchmarks.gpu.devices import peak_bytes, start_peak, synchronize
from benchmarks.gpu.models import Shape
from vlcache_hf import VLCache

MAX_RAM_BYTES = 12 << 30
# written before the request ends: otherwise what waits to be written would be read from memory
FROM_DISK: dict[str, Any] = {"max_ram_bytes": 0, "write_behind": False}
TIERS: dict[str, dict[str, Any]] = {"ram": {}, "disk": FROM_DISK}


@dataclass(frozen=True)
class Variant:
    """A row of the table.

    Args:
        name (`str`): its name.
        kv (`str`): the kind that its requests must be.
        settings (`dict`): of the call.
        tiers (`tuple[str, ...]`): where what it reads lies.
    """

    name: str
    kv: str
    settings: dict[str, Any]
    tiers: tuple[str, ...] = tuple(TIERS)


@dataclass
class Measured:
    """Times of one row at one size.

    Args:
        seconds (`list[float]`): of the rounds.
        peak (`int`, *optional*): the most memory that was allocated, in bytes.
        record (`dict`): the last request's own account of its time and bytes.
    """

    seconds: list[float] = field(default_factory=list)
    peak: int | None = None
    record: dict[str, Any] = field(default_factory=dict)


@dataclass
class Pair:
    """The stock model and ours over the same weights.

    Args:
        shape (`Shape`): their shape.
        stock (`PreTrainedModel`): the stock model.
        ours (`PreTrainedModel`): ours.
        device (`torch.device`): where they lie.
    """

    shape: Shape
    stock: Any
    ours: Any
    device: torch.device


def variants(schedule: str | float) -> list[Variant]:
    """What is measured beside stock.

    Args:
        schedule (`str` or `float`): of the row "dynamic".
    """
    return [
        Variant("encoder only (w/o ViT)", "miss", {"policy": "encoder_only"}, ("ram",)),
        Variant(f"dynamic ({schedule})", "reused", {"schedule": schedule}),
        Variant("static (r=0.1)", "reused", {"schedule": 0.1}),
        Variant("exact", "exact", {}),
    ]


@contextmanager
def open_pair(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Pair]:
    """Both models, and a folder for the cache that is gone afterwards."""
    stock = models.build_model(shape, device, dtype)
    with TemporaryDirectory(prefix="vlcache-gpu-") as folder:
        settings = {
            "cache_dir": folder,
            "max_ram_bytes": MAX_RAM_BYTES,
            "schedule": shape.schedule,
            "base_attn_implementation": "sdpa",
            "min_tokens": 1,
        }
        ours = vlcache_hf.attach(models.twin(stock), settings)
        try:
            yield Pair(shape, stock, ours, device)
        finally:
            ours.vlcache.flush()


@torch.no_grad()
def measure(pair: Pair, tokens: int, rounds: int, goes_on: Callable[[], bool] = lambda: True) -> dict[str, Any]:
    """All rows at one size.

    The image is stored by a request that keeps nothing in memory, so that the RAM tier fills as it does after a
    restart: at the second use, pinned. "as stored" are hits on what the RAM tier kept of a request's own.

    Args:
        pair (`Pair`): the models.
        tokens (`int`): image tokens, a square number.
        rounds (`int`): interleaved rounds.
        goes_on (`Callable`): asked before each round but the first; there are fewer where it says no.

    Raises:
        `RuntimeError`: a request was not of the kind that it should be.
    """
    patches = models.pixels(pair.stock.config, tokens, pair.device)
    known = models.prompt(patches, 0)
    rows: dict[str, Measured] = {}
    seeds = iter(range(1, 10_000))

    def ask(row: str, variant: Variant, more: dict[str, Any], encoder: tuple[str, ...] = ("hit", "skipped")) -> None:
        """A request of ours, in a context of its own unless it is to be an exact hit or a miss."""
        inputs = models.prompt(patches, next(seeds)) if variant.kv == "reused" else known
        measured = rows.setdefault(row, Measured())
        seconds = _timed(pair, pair.ours, inputs, measured, VLCache(**variant.settings, **more))
        record = pair.ours.vlcache.last_request
        image = record.images[0]
        if image.kv != variant.kv or image.encoder not in encoder:
            raise RuntimeError(f"{row} at {tokens} tokens: expected kv {variant.kv}, encoder {encoder}, got {record}")
        measured.seconds.append(seconds)
        measured.record = {
            "kv": image.kv,
            "encoder": image.encoder,
            "recomputed": round(image.ratio, 4),
            "bytes_read": record.bytes_read,
            "seconds": {what: round(value, 4) for what, value in record.seconds.items()},
        }

    def ask_stock() -> None:
        measured = rows.setdefault("stock", Measured())
        measured.seconds.append(_timed(pair, pair.stock, known, measured))

    cold, exact = Variant("cold", "miss", {}), Variant("exact", "exact", {})
    ask("stored", cold, FROM_DISK, ("miss",))
    done = 0
    for index in range(-1, rounds):
        if index == 0:  # kernel choice, memory pools, and the RAM tier, which keeps what is used twice
            rows.clear()
        if index > 0 and not goes_on():
            break
        done += index >= 0
        ask_stock()
        for variant in variants(pair.shape.schedule):
            for tier in variant.tiers:
                ask(f"{variant.name}, {tier}", variant, TIERS[tier])
    own = {"namespace": f"cold {tokens}"}
    ask("cold, stored in the background", cold, own, ("miss",))
    pair.ours.vlcache.flush()
    for _ in range(done):
        ask("exact, ram as stored", exact, own)
    return {
        "model": pair.shape.name,
        "image_tokens": tokens,
        "text_tokens": models.TEXT_TOKENS,
        "rounds": done,
        "rows": {name: summary(rows["stock"], measured) for name, measured in rows.items()},
    }


def _timed(
    pair: Pair, model: Any, inputs: dict[str, torch.Tensor], measured: Measured, cache: VLCache | None = None
) -> float:
    extra = {} if cache is None else {"cache": cache}
    synchronize(pair.device)
    start_peak(pair.device)
    start = time.perf_counter()
    model.generate(**inputs, max_new_tokens=1, do_sample=False, **extra)
    synchronize(pair.device)
    seconds = time.perf_counter() - start
    peak = peak_bytes(pair.device)
    measured.peak = peak if peak is None else max(peak, measured.peak or 0)
    return seconds


def summary(stock: Measured, row: Measured) -> dict[str, Any]:
    """Medians, and speed-ups against the stock request of the same round.

    Args:
        stock (`Measured`): the stock model's requests.
        row (`Measured`): the row's.
    """
    ratios = [a / b for a, b in zip(stock.seconds, row.seconds)]
    return {
        "median_s": round(statistics.median(row.seconds), 4),
        "speedup": round(statistics.median(ratios), 2),
        "speedup_min": round(min(ratios), 2),
        "speedup_max": round(max(ratios), 2),
        "times_s": [round(seconds, 4) for seconds in row.seconds],
        "peak_gib": None if row.peak is None else round(row.peak / 2**30, 2),
        **row.record,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Configurations against sizes, as in the paper: TTFT and speed-up, then peak memory.

    Args:
        results (`list[dict]`): of one model.
    """
    results = sorted(results, key=lambda result: result["image_tokens"])
    names = list(results[0]["rows"])
    width = max(map(len, names)) + 2
    lines = [
        results[0]["model"] + ", medians of " + ", ".join(str(result["rounds"]) for result in results) + " rounds",
        " " * width + "".join(f"{result['image_tokens']:>17,}" for result in results),
    ]
    for name in names:
        cells = [f"{row['median_s']:>8.3f} s{row['speedup']:>6.2f}x" for row in (r["rows"][name] for r in results)]
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>17}" for cell in cells))
    if all(row["peak_gib"] is not None for result in results for row in result["rows"].values()):
        lines.append("peak memory")
        for name in names:
            cells = [f"{result['rows'][name]['peak_gib']:.1f} GiB" for result in results]
            lines.append(f"{name:<{width}}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)
