"""What a guard could look at: rows of a picture that are computed again, at every layer, beside the stored ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from vlcache_hf import prefill
from vlcache_hf.plan import Runs
from vlcache_hf.policies import nested_runs
from vlcache_hf.watch import Watch, probe_layer

FIRST = 16
SPREAD = 16


def probed(length: int) -> list[int]:
    """The first tokens of a picture, then some spread over the others."""
    first = min(FIRST, length)
    rest = min(SPREAD, length - first)
    return [*range(first), *(first + int((i + 0.5) * (length - first) / rest) for i in range(rest))]


@dataclass(frozen=True)
class Probes:
    """A policy that computes `probed` tokens at every layer, whatever the schedule."""

    def runs(self, counts: Sequence[int], length: int) -> tuple[Runs, ...]:
        order = probed(length)
        return nested_runs([*order, *sorted(set(range(length)) - set(order))], [len(order)] * len(counts))


class Recorder(Watch):
    """Keeps squares per row of all layers, where `Watch` adds them up for the first ones.

    `rows[image][layer]` has shape `(4, n)`: differences and computed values of K, then of V.
    """

    last: dict[int, dict[int, np.ndarray]] = {}

    def __init__(self, guard_layer: int | None, selection: Any) -> None:
        super().__init__(None, None)
        self.rows: dict[int, dict[int, np.ndarray]] = {}
        Recorder.last = self.rows

    def compares_kv(self, layer: int) -> bool:
        return layer > 0

    def add_kv(
        self,
        layer: int,
        image: int,
        start: int,
        computed: tuple[torch.Tensor, torch.Tensor],
        stored: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        parts = []
        for true, old in zip(computed, stored, strict=True):
            true = true.float()
            parts += [(true - old.float()).square().sum((1, 2)), true.square().sum((1, 2))]
        found = torch.stack(parts).cpu().numpy()
        layers = self.rows.setdefault(image, {})
        layers[layer] = np.concatenate([layers[layer], found], axis=1) if layer in layers else found


@contextmanager
def recording() -> Iterator[type[Recorder]]:
    """Prefills inside note their rows in `Recorder.last`; with the policy `Probes`."""
    with patch.object(prefill, "Watch", Recorder):
        yield Recorder


@dataclass(frozen=True)
class Signal:
    """One way to look at the rows.

    Args:
        what (`str`): `"K"`, `"V"` or `"K and V"`.
        rows (`str`): `"first 8"`, `"first 16"` or `"16 spread"`.
        over (`str`): of the layers 1 to `depth`: `"mean"`, `"max"`, or the `"last"` alone.
        depth (`int`): the last layer; the guard acts behind it.
    """

    what: str
    rows: str
    over: str
    depth: int

    @property
    def name(self) -> str:
        return f"{self.what}, {self.rows} rows, {self.over} of layers 1..{self.depth}"

    def value(self, found: np.ndarray) -> float:
        """The deviation.

        Args:
            found (`np.ndarray` of shape `(layers - 1, 4, n)`): of `Recorder`, layers from 1 on.
        """
        part = {"first 8": slice(0, 8), "first 16": slice(0, FIRST), "16 spread": slice(FIRST, None)}[self.rows]
        sums = (found[:, :, part] if found[:, :, part].shape[2] else found).sum(2)
        ratios = sums[: self.depth, [0, 2]] / np.maximum(sums[: self.depth, [1, 3]], 1e-30)
        chosen = {"K": ratios[:, 0], "V": ratios[:, 1], "K and V": ratios.mean(1)}[self.what]
        return float(np.sqrt({"mean": chosen.mean(), "max": chosen.max(), "last": chosen[-1]}[self.over]))

    def shares(self, tokens: int, text: int, layers: int, count: int) -> tuple[float, float]:
        """Computed rows over image tokens times layers: where it stays quiet, and where it escalates.

        Args:
            tokens (`int`): of the picture.
            text (`int`): other tokens of the prompt.
            layers (`int`): decoder layers.
            count (`int`): tokens that each layer recomputes without the guard.
        """
        probes = {"first 8": max(count, 8), "first 16": max(count, FIRST), "16 spread": count + SPREAD}[self.rows]
        looked, whole = (self.depth + 1) * min(probes, tokens), tokens * layers
        quiet = looked + (layers - self.depth - 1) * count
        return quiet / whole, 1 + (looked + (self.depth + 1) * text) / whole


def candidates(layers: int) -> list[Signal]:
    """All signals that are compared; the present one first."""
    last = probe_layer(layers)
    present = Signal("V", "first 8", "max", last)
    depths = dict.fromkeys(max(1, min(layers - 1, depth)) for depth in (last - 1, last, last + 1, layers - 1))
    found = [
        Signal(what, rows, over, depth)
        for rows in ("first 8", "first 16", "16 spread")
        for what in ("K and V", "K", "V")
        for depth in depths
        for over in ("mean", "max", "last")
        if depth > 1 or over == "mean"
    ]
    return [present, *(signal for signal in found if signal != present)]


def stacked(rows: dict[int, np.ndarray]) -> np.ndarray:
    """Rows of one picture as an array of shape `(layers - 1, 4, n)`."""
    return np.stack([rows[layer] for layer in sorted(rows)])
