"""Pictures: grids of handwritten digits in colours, and the shapes of easy-VQA, each with its ground truth.

Train and held-out pictures share neither digit samples nor layout seeds; the shapes keep the split of easy-VQA.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

Split = Literal["train", "test"]

CELL = 32  # pixels: one image token
GLYPH = 28
SIZES = (4, 6, 8, 12, 16)  # rows = columns of a digit grid; 16 to 256 image tokens
COLORS = ("red", "green", "blue", "orange", "purple", "black")
SHAPES = ("circle", "rectangle", "triangle")
SHAPE_COLORS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")

_INK = np.array(
    [[215, 30, 35], [25, 150, 50], [35, 70, 220], [240, 140, 20], [150, 40, 175], [25, 25, 25]], dtype=np.float32
)
_HELD_OUT_DIGITS = 360
_VARIANTS = 8  # of each training digit: the sample itself and seven slightly turned, scaled and sheared copies


@dataclass(frozen=True)
class Picture:
    """A picture and what is on it.

    Args:
        pixels (`np.ndarray` of shape `(height, width, 3)`): RGB, uint8.
        digits (`np.ndarray` of shape `(size, size)`, *optional*): the digit of each cell.
        colors (`np.ndarray` of shape `(size, size)`, *optional*): index into `COLORS` of each cell.
        shape (`tuple[int, int]`, *optional*): for an easy-VQA picture, indices into `SHAPES` and `SHAPE_COLORS`.
        questions (`list[tuple[str, str]]`): for an easy-VQA picture, its questions and answers.
    """

    pixels: np.ndarray
    digits: np.ndarray | None = None
    colors: np.ndarray | None = None
    shape: tuple[int, int] | None = None
    questions: list[tuple[str, str]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Rows = columns of image tokens."""
        return self.pixels.shape[0] // CELL

    def image(self) -> Image.Image:
        return Image.fromarray(self.pixels)


def generator(split: Split, *seeds: int) -> np.random.Generator:
    """Random numbers for layouts. The two splits never share a stream."""
    return np.random.default_rng([0 if split == "train" else 1, *seeds])


@functools.cache
def _digits(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Glyphs of shape `(samples, 28, 28)` in 0..1 and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    chosen = order[:_HELD_OUT_DIGITS] if split == "test" else order[_HELD_OUT_DIGITS:]
    small = torch.from_numpy(data.images[chosen]).float()[:, None] / 16
    labels = data.target[chosen]
    glyphs = functional.interpolate(small, size=(GLYPH, GLYPH), mode="bilinear", align_corners=False)
    if split == "train":
        draw = torch.Generator().manual_seed(0)
        copies = [glyphs]
        for _ in range(_VARIANTS - 1):
            random = torch.rand(len(glyphs), 6, generator=draw) * 2 - 1
            turn, scale, shear = random[:, 0] * 0.22, 1 + 0.12 * random[:, 1:3], 0.15 * random[:, 3]
            cos, sin = turn.cos(), turn.sin()
            matrix = torch.stack(
                [
                    torch.stack([cos * scale[:, 0], -sin + shear, random[:, 4] * 0.05], 1),
                    torch.stack([sin, cos * scale[:, 1], random[:, 5] * 0.05], 1),
                ],
                1,
            )
            flow = functional.affine_grid(matrix, list(glyphs.shape), align_corners=False)
            copies.append(functional.grid_sample(glyphs, flow, align_corners=False))
        glyphs, labels = torch.cat(copies), np.tile(labels, _VARIANTS)
    return glyphs[:, 0].clamp(0, 1).numpy(), labels


def digit_grids(rng: np.random.Generator, count: int, size: int, split: Split) -> list[Picture]:
    """Grids of `size` x `size` random digits in random colours, a little off centre, on light and noisy paper."""
    glyphs, labels = _digits(split)
    cells = count * size * size
    sample, color = rng.integers(len(labels), size=cells), rng.integers(len(COLORS), size=cells)
    alpha = np.zeros((cells, CELL, CELL), dtype=np.float32)
    offset = rng.integers((CELL - GLYPH + 1) ** 2, size=cells)
    for place in range((CELL - GLYPH + 1) ** 2):
        top, left = divmod(place, CELL - GLYPH + 1)
        here = offset == place
        alpha[here, top : top + GLYPH, left : left + GLYPH] = glyphs[sample[here]]
    ink = _INK[color] + rng.uniform(-20, 20, size=(cells, 3)).astype(np.float32)
    paper = np.repeat(rng.uniform(222, 250, size=(count, 3)).astype(np.float32), size * size, axis=0)
    drawn = paper[:, None, None] + alpha[..., None] * (ink - paper)[:, None, None]
    drawn = drawn.reshape(count, size, size, CELL, CELL, 3).swapaxes(2, 3).reshape(count, size * CELL, size * CELL, 3)
    drawn += rng.uniform(-6, 6, size=(*drawn.shape[:3], 1)).astype(np.float32)
    pixels = drawn.clip(0, 255).astype(np.uint8)
    digits, colors = labels[sample].reshape(count, size, size), color.reshape(count, size, size)
    return [Picture(pixels[index], digits[index], colors[index]) for index in range(count)]


@functools.cache
def _shapes(split: Split) -> tuple[np.ndarray, list[list[tuple[str, str]]], list[tuple[int, int]]]:
    """All easy-VQA pictures of a split at 64 x 64, with their questions, shapes and colours."""
    spec = find_spec("easy_vqa")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("`easy_vqa` is not installed. Run `pip install easy-vqa`.")
    folder = Path(spec.origin).parent / "data" / split
    asked: dict[int, list[tuple[str, str]]] = {}
    for question, answer, index in json.loads((folder / "questions.json").read_text()):
        asked.setdefault(index, []).append((question, answer))
    pixels = np.stack([np.asarray(Image.open(folder / "images" / f"{index}.png").convert("RGB")) for index in asked])
    truth = []
    for questions in asked.values():
        shape, color = -1, -1
        for question, answer in questions:
            words = question.rstrip("?").split()
            if answer in SHAPES:
                shape = SHAPES.index(answer)
            elif answer in SHAPE_COLORS:
                color = SHAPE_COLORS.index(answer)
            # "is there a red circle" does not occur: a question names a shape or a colour, and "no" or "not" turns it.
            elif (answer == "yes") != bool({"no", "not"} & set(words)):
                shape = next((SHAPES.index(word) for word in words if word in SHAPES), shape)
                color = next((SHAPE_COLORS.index(word) for word in words if word in SHAPE_COLORS), color)
        truth.append((shape, color))
    return pixels, list(asked.values()), truth


def shape_pictures(rng: np.random.Generator, count: int, split: Split) -> list[Picture]:
    """easy-VQA pictures at 128 x 128 (16 image tokens); those for training are also mirrored and turned."""
    pixels, questions, truth = _shapes(split)
    found = []
    for index in rng.integers(len(pixels), size=count):
        picture = pixels[index]
        if split == "train":
            picture = np.rot90(picture, int(rng.integers(4)))
            picture = picture[:, ::-1] if rng.integers(2) else picture
        large = np.ascontiguousarray(picture.repeat(2, axis=0).repeat(2, axis=1))
        found.append(Picture(large, shape=truth[index], questions=questions[index]))
    return found
