"""The ways to answer one request, each with a check that it was answered so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .floor import ByHand, Floor
from .workload import MEAN_RATIO, Workload, front_loaded, model_pair, per_call, seconds

STATIC = (0.3, 0.2, 0.1, 0.0)
TIERS = ("ram", "disk")
RAM_BYTES = 16 << 30  # more than the largest request leaves


@dataclass
class Variant:
    """One way to answer.

    Args:
        name (`str`): `exact`, `static 0.3`, ...
        tier (`str`): `ram`, `disk`, or nothing.
        run (`Callable[[int], float]`): answers the request of a round; returns seconds.
        parts (`list[dict]`): `last_request.seconds` of every round.
    """

    name: str
    tier: str
    run: Callable[[int], float]
    parts: list[dict[str, float]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.tier})" if self.tier else self.name


class Answers:
    """Models, stored images and variants of one workload.

    Args:
        architecture (`str`), size (`str`): of the model.
        workload (`Workload`): the request.
        folder (`Path`): an empty folder for the caches.
        tiers (sequence of `str`): `ram`, `disk`.
    """

    def __init__(
        self, architecture: Any, size: Any, workload: Workload, folder: Path, tiers: tuple[str, ...] = TIERS
    ) -> None:
        settings: dict[str, Any] = {"schedule": 0.1, "min_free_bytes": 0, "max_ram_bytes": RAM_BYTES}
        settings |= {"min_tokens": 1, "lossy_multi_image": True}
        self.stock, self.ours = model_pair(architecture, size, {**settings, "cache_dir": folder / "cold"})
        self.workload = workload
        self.pixels = workload.pixels(self.ours.config)
        self.known = workload.prompt(0, self.pixels)
        self.tiers = tiers
        self._folder = folder / "warm"
        self._settings = {
            tier: {**settings, "cache_dir": self._folder, "max_ram_bytes": RAM_BYTES if tier == "ram" else 0}
            for tier in TIERS
        }
        self._seed = 0

    def fill(self) -> float:
        """Computes and stores the images; returns the seconds of the request."""
        taken = seconds(self.ours, self.known, per_call(self._settings["disk"]))
        self.entry_bytes = self.ours.vlcache.last_request.bytes_written
        self.ours.vlcache.flush()
        stored = {kind: any((self._folder / kind).rglob("*.safetensors")) for kind in ("kv", "vit")}
        if not all(stored.values()):
            raise RuntimeError(f"the request that stores the images left {stored}.")
        return taken

    def variants(self) -> list[Variant]:
        """All variants, full computations first."""
        layers = self.ours.config.text_config.num_hidden_layers
        schedules: dict[str, Any] = {f"static {ratio:g}": ratio for ratio in STATIC}
        schedules[f"dynamic {MEAN_RATIO:g}"] = dynamic = front_loaded(layers)
        schedules[f"uniform {MEAN_RATIO:g}"] = MEAN_RATIO
        found = [Variant("stock", "", lambda _: seconds(self.stock, self.known)), self._cold()]
        for tier in self.tiers:
            found.append(self._encoder_only(tier))
        for tier in self.tiers:
            found += [self._reused(name, tier, schedule) for name, schedule in schedules.items()]
        for tier in self.tiers:
            found.append(self._variant("exact", tier, {}, lambda _: self.known, {"exact"}))
        found += self._floors("exact", 0.0) + self._floors("dynamic", dynamic.mean)
        by_hand = ByHand(self.stock, self.known, self.workload)
        return [*found, Variant("by hand", "", lambda _: by_hand.seconds())]

    def _floors(self, name: str, ratio: float) -> list[Variant]:
        floor = Floor(self.stock, self.workload, ratio)
        return [
            Variant(f"floor {name}: forward", "", lambda _: floor.forward()),
            Variant(f"floor {name}: copy", "", lambda _: floor.copy()),
        ]

    def _variant(
        self, name: str, tier: str, settings: dict[str, Any], inputs: Callable[[int], Any], kinds: set[str]
    ) -> Variant:
        def run(index: int) -> float:
            request = inputs(index)
            taken = seconds(self.ours, request, per_call({**self._settings[tier], **settings}))
            record = self.ours.vlcache.last_request
            if {image.kv for image in record.images} != kinds or "miss" in {image.encoder for image in record.images}:
                raise RuntimeError(f"{name} ({tier}) was answered in another way: {record}")
            variant.parts.append(dict(record.seconds))
            return taken

        variant = Variant(name, tier, run)
        return variant

    def _reused(self, name: str, tier: str, schedule: Any) -> Variant:
        return self._variant(name, tier, {"schedule": schedule}, self._other_context, {"reused"})

    def _encoder_only(self, tier: str) -> Variant:
        return self._variant("encoder only", tier, {"policy": "encoder_only"}, self._other_context, {"miss"})

    def _other_context(self, index: int) -> dict[str, torch.Tensor]:
        self._seed += 1  # met twice, a context would be computed in full
        return self.workload.prompt(self._seed, self.pixels)

    def _cold(self) -> Variant:
        def run(index: int) -> float:
            cache = self.ours.vlcache
            taken = seconds(self.ours, self.known, per_call({"namespace": f"cold {index}"}))
            record = cache.last_request
            if any(image.kv != "miss" or not image.stored for image in record.images):
                raise RuntimeError(f"not a cold request that is stored: {record}")
            variant.parts.append(dict(record.seconds))
            cache.flush()
            cache.clear()
            return taken

        variant = Variant("cold", "", run)
        return variant
