"""What is calibrated on: one image and a question, and the auxiliary prompt that gave the stored KV."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

AUXILIARY = "Please describe this image."
QUESTIONS = (
    "What is the main subject of this image?",
    "Which colors stand out?",
    "What text can be read here, if any?",
    "How many objects are there, and which?",
    "What is in the background?",
    "Where was this most likely made?",
    "What is at the top left?",
    "What would you ask about this, and what is the answer?",
)
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw")


@dataclass(frozen=True)
class CalibrationSample:
    """One prompt about one image.

    Args:
        messages (`list`): chat messages, up to the question. The image must stand in another context than in
            `auxiliary`: a question in front of it, or another system turn. Text behind an image changes nothing of
            its KV, so an image that comes first in both prompts has nothing to measure.
        auxiliary (`list`): chat messages that show the same image with a neutral prompt; their KV is what is reused
            (paper section 3.2).
        answer (`str`, *optional*): the text that is teacher-forced; by default what the model itself says.
    """

    messages: list[dict[str, Any]]
    auxiliary: list[dict[str, Any]]
    answer: str | None = None

    @classmethod
    def about(
        cls, image: Any, question: str, answer: str | None = None, system: str | None = None
    ) -> CalibrationSample:
        """A question in front of an image, and the paper's neutral prompt in its place.

        Args:
            image (`PIL.Image.Image`, path or URL): as chat templates take it.
            question (`str`): the question.
            answer (`str`, *optional*): see `CalibrationSample`.
            system (`str`, *optional*): the system turn of both prompts.
        """
        before = [] if system is None else [{"role": "system", "content": [{"type": "text", "text": system}]}]
        shown = {"type": "image", "image": image}
        asked, neutral = (
            [*before, {"role": "user", "content": [{"type": "text", "text": text}, shown]}]
            for text in (question, AUXILIARY)
        )
        return cls(asked, neutral, answer)


@dataclass(frozen=True)
class TokenSample:
    """A sample as model inputs, batches of one.

    Args:
        inputs (`dict`): the prompt: `input_ids`, `pixel_values`, `image_grid_thw`, `mm_token_type_ids`, ...
        auxiliary (`dict`): the auxiliary prompt.
        answer (`tuple[int, ...]`, *optional*): token ids of the answer; by default generated.
    """

    inputs: dict[str, torch.Tensor]
    auxiliary: dict[str, torch.Tensor]
    answer: tuple[int, ...] | None = None

    def digest(self) -> str:
        """Of everything in it."""
        digest = hashlib.sha256(repr(self.answer).encode())
        for inputs in (self.inputs, self.auxiliary):
            for name, value in sorted(inputs.items()):
                digest.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
                digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Samples(Sequence[TokenSample]):
    """Samples that are turned into tensors when they are looked at: the pixels of all of them may take gigabytes.

    Args:
        given (sequence of `CalibrationSample` or `TokenSample`): the samples.
        processor (`ProcessorMixin`, *optional*): turns messages into tensors; not needed for `TokenSample`s.
        device (`torch.device`, *optional*): where the tensors go.
    """

    given: Sequence[CalibrationSample | TokenSample]
    processor: Any = None
    device: Any = field(default="cpu")

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: Any) -> Any:
        sample = self.given[index]
        if isinstance(sample, TokenSample):
            inputs, auxiliary = (
                {name: value.to(self.device) for name, value in part.items()}
                for part in (sample.inputs, sample.auxiliary)
            )
            return TokenSample(inputs, auxiliary, sample.answer)
        answer = None
        if sample.answer is not None:
            ids = self.processor.tokenizer(sample.answer, add_special_tokens=False)["input_ids"]
            answer = (*ids, self.processor.tokenizer.eos_token_id)
        return TokenSample(self._encode(sample.messages), self._encode(sample.auxiliary), answer)

    def _encode(self, messages: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        encoded = self.processor.apply_chat_template(
            [_opened(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        unknown = sorted(name for name in encoded if name not in _INPUTS)
        if unknown:
            raise ValueError(f"A sample holds one image and text, but the processor also made {unknown}.")
        return dict(encoded.to(self.device))


def _opened(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its image files opened by Pillow, as requests bring them."""
    from PIL import Image

    content = message["content"]
    if isinstance(content, str):
        return message
    parts = []
    for part in content:
        image = part.get("image")
        if isinstance(image, (str, os.PathLike)) and os.path.isfile(image):
            picture = Image.open(image)
            picture.load()
            part = {**part, "image": picture}
        parts.append(part)
    return {**message, "content": parts}


