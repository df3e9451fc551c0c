"""What a prefill learns about reuse while it runs: recomputed rows are a free sample of the stored ones' error."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .plan import Runs
from .policies import LargestDeviation, merged_runs

_TINY = torch.finfo(torch.float32).tiny

# First tokens of an image that are computed up to the guard's layer as a sample, where the schedule computes fewer.
PROBE_TOKENS = 8


def probe_layer(num_layers: int) -> int:
    """The last layer that the guard looks at: half-way up, since in the first layers an image may not have met its
    context yet (measured in benchmarks/accuracy). Few rows get that far, so turning back is cheap.

    Args:
        num_layers (`int`): decoder layers.
    """
    return max(1, min(num_layers - 1, num_layers // 2))


def with_probe(runs: Sequence[Runs], tokens: int) -> tuple[Runs, ...]:
    """Adds the sample to what is recomputed, up to the guard's layer.

    Args:
        runs (sequence of `Runs`): what a policy recomputes at each layer.
        tokens (`int`): tokens of the image.
    """
    last, probe = probe_layer(len(runs)), set(range(min(PROBE_TOKENS, tokens)))
    known: dict[Runs, Runs] = {}
    for layer_runs in runs[: last + 1]:
        if layer_runs not in known:
            known[layer_runs] = merged_runs(probe.union(*(range(a, b) for a, b in layer_runs)))
    return (*(known[layer_runs] for layer_runs in runs[: last + 1]), *runs[last + 1 :])


class ContextMismatch(Exception):
    """The stored KV of some images differs too much from what their context gives.

    Args:
        images (`dict[int, float]`): deviations by index of the image.
        rows (`int`): rows times layers that were computed so far.
    """

    def __init__(self, images: dict[int, float], rows: int) -> None:
        super().__init__(f"deviations of images: {images}")
        self.images = images
        self.rows = rows


class Watch:
    """Compares rows computed in this context with the stored ones of the same tokens.

    Sums stay on their device until somebody asks, so that no layer waits for the host.

    Args:
        guard_layer (`int`, *optional*): the last layer that the guard looks at; without one nothing is guarded.
        selection (`LargestDeviation`, *optional*): a policy that chooses tokens by what is seen at its layer.
    """

    def __init__(self, guard_layer: int | None, selection: LargestDeviation | None) -> None:
        self.guard_layer = guard_layer
        self.selection = selection
        self._shares: dict[int, list[torch.Tensor]] = {}
        self._scores: dict[int, torch.Tensor] = {}

    def compares_kv(self, layer: int) -> bool:
        """Whether keys and values of a layer are compared. Those of layer 0 never differ."""
        by_kv = self.selection is not None and self.selection.by == "kv"
        return self._guards(layer) or (self.selects(layer) and by_kv)

    def _guards(self, layer: int) -> bool:
        return self.guard_layer is not None and 1 <= layer <= self.guard_layer

    def compares_attention(self, layer: int) -> bool:
        """Whether the outputs of attention of a layer are compared."""
        return self.selects(layer) and self.selection is not None and self.selection.by == "attention"

    def selects(self, layer: int) -> bool:
        """Whether tokens are chosen behind a layer."""
        return self.selection is not None and layer == self.selection.layer

    def add_kv(
        self,
        layer: int,
        image: int,
        start: int,
        computed: tuple[torch.Tensor, torch.Tensor],
        stored: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Compares rows of one image at one layer.

        Args:
            layer (`int`): the layer.
            image (`int`): index of the image.
            start (`int`): the image's token that the first row belongs to.
            computed, stored (`tuple` of two `torch.Tensor` of shape `(n, kv_heads, head_dim)`):
                keys before RoPE, and values.
        """
        if self._guards(layer) and start == 0:
            true, old = (values[1][:PROBE_TOKENS].float() for values in (computed, stored))
            share = (true - old).square().sum() / true.square().sum().clamp_min(_TINY)
            self._shares.setdefault(image, []).append(share)
        if self.selects(layer):
            shares = [
                (true.float() - old.float()).square().sum((1, 2)) / true.float().square().sum().clamp_min(_TINY)
                for true, old in zip(computed, stored)
            ]
            self._scores[image] = torch.stack(shares).sum(0)

    def add_attention(self, image: int, computed: torch.Tensor, stored: torch.Tensor) -> None:
        """Compares the outputs of attention of one image's tokens.

        Args:
            image (`int`): index of the image.
            computed, stored (`torch.Tensor` of shape `(n, heads, head_dim)`):
                over keys and values of this context, and over the stored ones.
        """
        self._scores[image] = (computed.float() - stored.float()).square().sum((1, 2))

    def deviations(self) -> dict[int, float]:
        """`|computed - stored| / |computed|` of the sample's values, at the layer where it is largest, for every
        compared image."""
        return {image: max(float(share) for share in shares) ** 0.5 for image, shares in self._shares.items()}

    def scores(self, image: int) -> list[float]:
        """Scores of the tokens of an image, for the policy that selects."""
        return self._scores[image].tolist()
