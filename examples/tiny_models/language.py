"""Stages 2 and 3: the language model, on conversations about pictures that the frozen vision tower has read."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .batches import Batch, Row, collate, encode, loss
from .grammar import CAPTION, SYSTEMS, caption, conversation, question
from .pictures import SIZES, Picture, digit_grids, generator, shape_pictures
from .schedule import Progress, rate
from .vision import patches_by_product


@dataclass(frozen=True)
class Stage:
    """What is practised, and for how long.

    Args:
        name (`str`): for the log and the file of its state.
        steps (`int`): optimizer steps that the learning rate is planned for.
        learning_rate (`float`): its peak.
        drills (`dict[str, float]`): share of each kind of batch: `"after"`, `"before"` (the question stands behind or
            in front of the picture), `"two"` (pictures), `"shapes"` (easy-VQA).
        hide (`float`): share of conversations with the question in front in which the text behind the picture cannot
            see it, so that the picture's own tokens must carry it.
        sizes (`dict[int, float]`): share of each size of digit grids.
        grow (`bool`): begin with the smallest grids and let them grow during the first half.
        tokens (`int`): of a batch, about.
        batches (`int`): of a step.
        floor (`float`): last learning rate, as a share of the peak.
        guide (`tuple[float, float]`): weight of the guiding loss (see `batches.loss`) at the beginning, and the share
            of the stage after which it has faded to zero.
        stop (`int`, *optional*): optimizer steps that are made, if fewer.
    """

    name: str
    steps: int
    learning_rate: float
    drills: dict[str, float]
    hide: float = 0.0
    sizes: dict[int, float] = field(default_factory=lambda: dict(zip(SIZES, (0.3, 0.2, 0.25, 0.15, 0.1))))
    grow: bool = True
    tokens: int = 2000
    batches: int = 2
    floor: float = 0.03
    guide: tuple[float, float] = (0.0, 1.0)
    stop: int | None = None

    def choose(self, rng: np.random.Generator, shares: dict, limit: int | None = None):
        keys = [key for key in shares if limit is None or key <= limit]
        weights = np.array([shares[key] for key in keys])
        return keys[int(rng.choice(len(keys), p=weights / weights.sum()))]

    def draw(self, rng: np.random.Generator, progress: float) -> Batch:
        """One batch."""
        drill, rows = self._rows(rng, progress)
        # Without text of the user in front there is nothing to carry.
        hide = np.array([rng.random() < self.hide and row.first_question for row in rows])
        batch = collate(rows, hide)
        size = "" if drill == "shapes" else str(rows[0].pictures[0].size)
        return replace(batch, name=f"{drill}{size}")

    def _rows(self, rng: np.random.Generator, progress: float) -> tuple[str, list[Row]]:
        drill = self.choose(rng, self.drills)
        smallest, largest = min(self.sizes), max(self.sizes)
        share = min(1.0, 0.15 + 2 * progress) if self.grow else 1.0
        limit = round(smallest + (largest - smallest) * share)
        size = 4 if drill == "shapes" else self.choose(rng, self.sizes, limit)
        if drill == "two":
            size = min(size, 12)
            return drill, [_two(rng, size, self.hide > 0) for _ in range(max(1, self.tokens // (2 * size**2 + 60)))]
        if drill == "shapes":
            pictures = shape_pictures(rng, max(1, self.tokens // 70), "train")
            return drill, [_one(rng, picture, 4, bool(rng.integers(2)), self.hide > 0) for picture in pictures]
        if drill == "after":
            pictures = digit_grids(rng, max(1, self.tokens // (size**2 + 120)), size, "train")
            return drill, [_one(rng, picture, 8, False, False) for picture in pictures]
        rows = max(2, self.tokens // (size**2 + 35))
        pictures = digit_grids(rng, max(1, rows // 3), size, "train")
        first = [
            _one(rng, pictures[index % len(pictures)], 1 + int(rng.random() < 0.2), True, self.hide > 0)
            for index in range(rows)
        ]
        return drill, first


def _system(rng: np.random.Generator) -> str:
    return SYSTEMS[int(rng.integers(len(SYSTEMS)))]


def _one(rng: np.random.Generator, picture: Picture, turns: int, first: bool, routed: bool) -> Row:
    asked = [question(rng, picture) for _ in range(turns)]
    if rng.random() < 0.08 and (picture.shape is None or min(picture.shape) >= 0):
        asked[0] = (CAPTION, caption(picture))
    return encode(conversation([picture], asked, _system(rng), first), routed)


def _two(rng: np.random.Generator, size: int, routed: bool) -> Row:
    pictures = digit_grids(rng, 2, size, "train")
    first = rng.random() < 0.3
    chosen = [int(number) for number in rng.integers(2, size=1 if first else 6)]
    asked = [question(rng, pictures[number], number=number + 1) for number in chosen]
    return encode(conversation(pictures, asked, _system(rng), bool(first)), routed)


def train_language(model: Any, stage: Stage, seed: int, progress: Progress, state: Path | None = None) -> None:
    """Train everything but `model.model.visual` in place.

    Args:
        model (`Qwen3VLForConditionalGeneration`): its vision tower is trained already.
        stage (`Stage`): what to practise.
        seed (`int`): of the conversations.
        progress (`Progress`): says how far it is.
        state (`Path`, *optional*): file that keeps weights and optimizer every 100 steps; if it exists, go on there.
    """
    patches_by_product(model.model.visual)
    model.model.visual.requires_grad_(False)
    # Shows its weights, and for sequences this short it is also the fastest on a CPU in bfloat16.
    model.model.language_model.config._attn_implementation = "eager"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": 0.05},
        {"params": [parameter for parameter in parameters if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=stage.learning_rate, betas=(0.9, 0.98))
    done = 0
    if state is not None and state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    start = time.perf_counter()
    losses: list[float] = []
    hits: dict[str, list[int]] = {}
    last = stage.stop or stage.steps
    for step in range(done, last):
        rng = generator("train", seed * 1_000_000 + step)
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * rate(step, stage.steps, floor=stage.floor)
        guide = stage.guide[0] * max(0.0, 1 - step / stage.steps / stage.guide[1])
        for _ in range(stage.batches):
            batch = stage.draw(rng, step / stage.steps)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value, right, count = loss(model, batch, guide)
            (value / stage.batches).backward()
            losses.append(value.item())
            seen = hits.setdefault(batch.name, [0, 0])
            seen[0], seen[1] = seen[0] + int(right), seen[1] + int(count)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if progress.due(step, last):
            shares = " ".join(f"{name} {right / count:.3f}" for name, (right, count) in sorted(hits.items()))
            text = f"{stage.name} loss {np.mean(losses):.3f} right: {shares}"
            progress.say(step, last, text, time.perf_counter() - start)
            losses, hits = [], {}
        if state is not None and ((step + 1) % 100 == 0 or step + 1 == last):
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(saved, state.with_suffix(".part"))
            state.with_suffix(".part").replace(state)
