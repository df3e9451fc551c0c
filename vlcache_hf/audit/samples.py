"""Prompts to audit: what a JSON-lines file says, and in which other prompts their images are met before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Messages = list[dict[str, Any]]

# What an image stands behind where nothing better is known; the second is for prompts that begin with the first.
NEUTRAL = ("Describe this image.", "What does this picture show?")


class SampleError(ValueError):
    """A file of prompts cannot be used; the message names the lines."""


@dataclass(frozen=True)
class AuditSample:
    """One prompt.

    Args:
        messages (`list[dict]`): a chat whose images are parts `{"type": "image", "image": path or PIL image}`.
        context (`list[dict]`, *optional*):
            The earlier chat in which its images are first met. Without it other samples with the same images serve.
        name (`str`): what it is called in reports of failures.
    """

    messages: Messages
    context: Messages | None = None
    name: str = ""


def read_samples(path: str | os.PathLike[str]) -> list[AuditSample]:
    """Reads a JSON-lines file of prompts.

    Each line is an object with `image` (a path) or `images`, relative to the file, and a `question`, before which they
    stand, with an optional `system` turn; or with `messages`, a chat whose parts `{"type": "image"}` stand for the
    images in turn or bring a path of their own as `image`. `context` is optional: the earlier prompt in which the
    images are first met, a text that stands before them or `messages`. Other fields are ignored.

    Args:
        path (`str` or `os.PathLike`): the file.

    Raises:
        `SampleError`: lines are no such objects, or images are not there.
    """
    file = Path(path)
    samples: list[AuditSample] = []
    problems: list[str] = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SampleError(f"{str(file)!r} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                samples.append(_sample(line, file.parent, f"line {number}"))
            except SampleError as problem:
                problems.append(f"line {number}: {problem}")
    if problems:
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise SampleError(f"{str(file)!r} cannot be used:\n  " + "\n  ".join(problems[:5]) + more)
    if not samples:
        raise SampleError(f"{str(file)!r} holds no prompts.")
    return samples


def _sample(line: str, folder: Path, name: str) -> AuditSample:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise SampleError(f"no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise SampleError("a JSON object is wanted, as {" + '"image": "a.png", "question": "What is it?"}')
    images = _images(fields, folder)
    question, messages, context = (fields.get(field) for field in ("question", "messages", "context"))
    if (question is None) == (messages is None):
        raise SampleError("one of `question` and `messages` is wanted")
    if messages is not None:
        chat = _resolve(messages, images, folder)
    elif not isinstance(question, str):
        raise SampleError(f"`question` must be a string, got {question!r}")
    else:
        chat = _chat(fields, images, question)
    if not any(True for _ in image_parts(chat)):
        raise SampleError("it shows no image: `image`, `images` or image parts in `messages` are wanted")
    if chat[-1]["role"] == "assistant":
        raise SampleError("the last turn is the assistant's: the answer is what the audit makes")
    if isinstance(context, str):
        return AuditSample(chat, _chat(fields, [part["image"] for part in image_parts(chat)], context, True), name)
    return AuditSample(chat, None if context is None else _resolve(context, images, folder), name)


def _images(fields: dict[str, Any], folder: Path) -> list[str]:
    given = fields.get("images", [fields["image"]] if "image" in fields else [])
    if not isinstance(given, list) or not all(isinstance(path, str) for path in given):
        raise SampleError(f"`images` must be a list of paths and `image` one path, got {given!r}")
    return [_existing(path, folder) for path in given]


def _existing(path: Any, folder: Path) -> str:
    file = folder / str(path)
    if not isinstance(path, str) or not file.is_file():
        raise SampleError(f"there is no image {str(file)!r}")
    return str(file.resolve())


def _chat(fields: dict[str, Any], images: Sequence[Any], text: str, text_first: bool = False) -> Messages:
    system = fields.get("system")
    if system is not None and not isinstance(system, str):
        raise SampleError(f"`system` must be a string, got {system!r}")
    parts = [{"type": "image", "image": image} for image in images]
    content = [_text(text), *parts] if text_first else [*parts, _text(text)]
    return [*([] if system is None else [{"role": "system", "content": [_text(system)]}]), _user(content)]


def _resolve(messages: Any, images: Sequence[str], folder: Path) -> Messages:
    """A chat with every image part bringing its own path."""
    if not isinstance(messages, list) or not messages:
        raise SampleError("a chat must be a list of messages")
    left, resolved = list(images), []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise SampleError(f"a message must have `role` and `content`, got {message!r}")
        parts = []
        for part in _parts(message.get("content")):
            if part.get("type") == "image":
                if "image" not in part and not left:
                    raise SampleError("`messages` show more images than `images` names")
                part = {"type": "image", "image": _existing(part["image"], folder) if "image" in part else left.pop(0)}
            parts.append(part)
        resolved.append({"role": message["role"], "content": parts})
    return resolved


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_text(content)]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise SampleError(f"`content` must be a string or a list of parts, got {content!r}")
    return content


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _user(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": content}


def image_parts(messages: Messages) -> Iterator[dict[str, Any]]:
    """The parts of a chat that are images."""
    for message in messages:
        yield from (part for part in _parts(message["content"]) if part["type"] == "image")


def _prefixes(messages: Messages) -> dict[Any, str]:
    """What stands before each image at its first place, by image; equal where the contexts are equal."""
    before: list[Any] = []
    prefixes: dict[Any, str] = {}
    for message in messages:
        before.append(["role", message["role"]])
        for part in _parts(message["content"]):
            if part["type"] == "image":
                prefixes.setdefault(_identity(part["image"]), json.dumps(before))
                before.append(["image", str(_identity(part["image"]))])
            else:
                before.append([part["type"], str(part.get("text", part))])
    return prefixes


def _identity(image: Any) -> Any:
    return image if isinstance(image, str) else os.fspath(image) if isinstance(image, os.PathLike) else id(image)


def earlier_prompts(samples: Sequence[AuditSample]) -> list[list[Messages]]:
    """The prompts after which each sample's images stand stored in another context than its own.

    Args:
        samples (sequence of `AuditSample`): all samples.

    Returns:
        `list[list[Messages]]`: per sample its `context`, else other samples with the same images, and for images that
        are in none of them a neutral prompt.
    """
    prefixes = [_prefixes(sample.messages) for sample in samples]
    met: dict[Any, dict[str, int]] = {}
    for index, own in enumerate(prefixes):
        for image, prefix in own.items():
            met.setdefault(image, {}).setdefault(prefix, index)
    result = []
    for sample, own in zip(samples, prefixes):
        prompts: list[Messages] = [] if sample.context is None else [sample.context]
        known = set() if sample.context is None else set(_prefixes(sample.context))
        images = {_identity(part["image"]): part["image"] for part in image_parts(sample.messages)}
        for image, prefix in own.items():
            if image in known:
                continue
            other = next((index for before, index in met[image].items() if before != prefix), None)
            if other is not None and sample.context is None:
                prompts += [samples[other].messages] if samples[other].messages not in prompts else []
            else:
                neutral = ([_user([_text(text), {"type": "image", "image": images[image]}])] for text in NEUTRAL)
                prompts.append(next(chat for chat in neutral if _prefixes(chat)[image] != prefix))
        result.append(prompts)
    return result
