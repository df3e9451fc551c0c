"""Held-out questions as chat messages, each with earlier prompts that show its pictures in another context.

```python
from tiny_models import tasks  # examples/ on the path

for sample in tasks.samples(seed=0, count=100, kind="digit", layout="before", size=12):
    for earlier in sample.mismatched["question"]:  # fills the cache ...
        model.generate(**tasks.inputs(processor, earlier))
    output = model.generate(**tasks.inputs(processor, sample.messages))  # ... and this reuses it
```

Equal arguments give equal samples. Digit samples and layouts are those that training never saw; the system sentences
are known ones and, in three of seven samples, new ones of known words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from transformers import BatchFeature

from .grammar import (
    CAPTION,
    HELD_OUT_SYSTEMS,
    KINDS,
    OF_SHAPES,
    SYSTEMS,
    Kind,
    Message,
    conversation,
    question,
    questions_of,
)
from .pictures import Picture, digit_grids, generator, shape_pictures

Layout = Literal["after", "before", "turns", "two"]

LAYOUTS: tuple[Layout, ...] = ("after", "before", "turns", "two")
# Which earlier prompts a sample has: `Sample.mismatched` says what they are.
MISMATCHES: dict[str, tuple[str, ...]] = {
    "after": ("system", "position", "question", "caption", "two"),
    "before": ("system", "position", "question", "caption", "two"),
    "turns": ("system", "position", "question", "caption", "two"),
    "two": ("system", "question", "alone", "swapped"),
}
_OF_SYSTEMS = {"known": SYSTEMS[1:], "new": HELD_OUT_SYSTEMS}


@dataclass(frozen=True)
class Sample:
    """One held-out question.

    Args:
        kind (`str`): `"digit"`, `"color"`, `"both"`; of easy-VQA `"shape"` (what shape or color) and `"yes or no"`.
        layout (`str`): the question stands `"after"` the picture, `"before"` it, in a third of three `"turns"`, or
            after `"two"` pictures, about one of them.
        size (`int`): rows = columns of image tokens of each picture.
        messages (`list`): the prompt.
        answer (`str`): what the model should say.
        mismatched (`dict[str, list]`): earlier prompts, by name, in which the pictures stand in another context than
            in `messages`. `"system"`: only the system sentence differs. `"position"`: the question is on the other
            side of the picture. `"question"`: another question stands in front of the picture. `"caption"`: the
            auxiliary prompt of the paper's section 5.2, picture and request for a caption without the system turn.
            `"two"`: the picture is the second of two. For two pictures also `"alone"`: each in a prompt of its own,
            and `"swapped"`: in the other order.
    """

    kind: Kind
    layout: Layout
    size: int
    messages: list[Message]
    answer: str
    mismatched: dict[str, list[list[Message]]]


def samples(seed: int, count: int, kind: Kind, layout: Layout = "after", size: int = 8) -> list[Sample]:
    """Held-out questions of one kind.

    Args:
        seed (`int`): of the layouts.
        count (`int`): how many.
        kind (`str`): see `Sample`.
        layout (`str`, *optional*): see `Sample`; `"two"` is for digit grids only.
        size (`int`, *optional*): 4, 6, 8, 12 or 16 for digit grids; pictures of shapes are always 4.
    """
    if kind in OF_SHAPES and layout == "two":
        raise ValueError('There are no questions about two pictures of shapes: choose another layout than "two".')
    cell = (KINDS.index(kind), LAYOUTS.index(layout), size)
    return [_sample(generator("test", seed, *cell, index), kind, layout, size) for index in range(count)]


def inputs(processor: Any, messages: Sequence[Any], **kwargs: Any) -> BatchFeature:
    """Model inputs of one prompt, or of a list of prompts (padded on the left)."""
    options = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    if isinstance(messages[0], list):
        options["processor_kwargs"] = {"padding": True}
    return processor.apply_chat_template(messages, **options, **kwargs)


def held_out(rng: np.random.Generator, kind: Kind, count: int, size: int = 4) -> list[Picture]:
    """Held-out pictures that a kind of question can be asked about, each at least two of them."""
    if kind not in OF_SHAPES:
        return digit_grids(rng, count, size, "test")
    found: list[Picture] = []
    while len(found) < count:  # of some pictures easy-VQA has no question of a kind
        (picture,) = shape_pictures(rng, 1, "test")
        found += [picture] if len({asked for asked, _ in questions_of(picture, kind)}) > 1 else []
    return found


def _sample(rng: np.random.Generator, kind: Kind, layout: Layout, size: int) -> Sample:
    """Draws everything in one order, so that a sample depends on its seed alone."""
    known = rng.random() < 4 / 7
    systems = [str(sentence) for sentence in rng.permutation(_OF_SYSTEMS["known" if known else "new"])]
    system, other_system = systems[:2]
    picture, stranger = held_out(rng, kind, 2, size)
    if layout == "two":
        number = int(rng.integers(2)) + 1
        both = [picture, stranger]
        turn = question(rng, both[number - 1], kind, number)
        other = question(rng, both[2 - number], kind, 3 - number)
        earlier = {
            "system": [_prompt(both, [turn], other_system)],
            "question": [_prompt(both, [other], system, first=True)],
            "alone": [_prompt([one], [question(rng, one, kind)], system) for one in both],
            "swapped": [_prompt(both[::-1], [other], system)],
        }
        return Sample(kind, layout, picture.size, _prompt(both, [turn], system), turn[1], earlier)

    turn, other = question(rng, picture, kind), question(rng, picture, kind)
    while other[0] == turn[0]:
        other = question(rng, picture, kind)
    turns = [question(rng, picture, kind), other, turn] if layout == "turns" else [turn]
    first = layout == "before"
    earlier = {
        "system": [_prompt([picture], [turn], other_system, first)],
        "position": [_prompt([picture], [turn], system, not first)],
        "question": [_prompt([picture], [other], system, True)],
        "caption": [_prompt([picture], [(CAPTION, "")], "")],
        "two": [_prompt([stranger, picture], [question(rng, picture, kind, 2)], system)],
    }
    return Sample(kind, layout, picture.size, _prompt([picture], turns, system, first), turn[1], earlier)


def _prompt(pictures: list[Picture], turns: list[tuple[str, str]], system: str, first: bool = False) -> list[Message]:
    """A conversation without its last answer, with PIL images."""
    return shown(conversation(pictures, turns, system, first)[:-1])


def shown(messages: list[Message]) -> list[Message]:
    """A conversation of `grammar.conversation` with its pictures as the processor takes them."""
    return [
        {
            "role": message["role"],
            "content": [
                {**part, "image": part["image"].image()} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]
