"""Questions with earlier prompts that show their pictures in another context: of the tiny models, or of a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

Message = dict[str, Any]
EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
SYSTEM = "Answer the question about the image."
OTHER_SYSTEM = "You are a careful reader."
CONTEXTS = ("system", "position", "question", "caption", "two")
KINDS = ("digit", "color", "both")


@dataclass(frozen=True)
class Question:
    """One formal prompt.

    Args:
        messages (`list`): the prompt.
        answer (`str`): what is right.
        earlier (`dict[str, list]`): by context, prompts that show the pictures in another context than `messages`.
            `"system"`: only the system sentence differs. `"position"`: the question on the other side of the picture.
            `"question"`: another question in front of it. `"caption"`: the auxiliary prompt of the paper's section
            5.2 behind the picture, no system sentence. `"two"`: the picture is the second of two.
        group (`str`): layout of the prompt; results are also given for each.
    """

    messages: list[Message]
    answer: str
    earlier: dict[str, list[list[Message]]]
    group: str


@dataclass(frozen=True)
class Batch:
    """Questions that are asked together.

    Args:
        name (`str`): the same questions have the same name.
        questions (`list[Question]`): them.
    """

    name: str
    questions: list[Question]


def tiny_batches(count: int, seed: int, layouts: Sequence[str], sizes: Sequence[int], tokens: int) -> Iterator[Batch]:
    """Held-out questions of the tiny models, in batches of one layout and size, all cells in turn.

    Args:
        count (`int`): questions over all cells; rounded up so that all have as many.
        seed (`int`): of the questions.
        layouts (sequence of `str`): as in `tiny_models.tasks`.
        sizes (sequence of `int`): rows = columns of image tokens.
        tokens (`int`): image tokens of a batch, about.
    """
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    from tiny_models import tasks

    cells = [(layout, size) for layout in layouts for size in sizes]
    each = -(-count // len(cells))
    done = dict.fromkeys(cells, 0)
    part = 0
    while any(number < each for number in done.values()):
        for layout, size in cells:
            wanted = min(each - done[layout, size], max(1, tokens // size**2))
            if wanted <= 0:
                continue
            kind: Any = KINDS[part % len(KINDS)]
            drawn = tasks.samples(seed * 10_000 + part, wanted, kind, layout, size)  # type: ignore[arg-type]
            found = [Question(s.messages, s.answer, s.mismatched, layout) for s in drawn]
            done[layout, size] += wanted
            yield Batch(f"{seed}/{layout}/{size}/{kind}/{part}/{wanted}", found)
        part += 1


def file_batches(path: Path, count: int, layouts: Sequence[str], per_batch: int) -> Iterator[Batch]:
    """Questions of a JSON-lines file, each in every layout.

    Args:
        path (`Path`): one object a line with `image` (path, relative to the file), `auxiliary` (another question about
            it), `question`, `answer`.
        count (`int`): lines to take.
        layouts (sequence of `str`): the question stands `"after"` or `"before"` the picture.
        per_batch (`int`): questions of a batch.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:count]
    for number, line in enumerate(lines):
        missing = {"image", "auxiliary", "question", "answer"} - set(line)
        if missing:
            raise ValueError(f"Question {number} of {str(path)!r} lacks {sorted(missing)}.")
    for begin in range(0, len(lines), per_batch):
        for layout in layouts:
            part = range(begin, min(begin + per_batch, len(lines)))
            found = [_from_line(lines[i], lines[i - 1], layout, path.parent) for i in part]
            yield Batch(f"{path.name}/{layout}/{begin}/{len(found)}", found)


def _from_line(line: dict[str, str], neighbour: dict[str, str], layout: str, folder: Path) -> Question:
    if layout not in ("after", "before"):
        raise ValueError(f'The layouts of questions of a file are "after" and "before", got {layout!r}.')
    picture, stranger = (Image.open(folder / one["image"]).convert("RGB") for one in (line, neighbour))
    asked, auxiliary, first = line["question"], line["auxiliary"], layout == "before"
    earlier = {
        "system": [prompt([picture], asked, OTHER_SYSTEM, first)],
        "position": [prompt([picture], asked, SYSTEM, not first)],
        "question": [prompt([picture], auxiliary, SYSTEM, True)],
        "caption": [prompt([picture], auxiliary, "", False)],
        # not the stranger behind the system turn alone: for its own question that may be the very same context
        "two": [prompt([stranger, picture], "These are two images.", SYSTEM, True)],
    }
    return Question(prompt([picture], asked, SYSTEM, first), line["answer"], earlier, layout)


def prompt(pictures: list[Any], text: str, system: str, first: bool) -> list[Message]:
    """A system turn, if there is a sentence for it, and a user turn with the text in front of or behind pictures."""
    shown: list[Message] = [{"type": "image", "image": picture} for picture in pictures]
    said: list[Message] = [{"type": "text", "text": text}]
    start: list[Message] = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
    return [*start, {"role": "user", "content": said + shown if first else shown + said}]


def is_right(text: str, answer: str) -> bool:
    """Exact match, apart from case, outer blanks and a full stop."""
    return text.strip().rstrip(".").lower() == answer.strip().rstrip(".").lower()
