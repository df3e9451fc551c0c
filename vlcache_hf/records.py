"""What happened, for people to read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from .store.forks import renew_in_children


@dataclass
class ImageRecord:
    """One image of one request.

    Args:
        row (`int`): batch row.
        tokens (`int`): number of its tokens.
        kv (`str`): `"exact"` (same context, lossless when stored as computed), `"reused"` (other context, partly
            recomputed), `"miss"` (computed in full).
        encoder (`str`): `"hit"` (features read from the store), `"miss"` (vision tower run), `"skipped"` (no feature
            was needed).
        recomputed (`int`): tokens times layers that were computed.
        layers (`int`): number of decoder layers.
        bytes_read (`int`): bytes of KV and features taken from the store.
        stored (`bool`): whether its KV was stored by this request.
        storage (`str`): precision of its KV in the store, `"auto"` for as computed. An exact hit of another precision
            is lossy.
        storage_error (`float`): relative error of its stored KV, the largest over layers, `|x - stored x| / |x|`.
        deviation (`float`, *optional*): how far the rows that were recomputed in the first layers are from the stored
            ones, `|computed - stored| / |computed|`; with `guard` on, for images that stood to be reused.
        guarded (`str`): what the guard did: nothing (`""`), `"warned"`, or `"escalated"` (computed in full instead).
        key (`str`): key of what it shows under this model, 64 hex digits.
    """

    row: int
    tokens: int
    kv: str = "miss"
    encoder: str = "skipped"
    recomputed: int = 0
    layers: int = 0
    bytes_read: int = 0
    stored: bool = False
    storage: str = "auto"
    storage_error: float = 0.0
    deviation: float | None = None
    guarded: str = ""
    key: str = ""

    @property
    def lossy(self) -> bool:
        """Whether its KV is not what computing it in full would give."""
        return self.kv == "reused" or (self.kv == "exact" and self.storage != "auto")

    @property
    def ratio(self) -> float:
        """Share of its tokens that was recomputed, the mean over layers."""
        return self.recomputed / (self.tokens * self.layers) if self.tokens * self.layers else 0.0


@dataclass
class RequestRecord:
    """One request: `model.vlcache.last_request`.

    Args:
        images (`list[ImageRecord]`): the images in prompt order.
        text_tokens (`int`): visible tokens that are not of an image.
        in_full (`str`, *optional*): why the language model computed everything as stock, if it did.
        abandoned (`int`): rows times layers that were computed before the guard made the prefill start again.
        bytes_read (`int`), bytes_written (`int`): bytes from and to the store.
        seconds (`dict[str, float]`): wall time of `fingerprint`, `hashing`, `loading`, `vision`, `prefill`, `storing`.
    """

    images: list[ImageRecord] = field(default_factory=list)
    text_tokens: int = 0
    in_full: str | None = None
    abandoned: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def lossy(self) -> bool:
        """Whether any image was reused from another context, or from KV stored in 8 bits."""
        return any(image.lossy for image in self.images)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the time of a block to `seconds`."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + perf_counter() - start

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{len(self.images)} image(s), {self.text_tokens} text tokens, read {_size(self.bytes_read)}, "
            f"wrote {_size(self.bytes_written)}"
        ]
        if self.in_full:
            lines.append(f"  computed in full: {self.in_full}")
        for index, image in enumerate(self.images):
            lines.append(
                f"  image {index} (row {image.row}): {image.tokens} tokens, kv {image.kv}, encoder {image.encoder}, "
                f"recomputed {100 * image.ratio:.1f} %"
                + (", stored" if image.stored else "")
                + (f", {image.storage} (error {image.storage_error:.1e})" if image.storage != "auto" else "")
                + (f", deviation {image.deviation:.3f}" if image.deviation is not None else "")
                + (f", {image.guarded}" if image.guarded else "")
            )
        if self.seconds:
            lines.append("  " + ", ".join(f"{what} {1000 * time:.1f} ms" for what, time in self.seconds.items()))
        return "\n".join(lines)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


@dataclass
class Stats:
    """Totals over the requests of a model: `model.vlcache.stats()`."""

    requests: int = 0
    in_full: int = 0
    exact: int = 0
    reused: int = 0
    missed: int = 0
    encoder_hits: int = 0
    vision_calls: int = 0
    tokens_reused: int = 0
    tokens_recomputed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    entries_stored: int = 0
    warned: int = 0
    escalated: int = 0
    faults: int = 0
    dropped: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        times = ", ".join(f"{what} {time:.2f} s" for what, time in self.seconds.items())
        return (
            f"{self.requests} requests ({self.in_full} in full); images: {self.exact} exact, {self.reused} reused, "
            f"{self.missed} missed; encoder: {self.encoder_hits} hits, {self.vision_calls} vision calls\n"
            f"  image tokens (mean over layers): {self.tokens_reused} reused, {self.tokens_recomputed} recomputed\n"
            f"  read {_size(self.bytes_read)}, wrote {_size(self.bytes_written)}, {self.entries_stored} entries "
            f"stored, {self.dropped} dropped, {self.faults} storage faults" + (f"\n  {times}" if times else "")
        )


class StatsCounter:
    """Adds requests up; safe to share between threads."""

    def __init__(self) -> None:
        self.after_fork()
        renew_in_children(self)
        self._total = Stats()

    def after_fork(self) -> None:
        """In a child: another thread of the parent may have held the lock, which nobody would release here."""
        self._lock = threading.Lock()

    def vision_call(self) -> None:
        with self._lock:
            self._total.vision_calls += 1

    def add(self, record: RequestRecord) -> None:
        with self._lock:
            total = self._total
            total.requests += 1
            total.in_full += record.in_full is not None
            for image in record.images:
                if record.in_full is None:
                    total.exact += image.kv == "exact"
                    total.reused += image.kv == "reused"
                total.missed += image.kv == "miss"
                total.encoder_hits += image.encoder == "hit"
                recomputed = round(image.tokens * image.ratio)
                total.tokens_recomputed += recomputed
                total.tokens_reused += image.tokens - recomputed
                total.entries_stored += image.stored
                total.warned += image.guarded == "warned"
                total.escalated += image.guarded == "escalated"
            total.bytes_read += record.bytes_read
            total.bytes_written += record.bytes_written
            for what, time in record.seconds.items():
                total.seconds[what] = total.seconds.get(what, 0.0) + time

    def snapshot(self, faults: int, dropped: int = 0) -> Stats:
        with self._lock:
            copy = Stats(**{**self._total.__dict__, "seconds": dict(self._total.seconds)})
        copy.faults, copy.dropped = faults, dropped
        return copy
