"""Stage 1: the vision tower alone, with linear heads that must read every cell. Afterwards it is frozen."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from .batches import patches
from .pictures import COLORS, SHAPE_COLORS, SHAPES, SIZES, Picture, Split, digit_grids, generator, shape_pictures
from .schedule import Progress, rate


@dataclass(frozen=True)
class VisionStage:
    """What the vision tower reads, and for how long.

    Args:
        name (`str`): for the log.
        steps (`int`): optimizer steps.
        learning_rate (`float`): its peak.
        grids (`dict[int, int]`): number of digit grids of each size in a batch.
        shapes (`int`): number of easy-VQA pictures in a batch.
        scale (`float`): root mean square that the merged features are brought to at the end.
        heads_only (`int`): first steps in which only the heads are trained, where the tower knows something already.
    """

    name: str
    steps: int
    learning_rate: float
    grids: dict[int, int]
    shapes: int
    scale: float
    heads_only: int = 0

    def draw(self, rng: np.random.Generator, split: Split) -> list[Picture]:
        """A batch of pictures: digit grids, then shapes."""
        grids = [digit_grids(rng, count, size, split) for size, count in self.grids.items()]
        return [picture for group in grids for picture in group] + shape_pictures(rng, self.shapes, split)


_WIDTHS = {"digit": 10, "color": len(COLORS), "row": max(SIZES), "column": max(SIZES)}
_SHAPE_WIDTHS = {"shape": len(SHAPES), "shape color": len(SHAPE_COLORS)}


class Heads(nn.Module):
    """Linear heads over the features of one level: per cell for digit grids, over their mean for shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = {**_WIDTHS, **_SHAPE_WIDTHS}
        self.heads = nn.ModuleDict({name: nn.Linear(width, count) for name, count in sizes.items()})

    def forward(self, cells: torch.Tensor, means: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: head(means if name in _SHAPE_WIDTHS else cells) for name, head in self.heads.items()}


def patches_by_product(visual: Any) -> None:
    """Embed patches by a matrix product: what the convolution computes, several times as fast on a CPU."""
    embed = visual.patch_embed
    embed.forward = lambda pixels: functional.linear(pixels, embed.proj.weight.flatten(1), embed.proj.bias)


def targets(pictures: list[Picture]) -> dict[str, torch.Tensor]:
    """Labels per cell of the digit grids, and per picture of the shapes."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in (*_WIDTHS, *_SHAPE_WIDTHS)}
    for picture in pictures:
        if picture.digits is not None and picture.colors is not None:
            row, column = np.divmod(np.arange(picture.digits.size), picture.size)
            truth: list[np.ndarray] = [picture.digits, picture.colors, row, column]
            for name, values in zip(_WIDTHS, truth, strict=True):
                found[name].append(values.ravel())
        elif picture.shape is not None:
            for name, value in zip(_SHAPE_WIDTHS, picture.shape, strict=True):
                found[name].append(np.array([value]))
    return {name: torch.from_numpy(np.concatenate(values)).long() for name, values in found.items()}


def levels(model: Any, pictures: list[Picture]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For the merged features and for each DeepStack level: those of the cells, and the means over shapes."""
    seen = model.model.get_image_features(*patches(pictures))
    shapes = sum(picture.shape is not None for picture in pictures)
    found = []
    for features in (seen.pooler_output, *seen.deepstack_features):
        means = torch.stack([part.mean(0) for part in features[len(features) - shapes :]])
        found.append((torch.cat(features[: len(features) - shapes]), means))
    return found


@torch.no_grad()
def check(model: Any, heads: nn.ModuleList, stage: VisionStage, batches: int = 12) -> dict[str, float]:
    """Accuracy of the first heads on held-out pictures; digit, row and column also on the largest grids alone."""
    right: dict[str, list[torch.Tensor]] = {}
    rng = generator("test", 999_000)
    for _ in range(batches):
        pictures = stage.draw(rng, "test")
        truth = targets(pictures)
        cells, means = levels(model, pictures)[0]
        for name, logits in heads[0](cells, means).items():
            known = truth[name] >= 0  # easy-VQA does not always tell
            hits = logits.argmax(-1)[known] == truth[name][known]
            right.setdefault(name, []).append(hits)
            if name in _WIDTHS:
                largest = max(SIZES) ** 2 * stage.grids[max(SIZES)]
                right.setdefault(f"{name} at {max(SIZES)}", []).append(hits[-largest:])
    return {name: round(torch.cat(hits).float().mean().item(), 4) for name, hits in right.items()}


def train_vision(model: Any, stage: VisionStage, seed: int, progress: Progress) -> dict[str, float]:
    """Train `model.model.visual` in place.

    Returns:
        `dict[str, float]`: accuracy of the heads on held-out pictures.
    """
    torch.manual_seed(seed)
    patches_by_product(model.model.visual)
    width = model.config.vision_config.out_hidden_size
    heads = nn.ModuleList(Heads(width) for _ in range(1 + len(model.config.vision_config.deepstack_visual_indexes)))
    parameters = [*model.model.visual.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=stage.learning_rate, betas=(0.9, 0.98), weight_decay=0.05)
    start = time.perf_counter()
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * rate(step, stage.steps)
        model.model.visual.requires_grad_(step >= stage.heads_only)
        pictures = stage.draw(generator("train", seed * 1_000_000 + step), "train")
        truth = targets(pictures)
        total, shown = torch.zeros(()), ""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = levels(model, pictures)
        for index, ((cells, means), level) in enumerate(zip(features, heads, strict=True)):
            for name, logits in level(cells.float(), means.float()).items():
                term = functional.cross_entropy(logits, truth[name], ignore_index=-1)
                total = total + term * (1.0 if index == 0 else 0.3)
                shown += f" {name} {term.item():.2f}" if index == 0 else ""
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        progress.say(step, stage.steps, f"{stage.name} loss{shown}", time.perf_counter() - start)
    accuracy = check(model, heads, stage)
    _rescale(model, stage.scale, stage.draw(generator("train", seed * 1_000_000 + stage.steps), "train"))
    return accuracy


@torch.no_grad()
def _rescale(model: Any, scale: float, pictures: list[Picture]) -> None:
    """Scale the mergers: DeepStack features half as large as those that stand for the image tokens."""
    visual = model.model.visual
    mergers = [visual.merger, *visual.deepstack_merger_list]
    for index, (merger, (cells, _)) in enumerate(zip(mergers, levels(model, pictures), strict=True)):
        factor = (scale if index == 0 else scale / 2) / cells.square().mean().sqrt()
        merger.linear_fc2.weight.mul_(factor)
        merger.linear_fc2.bias.mul_(factor)