def from_folder(
    folder: Path, count: int, held_out: int = 0, seed: int = 0
) -> tuple[list[CalibrationSample], list[CalibrationSample]]:
    """Samples about the images of a folder, with questions from a short list; the model itself answers.

    Args:
        folder (`Path`): with images, also in folders below it.
        count (`int`): samples to calibrate on.
        held_out (`int`, *optional*, defaults to 0): samples to check the result on, about other images.
        seed (`int`, *optional*, defaults to 0): of the order of images and questions.

    Returns:
        `tuple[list, list]`: samples to calibrate on, and to check on.

    Raises:
        `ValueError`: there are too few images.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    random.Random(seed).shuffle(paths)
    kept = round(len(paths) * held_out / max(count + held_out, 1))
    if held_out and len(paths) > 1:
        kept = min(max(kept, 1), len(paths) - 1)
    return _ask(folder, paths[kept:], count, seed), _ask(folder, paths[:kept], held_out, seed + 1)


def _ask(folder: Path, paths: Sequence[Path], count: int, seed: int) -> list[CalibrationSample]:
    if count > len(paths) * len(QUESTIONS):
        raise ValueError(
            f"{str(folder)!r} has {len(paths)} image(s) for {count} samples, and each image serves for at most "
            f"{len(QUESTIONS)}: add images or ask for fewer samples."
        )
    first = random.Random(seed).randrange(len(QUESTIONS))
    found = []
    for index in range(count):
        turn, image = divmod(index, len(paths))
        question = QUESTIONS[(first + turn + image) % len(QUESTIONS)]
        found.append(CalibrationSample.about(str(paths[image]), question))
    return found


def from_file(
    file: Path, folder: Path, count: int, held_out: int = 0, seed: int = 0
) -> tuple[list[CalibrationSample], list[CalibrationSample]]:
    """Samples from a JSON-lines file: `{"image": "a.png", "question": "...", "answer": "...", "system": "..."}`.

    `answer` and `system` may be left out. Held-out samples are other lines, which may show the same images.

    Args:
        file (`Path`): the file.
        folder (`Path`): what `image` is relative to.
        count (`int`), held_out (`int`, *optional*), seed (`int`, *optional*): see `from_folder`.

    Raises:
        `ValueError`: a line is not like this, or there are too few.
    """
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            found.append(_from_line(line, folder, f"{str(file)!r}, line {number}"))
    if len(found) < count + held_out:
        raise ValueError(f"{str(file)!r} has {len(found)} prompts, {count + held_out} are asked for.")
    random.Random(seed).shuffle(found)
    return found[:count], found[count : count + held_out]


def _from_line(line: str, folder: Path, where: str) -> CalibrationSample:
    try:
        row = json.loads(line)
        image, question = folder / row.pop("image"), row.pop("question")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f'{where}: a prompt is {{"image": ..., "question": ...}}, got {line[:80]!r}.') from error
    if not image.is_file():
        raise ValueError(f"{where}: there is no image {str(image)!r}.")
    unknown = sorted(set(row) - {"answer", "system"})
    if unknown:
        raise ValueError(f"{where}: unknown key(s) {unknown}.")
    return CalibrationSample.about(str(image), question, row.get("answer"), row.get("system"))
