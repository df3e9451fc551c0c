"""Results kept while an audit runs, so that a stopped one goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class PartialMismatch(ValueError):
    """A file of partial results belongs to another audit."""


class PartialResults:
    """Rows by kind and sample, in a JSON-lines file or in memory only.

    Args:
        path (`str` or `os.PathLike`, *optional*): the file; made if it is missing. Without one nothing is kept.
        identity (`dict`): what the rows depend on; a file made with another one is refused.

    Raises:
        `PartialMismatch`: the file belongs to another audit, or is none of these.
        `OSError`: the file cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: dict[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._rows: dict[tuple[str, int], Any] = {}
        if self._path is not None and self._path.exists() and self._path.stat().st_size:
            self._read(self._path, identity)
        else:
            self._append(identity)

    def _read(self, path: Path, identity: dict[str, Any]) -> None:
        whole, _, cut = path.read_bytes().rpartition(b"\n")
        try:
            header, *rows = [json.loads(line) for line in whole.splitlines()]
            known = set(header) == set(identity)
            found = {(row["kind"], row["sample"]): row["row"] for row in rows}
        except (ValueError, TypeError, KeyError):
            known = False
        if not known:
            raise PartialMismatch(f"{str(path)!r} holds no partial results. Give another file.")
        if header != identity:
            changed = ", ".join(name for name in identity if header[name] != identity[name])
            raise PartialMismatch(
                f"{str(path)!r} holds partial results of another audit (other {changed}). Delete it, or give another "
                "file."
            )
        if cut:  # a line that was being written when the process was stopped
            os.truncate(path, len(whole) + 1)
        self._rows = found

    def _append(self, line: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def get(self, kind: str, sample: int, default: Any = None) -> Any:
        """The row of a sample, `default` when there is none yet."""
        return self._rows.get((kind, sample), default)

    def put(self, kind: str, sample: int, row: Any) -> None:
        """Keeps the row of a sample."""
        self._rows[kind, sample] = row
        self._append({"kind": kind, "sample": sample, "row": row})
