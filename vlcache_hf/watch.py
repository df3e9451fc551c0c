"""What a prefill learns about reuse while it runs: recomputed rows are a free sample of the stored ones' error."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .policies import LargestDeviation

# Rows of an image that are computed in the first layers as a sample, where the schedule computes fewer.
PROBE_TOKENS = 8


def probe_layer(num_layers: int) -> int:
    """The last layer whose rows the guard looks at: deep enough for a context to show, early enough to turn back.

    Args:
        num_layers (`int`): decoder layers.
    """
    return max(1, min(num_layers - 1, num_layers // 6 + 1))


def probe_counts(counts: Sequence[int], tokens: int) -> list[int]:
    """The tokens of each layer, with at least a sample up to the guard's layer.

    Args:
        counts (sequence of `int`): what the schedule computes.
        tokens (`int`): tokens of the image.
    """
    last, least = probe_layer(len(counts)), min(PROBE_TOKENS, tokens)
    return [max(count, least) if layer <= last else count for layer, count in enumerate(counts)]


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
        self._sums: dict[int, list[torch.Tensor]] = {}
        self._scores: dict[int, torch.Tensor] = {}

    def compares_kv(self, layer: int) -> bool:
        """Whether keys and values of a layer are compared. Those of layer 0 never differ."""
        guarded = self.guard_layer is not None and 1 <= layer <= self.guard_layer
        return guarded or (self.selects(layer) and self.selection is not None and self.selection.by == "kv")

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
        computed: tuple[torch.Tensor, torch.Tensor],
        stored: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Compares rows of one image at one layer.

        Args:
            layer (`int`): the layer.
            image (`int`): index of the image.
            computed, stored (`tuple` of two `torch.Tensor` of shape `(n, kv_heads, head_dim)`):
                keys before RoPE, and values.
        """
        scores = torch.zeros(len(computed[0]), device=computed[0].device)
        for true, old in zip(computed, stored):
            true = true.float()
            difference = (true - old.float()).square().sum((1, 2))
            whole = true.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
            scores += difference / whole
            self._sums.setdefault(image, []).append(difference.sum() / whole)
        if self.selects(layer):
            self._scores[image] = scores

    def add_attention(self, image: int, computed: torch.Tensor, stored: torch.Tensor) -> None:
        """Compares the outputs of attention of one image's tokens.

        Args:
            image (`int`): index of the image.
            computed, stored (`torch.Tensor` of shape `(n, heads, head_dim)`):
                over keys and values of this context, and over the stored ones.
        """
        self._scores[image] = (computed.float() - stored.float()).square().sum((1, 2))

    def deviations(self) -> dict[int, float]:
        """`|computed - stored| / |computed|` of every compared image: the root of the mean over layers, K and V."""
        return {image: float(torch.stack([s.cpu() for s in sums]).mean().sqrt()) for image, sums in self._sums.items()}

    def scores(self, image: int) -> list[float]:
        """Scores of the tokens of an image, for the policy that selects."""
        return self._scores[image].tolist()
