"""SIGKILL of writers: at any time, at chosen places, several at once, and of a model in the middle of a request."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import entries
from harness import Child, Row, Task, attempt, collect, temporary_files, used_bytes
from tqdm import tqdm
from world import World

from vlcache_hf.store import DiskStore
from vlcache_hf.store import disk as disk_module
from vlcache_hf.store import index as index_module
from vlcache_hf.store import layout as layout_module
from vlcache_hf.store.backend import EntryCache, EntryDisk
from vlcache_hf.store.index import Index
from vlcache_hf.store.temporary import temporary_file

# where a writer dies: owner and name of a function, and whether it has run by then
POINTS: dict[str, tuple[Any, str, bool]] = {
    "inside write_entry": (layout_module, "_finite", False),
    "last byte written": (disk_module, "write_entry", True),
    "before publish": (Index, "publish", False),
    "before os.replace": (Index, "_place", False),
    "after os.replace": (Index, "_place", True),
    "before the commit": (EntryCache, "set", True),
    "after the commit": (Index, "publish", True),
    "eviction, before unlink": (EntryDisk, "remove", False),
    "eviction, before the commit": (EntryCache, "remove", True),
    "opening, no tables yet": (EntryCache, "__init__", False),
    "opening, before the files are compared": (index_module, "reconcile", False),
    "opening, after it": (index_module, "reconcile", True),
    "rebuild, the old one moved": (index_module.shutil, "rmtree", False),
}
OPENING = [name for name in POINTS if name.startswith(("opening", "rebuild"))]


def die_at(point: str, after_times: int) -> None:
    """Makes this process kill itself at a place."""
    owner, name, after = POINTS[point]
    real, left = getattr(owner, name), [after_times]

    def count() -> None:
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not after:
            count()
        result = real(*args, **kwargs)
        if after:
            count()
        return result

    setattr(owner, name, wrapped)


def writer(folder: Path, cap: int, seed: int, begin: Callable[[], None], point: str | None = None) -> None:
    """Stores and reads entries until it is killed."""
    if point is not None:
        # what happens while the index is opened happens once
        die_at(point, 1 if point in OPENING else 1 + seed % 7)
    rng = random.Random(seed)
    store = DiskStore(folder, cap)
    if rng.random() < 0.3:
        begin()  # so that some die while they open the index
        begin = lambda: None  # noqa: E731
    while True:
        number = rng.randrange(entries.POOL)
        if rng.random() < 0.3:
            entries.look(store, number)
        else:
            entries.put(store, number, max_in_group=2)
        begin()
        begin = lambda: None  # noqa: E731


class Checker:
    """Looks at a folder after a kill.

    Args:
        row (`Row`): where it counts.
        folder (`Path`): the store's.
        entry (`int`): bytes of the largest entry.
        cap (`int`): bytes that the store may take.
    """

    def __init__(self, row: Row, folder: Path, entry: int, cap: int) -> None:
        self.row, self.folder, self.entry, self.cap = row, folder, entry, cap

    def __call__(self, where: str, number: int, writers: int, age: bool) -> None:
        """What must hold: every entry is right or a miss, bytes stay below the cap, and the next writer can work."""
        row = self.row
        row.trials += 1
        row.saw_bytes(used_bytes(self.folder), self.cap, writers * self.entry, where)
        left = temporary_files(self.folder)
        row.note("temporary files left", len(left))
        if age:  # as if two minutes had passed, and an hour for folders, which cannot be locked
            for path in left:
                then = time.time() - (7200 if path.is_dir() else 120)
                os.utime(path, (then, then))
        with attempt(row, where):
            store = DiskStore(self.folder, self.cap)
            for other in range(entries.POOL):
                row.saw(entries.look(store, other), where)
            self._next_writer(store, number, where, age)
            store.close()

    def _next_writer(self, store: DiskStore, number: int, where: str, age: bool) -> None:
        row = self.row
        if entries.put(store, number) == 0:
            orphans = sum(path.stat().st_size for path in temporary_files(self.folder) if path.is_file())
            if orphans + self.entry > self.cap:
                row.note("puts refused: orphans fill the cap")
            else:
                row.fail(f"{where}: the next writer stores nothing ({store.faults} faults)")
        elif entries.look(store, number) != "hit":
            row.fail(f"{where}: what the next writer stored is not there")
        elif age and temporary_files(self.folder):
            row.fail(f"{where}: old temporary files stay")
        row.note("faults of the next writer", store.faults)
        row.saw_bytes(used_bytes(self.folder), self.cap, self.entry, where)
        files = sum(path.stat().st_size for kind in ("kv", "vit") for path in (self.folder / kind).rglob("*.s*"))
        if store.nbytes() != files:
            row.note("index and files disagree")


def _limits(task: Task) -> tuple[int, int]:
    entry = max(entries.file_size(number, str(task.folder / "measure")) for number in range(len(entries.ROWS)))
    return entry, 5 * entry // 2  # a few: eviction must have work


def _reap(row: Row, child: Child, where: str, must_die: bool = True) -> None:
    how, _ = child.result()
    if how != "killed" and (must_die or how != "done"):
        row.exceptions += 1
        row.trouble(f"{where}: the writer {how}")


def kills_random(task: Task) -> Row:
    """A writer dies at any time; one folder sees all of it."""
    row, rng = Row("SIGKILL of a writer, at random times"), random.Random(task.seed)
    entry, cap = _limits(task)
    check = Checker(row, task.folder / "store", entry, cap)
    for trial in tqdm(range(task.count(240, 12)), desc="kills_random", disable=None):
        seed = rng.randrange(2**31)
        child = Child(lambda begin, seed=seed: writer(check.folder, cap, seed, begin))
        child.wait_for_mark()
        time.sleep(rng.random() * 0.04)
        child.kill()
        _reap(row, child, f"trial {trial}")
        check(f"trial {trial}", rng.randrange(entries.POOL), 1, age=trial % 2 == 1)
    return row


def kills_points(task: Task) -> Row:
    """A writer dies exactly where it would hurt."""
    row, rng = Row("SIGKILL of a writer, at chosen places"), random.Random(task.seed)
    entry, cap = _limits(task)
    check = Checker(row, task.folder / "store", entry, cap)
    plan = [(point, turn) for turn in range(task.count(8, 1)) for point in POINTS]
    for trial, (point, turn) in enumerate(tqdm(plan, desc="kills_points", disable=None)):
        if point.startswith("rebuild"):
            database = check.folder / "index" / "cache.db"
            database.write_bytes(b"garbage" * 100)
        seed = rng.randrange(2**31)
        child = Child(lambda begin, seed=seed, point=point: writer(check.folder, cap, seed, lambda: None, point))
        _reap(row, child, point)
        check(point, rng.randrange(entries.POOL), 1, age=turn % 2 == 1)
    return row


def kills_at_once(task: Task) -> Row:
    """Four writers die together, as with a container that is stopped."""
    row, rng, writers = Row("SIGKILL of four writers at once"), random.Random(task.seed), 4
    entry, cap = _limits(task)
    check = Checker(row, task.folder / "store", entry, cap)
    for trial in tqdm(range(task.count(25, 2)), desc="kills_at_once", disable=None):
        seeds = [rng.randrange(2**31) for _ in range(writers)]
        children = [Child(lambda begin, seed=seed: writer(check.folder, cap, seed, begin)) for seed in seeds]
        for child in children:
            child.wait_for_mark()
        time.sleep(rng.random() * 0.05)
        for child in children:
            child.kill()
        for child in children:
            _reap(row, child, f"trial {trial}")
        check(f"trial {trial}", rng.randrange(entries.POOL), writers, age=trial % 2 == 1)
    return row


def kills_model(task: Task) -> Row:
    """A model dies in the middle of a cold request; another process asks the same and more."""
    row, rng, world = Row("SIGKILL of a model in a cold request"), random.Random(task.seed), World(6)
    places = [None, "inside write_entry", None, "after os.replace", None, "before the commit"]

    def victim(folder: Path, behind: bool, point: str | None, begin: Callable[[], None]) -> None:
        if point is not None:
            die_at(point, 2)
        model = world.model(folder, write_behind=behind, max_ram_bytes=2**20 if behind else 0)
        model.vlcache.model_keys(model.model, "")  # reads the weights, so that the kill falls into the request
        begin()
        while True:
            for number in range(6):
                world.ask(Row(""), model, number, "victim")
            model.vlcache.flush()
            model.vlcache.clear()

    def survivor(folder: Path, where: str) -> dict[str, Any]:
        mine = Row("")
        model = world.model(folder)
        for turn in range(2):
            for number in range(6):
                with attempt(mine, where):
                    if world.ask(mine, model, number, where) != "exact" and turn == 1:
                        mine.fail(f"{where}: prompt {number} was not stored")
        mine.note("faults", model.vlcache.stats().faults)
        return mine.__dict__

    for trial in tqdm(range(task.count(24, 3)), desc="kills_model", disable=None):
        folder, behind, point = task.folder / str(trial), trial % 2 == 0, places[trial % len(places)]
        where = f"trial {trial} ({point})"
        child = Child(lambda begin: victim(folder, behind, point, begin))
        child.wait_for_mark()
        if point is None:
            time.sleep(rng.random() * 0.06)
            child.kill()
        _reap(row, child, where)
        row.trials += 1
        counts = collect(row, Child(lambda begin: survivor(folder, where)), where)
        if counts is not None:
            row.add(counts, where)
    return row


def kills_orphans(task: Task) -> Row:
    """What a killed writer leaves fills the cap: for a minute nothing is stored, then all is as before. A writer that
    lives, however slow, keeps its file."""
    row, number = Row("cap filled by what a killed writer left"), 3
    entry = entries.file_size(number, str(task.folder / "measure"))
    cap, real = 2 * entry, layout_module.write_entry

    def dies(file: Any, layout: Any) -> None:
        real(file, layout)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def victim(folder: Path) -> None:
        disk_module.write_entry = dies
        entries.put(DiskStore(folder, None), number)

    for trial in tqdm(range(task.count(60, 4)), desc="kills_orphans", disable=None):
        folder, where = task.folder / str(trial), f"trial {trial}"
        store = DiskStore(folder, cap)
        small = entries.put(store, 0)
        with temporary_file(folder) as alive:
            with alive.open() as file:
                file.write(bytes(entry - small))
            os.utime(alive.path, (1, 1))
            _reap(row, Child(lambda begin, folder=folder: victim(folder)), where)
            (orphan,) = (path for path in temporary_files(folder) if path != alive.path)
            row.trials += 1
            with attempt(row, where):
                if entries.put(store, 1) or store.faults != 1:
                    row.fail(f"{where}: stored above the cap ({store.faults} faults)")
                then = time.time() - 120
                os.utime(orphan, (then, then))
                if not entries.put(store, 1):
                    row.fail(f"{where}: the cap stays closed")
                if temporary_files(folder) != [alive.path]:
                    row.fail(f"{where}: {temporary_files(folder)} instead of what is being written")
                for other in (0, 1):
                    row.saw(entries.look(store, other), where)
                row.saw_bytes(used_bytes(folder), cap, 0, where)
        store.close()
    return row


ROWS = [kills_random, kills_points, kills_at_once, kills_orphans, kills_model]
