"""What all rows share: counting, watching the clock, forking, and the bytes that a store's folder takes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sqlite3
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HANG_SECONDS = 60.0  # two orders of magnitude above what any single step takes
_KEPT_TROUBLES = 10


@dataclass
class Task:
    """What a row is asked to do.

    Args:
        folder (`Path`): an empty folder of its own.
        quick (`bool`): a few trials only.
        seed (`int`): of everything random.
    """

    folder: Path
    quick: bool
    seed: int = 0

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass
class Row:
    """One line of the table.

    Args:
        name (`str`): what was done to the store.
        trials (`int`): how often.
        hits (`int`), misses (`int`): look-ups, or requests, that were served and that were not.
        wrong (`int`): answers that differ from the stock model's, or entries that differ from what was stored.
        exceptions (`int`): calls that raised, and processes that ended otherwise than they should.
        hangs (`int`): steps that took longer than the watchdog allows.
        failures (`int`): whatever else must not be, for instance a store that stores nothing afterwards.
        over (`int`): the most bytes of entries and temporary files that were seen above the cap (negative: below).
        allowed (`int`): bytes above the cap that are right: one entry for each live writer.
        notes (`dict[str, int]`): other counts.
        troubles (`list[str]`): the first few things that went wrong.
    """

    name: str
    trials: int = 0
    hits: int = 0
    misses: int = 0
    wrong: int = 0
    exceptions: int = 0
    hangs: int = 0
    failures: int = 0
    over: int | None = None
    allowed: int = 0
    seconds: float = 0.0
    notes: dict[str, int] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        clean = not (self.wrong or self.exceptions or self.hangs or self.failures)
        return clean and (self.over is None or self.over <= self.allowed)

    def note(self, what: str, count: int = 1) -> None:
        self.notes[what] = self.notes.get(what, 0) + count

    def trouble(self, text: str) -> None:
        if len(self.troubles) < _KEPT_TROUBLES:
            self.troubles.append(text)

    def fail(self, text: str) -> None:
        self.failures += 1
        self.trouble(text)

    def saw(self, outcome: str, where: str) -> None:
        """Counts a `"hit"`, a `"miss"` or a `"wrong"` answer."""
        if outcome == "hit":
            self.hits += 1
        elif outcome == "miss":
            self.misses += 1
        else:
            self.wrong += 1
            self.trouble(f"{where}: {outcome}")

    def saw_bytes(self, total: int, cap: int, allowed: int, where: str = "") -> None:
        if total > cap + allowed:
            self.trouble(f"{where}: {total - cap} bytes over the cap, {allowed} allowed")
        self.over = max(total - cap, -cap if self.over is None else self.over)
        self.allowed = max(self.allowed, allowed)

    def add(self, counts: dict[str, Any], where: str) -> None:
        """Adds what another process counted, in the fields and notes of its own `Row`."""
        for name in ("hits", "misses", "wrong", "exceptions", "hangs", "failures"):
            setattr(self, name, getattr(self, name) + counts[name])
        for what, count in counts["notes"].items():
            self.note(what, count)
        for text in counts["troubles"]:
            self.trouble(f"{where}: {text}")


class Hang(BaseException):
    """The watchdog barked. Not an `Exception`: the store would take it for one of its own troubles."""


@contextlib.contextmanager
def attempt(row: Row, where: str, limit: float = HANG_SECONDS) -> Iterator[None]:
    """Counts what a block of the main thread raises, and interrupts it when it takes too long."""

    def bark(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    except Hang:
        row.hangs += 1
        row.trouble(f"{where}: hangs\n{traceback.format_exc(limit=-6)}")
    except Exception:
        row.exceptions += 1
        row.trouble(f"{where}: raises\n{traceback.format_exc(limit=-6)}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _mark(write: int) -> None:
    os.write(write, b"\n")


class Child:
    """A forked process, which needs no time to import torch. It sends one JSON value back, or nothing.

    Args:
        work (`Callable`): called with a function that tells the parent that something begins; returns the value.
    """

    def __init__(self, work: Callable[[Callable[[], None]], Any]) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._in_child(work, write)
        os.close(write)
        self._data = b""

    def _in_child(self, work: Callable[[Callable[[], None]], Any], write: int) -> None:
        code = 1
        try:
            os.close(self._read)
            signal.setitimer(signal.ITIMER_REAL, 0)
            value = work(lambda: _mark(write))
            data = json.dumps(value).encode()
            while data:
                data = data[os.write(write, data) :]
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # no exit handlers of the parent

    def wait_for_mark(self, limit: float = HANG_SECONDS) -> bool:
        """Waits until the child has begun. `False` when it did not, or ended before."""
        ready, _, _ = select.select([self._read], [], [], limit)
        return bool(ready) and os.read(self._read, 1) == b"\n"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def result(self, limit: float = HANG_SECONDS) -> tuple[str, Any]:
        """Waits for the end: `("done", value)`, `("killed", None)`, `("failed", None)` or `("hangs", None)`."""
        end = time.monotonic() + limit
        while True:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self.kill()
                break
            part = os.read(self._read, 1 << 16)
            if not part:
                break
            self._data += part
        os.close(self._read)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if not ready:
            return "hangs", None
        if code == -signal.SIGKILL:
            return "killed", None
        return ("done", json.loads(self._data)) if code == 0 else ("failed", None)


def collect(row: Row, child: Child, where: str, limit: float = HANG_SECONDS) -> Any:
    """The value of a child that should end well; counts it when it does not."""
    how, value = child.result(limit)
    if how == "hangs":
        row.hangs += 1
    elif how != "done":
        row.exceptions += 1
    if how != "done":
        row.trouble(f"{where}: the process {how}")
    return value


def used_bytes(folder: Path) -> int:
    """Bytes of all entries and temporary files. A file that moves while this looks is counted once."""
    sizes: dict[int, int] = {}
    for part in ("tmp", "kv", "vit"):
        for place, _, files in os.walk(folder / part):
            for file in files:
                with contextlib.suppress(OSError):
                    info = os.lstat(os.path.join(place, file))
                    sizes[info.st_ino] = info.st_size
    return sum(sizes.values())


def used_bytes_now(folder: Path) -> int | None:
    """The same at one moment: nothing is published or evicted while this holds the index. `None` when it is busy."""
    database = folder / "index" / "cache.db"
    if not database.exists():
        return None
    try:
        with contextlib.closing(sqlite3.connect(database, 0.05, isolation_level=None)) as lock:
            lock.execute("BEGIN IMMEDIATE")
            total = used_bytes(folder)
            lock.execute("ROLLBACK")
            return total
    except sqlite3.Error:
        return None


def temporary_files(folder: Path) -> list[Path]:
    """Files that are being written or were left behind."""
    return [path for path in (folder / "tmp").glob("*")] if (folder / "tmp").is_dir() else []
