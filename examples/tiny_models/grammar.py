"""The language of the tiny models: words, questions, system sentences, and the conversations made of them."""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np

from .pictures import COLORS, SHAPE_COLORS, SHAPES, SIZES, Picture

Kind = Literal["digit", "color", "both", "shape", "yes or no"]
Message = dict[str, Any]

KINDS: tuple[Kind, ...] = ("digit", "color", "both", "shape", "yes or no")
OF_SHAPES: tuple[Kind, ...] = ("shape", "yes or no")  # of easy-VQA: what shape or color there is; whether there is one

QUESTIONS: dict[str, tuple[str, ...]] = {
    "digit": ("What digit is at row {row} column {column}{of}?", "Which digit is in row {row} column {column}{of}?"),
    "color": ("What color is row {row} column {column}{of}?", "Which color is at row {row} column {column}{of}?"),
    "both": ("What is at row {row} column {column}{of}?", "What is in row {row} column {column}{of}?"),
}
CAPTION = "Describe the picture."
SYSTEMS: tuple[str, ...] = (
    "",
    "You are a helpful assistant.",
    "Be brief.",
    "Answer with one word.",
    "You read pictures and answer questions.",
    "Today is a good day.",
    "Look at the picture and answer the question.",
    "You are a careful reader of digits.",
    "Be a good assistant and be brief.",
    "You are a reader. Be careful and answer with a word.",
)
# Only in held-out conversations. Their words are known, their sentences are not.
HELD_OUT_SYSTEMS: tuple[str, ...] = (
    "You are a careful assistant.",
    "Look at the picture.",
    "Today you are brief. Answer the question with one word.",
    "Be a careful reader of pictures and answer with a word.",
)
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<unk>",
)
_SHAPE_WORDS = (
    "a circle rectangle triangle shape image color contain does in is no not of present the there what yes no".split()
)
_TOKEN = re.compile(r"<\|?[a-z_]+\|?>|\w+|[^\w\s]")


def tokens(text: str) -> list[str]:
    """Words, punctuation and special tokens of a text. The tokenizer of the models splits in the same way."""
    return _TOKEN.findall(text.lower())


def vocabulary() -> dict[str, int]:
    """Every token with its id; padded to a multiple of 32 by reserved tokens."""
    found = list(SPECIAL) + ["system", "user", "assistant"] + [str(number) for number in range(max(SIZES) + 1)]
    texts = [CAPTION, *SYSTEMS, *HELD_OUT_SYSTEMS, *_SHAPE_WORDS, *COLORS, *SHAPES, *SHAPE_COLORS]
    texts += [form.format(row=1, column=1, of=" of picture 1") for forms in QUESTIONS.values() for form in forms]
    texts += ["picture 1:", "digits in 4 rows and 4 columns", "a red circle"]
    for text in texts:
        found += tokens(text)
    found = list(dict.fromkeys(found))
    found += [f"<reserved_{index}>" for index in range(-len(found) % 32)]
    return {token: index for index, token in enumerate(found)}


def questions_of(picture: Picture, kind: Kind | None = None) -> list[tuple[str, str]]:
    """The questions of easy-VQA about a picture and their answers; of one kind, or all."""
    return [one for one in picture.questions if kind is None or (one[1] in ("yes", "no")) == (kind == "yes or no")]


def question(
    rng: np.random.Generator, picture: Picture, kind: Kind | None = None, number: int | None = None
) -> tuple[str, str]:
    """A question about a picture, and its answer.

    Args:
        rng (`np.random.Generator`): chooses place and wording.
        picture (`Picture`): a digit grid or a picture of a shape.
        kind (`str`, *optional*): `"digit"`, `"color"` or `"both"` for a digit grid, `"shape"` or `"yes or no"` for a
            picture of a shape; at random by default.
        number (`int`, *optional*): where there are two pictures, which one is meant.
    """
    if picture.digits is None or picture.colors is None:
        known = questions_of(picture, kind)
        asked, answer = known[int(rng.integers(len(known)))]
        return asked[:1].upper() + asked[1:], answer
    kind = kind or KINDS[int(rng.integers(3))]
    row, column = (int(place) for place in rng.integers(picture.size, size=2))
    forms = QUESTIONS[kind]
    of = "" if number is None else f" of picture {number}"
    asked = forms[int(rng.integers(len(forms)))].format(row=row + 1, column=column + 1, of=of)
    digit, color = str(picture.digits[row, column]), COLORS[picture.colors[row, column]]
    return asked, {"digit": digit, "color": color, "both": f"{color} {digit}"}[kind]


def caption(picture: Picture) -> str:
    """What `CAPTION` is answered with."""
    if picture.shape is not None:
        return f"a {SHAPE_COLORS[picture.shape[1]]} {SHAPES[picture.shape[0]]}"
    return f"digits in {picture.size} rows and {picture.size} columns"


def pictures_part(pictures: list[Picture]) -> list[dict[str, Any]]:
    """The content parts of one or more pictures; where there are several, each has its number in front."""
    parts: list[dict[str, Any]] = []
    for number, picture in enumerate(pictures, start=1):
        if len(pictures) > 1:
            parts.append(text_part(f"Picture {number}:"))
        parts.append({"type": "image", "image": picture})
    return parts


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def conversation(
    pictures: list[Picture], turns: list[tuple[str, str]], system: str = "", question_first: bool = False
) -> list[Message]:
    """Messages whose first user turn shows the pictures; the answer of the last turn is part of them.

    Args:
        pictures (`list[Picture]`): shown in the first user turn.
        turns (`list[tuple[str, str]]`): question and answer of each turn.
        system (`str`, *optional*): the system sentence; `""` leaves the system turn out.
        question_first (`bool`, *optional*): put the first question in front of the pictures instead of behind them.
    """
    messages: list[Message] = [{"role": "system", "content": [text_part(system)]}] if system else []
    for index, (asked, answer) in enumerate(turns):
        content = [text_part(asked)]
        if index == 0:
            shown = pictures_part(pictures)
            content = content + shown if question_first else shown + content
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": [text_part(answer)]})
    return messages
