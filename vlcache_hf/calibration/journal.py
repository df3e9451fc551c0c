"""What is done of a calibration, a line for each part, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

JOURNAL_NAME = "calibration.jsonl"


class Journal:
    """A file of JSON lines. The first says which settings the others belong to.

    Args:
        file (`Path`, *optional*): the file; `None` keeps nothing.
        settings (`dict`): everything that what is measured depends on.

    Raises:
        `ValueError`: the file belongs to other settings.
    """

    def __init__(self, file: Path | None, settings: dict[str, Any]) -> None:
        self._file = file
        settings = json.loads(json.dumps(settings))  # as it comes back from the file
        self.digest = digest(settings)
        self.done: dict[str, dict[str, Any]] = {}
        if file is None:
            return
        lines = [_parsed(line) for line in file.read_bytes().splitlines()] if file.is_file() else []
        head = lines[0] if lines else None
        if head is not None and head.get("digest") != self.digest:
            given = head.get("settings", {})
            changed = sorted(name for name in {*given, *settings} if given.get(name) != settings.get(name))
            raise ValueError(
                f"{str(file)!r} belongs to a calibration with another {', '.join(changed) or 'digest'}. "
                "Give another folder, or delete the file to start anew."
            )
        kept = [line for line in lines[1:] if line is not None]
        self.done = {line["part"]: line["result"] for line in kept}
        # written anew: a line that was cut off in the middle must not be continued
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".tmp")
        first = {"digest": self.digest, "settings": settings}
        new.write_text("".join(json.dumps(line) + "\n" for line in (first, *kept)), encoding="utf-8")
        os.replace(new, file)

    def add(self, part: str, result: dict[str, Any]) -> None:
        """Notes a part as done.

        Args:
            part (`str`): its name.
            result (`dict`): what was found; numbers survive JSON bit for bit.
        """
        self.done[part] = result
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"part": part, "result": result}) + "\n")
                stream.flush()
                os.fsync(stream.fileno())


def digest(settings: dict[str, Any]) -> str:
    """Of settings that are JSON."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
