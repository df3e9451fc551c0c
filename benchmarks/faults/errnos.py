"""Every errno at every file operation that the store performs."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import entries
from harness import Row, Task, attempt, temporary_files, used_bytes
from inject import ERRNOS, Injector, is_change
from tqdm import tqdm
from world import World, close_stores

from vlcache_hf import VLCache
from vlcache_hf.store import DiskStore

_ROWS = 300  # of each entry: small, so that thousands of trials take a minute


def _story(row: Row, folder: Path, cap: int, where: str) -> None:
    """All that a store does: it opens, writes, evicts, replaces, reads, marks and discards, and is opened again."""
    with attempt(row, where):
        store = DiskStore(folder, cap, min_free_bytes=1)
        for number in (0, 1, 2):  # the third must make room
            entries.put(store, number, _ROWS)
        row.saw(entries.look(store, 2, _ROWS), where)
        store.mark("met")
        store.marked("met")
        store.close()
    with attempt(row, where):
        store = DiskStore(folder, cap, min_free_bytes=1)
        row.saw(entries.look(store, 1, _ROWS), where)
        entries.put(store, 0, _ROWS, max_in_group=1)  # its group has two by now
        store.discard(*entries.key(1))
        store.nbytes()
        row.saw(entries.look(store, 0, _ROWS), where)
        store.close()


def _afterwards(row: Row, folder: Path, cap: int, where: str) -> None:
    """The fault is over: the store must work, also for one that was there all the time."""
    with attempt(row, where):
        store = DiskStore(folder, cap)
        for number in (2, 4):
            if not entries.put(store, number, _ROWS) or entries.look(store, number, _ROWS) != "hit":
                row.fail(f"{where}: stores nothing afterwards")
        row.note("index rebuilt or bad entry afterwards", store.faults)
        store.close()


def errnos_store(task: Task) -> Row:
    """The full matrix: operation x errno, and again with an error that comes after the effect."""
    row, rng = Row("errno at every operation of the store"), random.Random(task.seed)
    entry = entries.put(DiskStore(task.folder / "measure", None), 0, _ROWS)
    cap, folder = 2 * entry + entry // 2, task.folder / "store"
    clean = Injector(folder)
    with clean.armed():
        _story(Row(""), folder, cap, "clean")
    row.note("operations", len(clean.log))
    for what, count in Counter(what.split()[0] for what in clean.log).items():
        row.note(f"operations: {what}", count)
    points = [(at, name, False) for at in range(1, len(clean.log) + 1) for name in ERRNOS]
    points += [(at, name, True) for at, name, _ in points if is_change(clean.log[at - 1])]
    if task.quick:
        points = rng.sample(points, 60)
    for at, name, late in tqdm(points, desc="errnos_store", disable=None):
        shutil.rmtree(folder, ignore_errors=True)
        where = f"{name}{' late' if late else ''} at {at} ({clean.log[at - 1]})"
        injector = Injector(folder, at, name, late)
        row.trials += 1
        with injector.armed():
            _story(row, folder, cap, where)
        if not injector.fired:
            row.note("not reached")
        row.note("temporary files left", len(temporary_files(folder)))
        _afterwards(row, folder, cap, where)
        row.saw_bytes(used_bytes(folder), cap, entry, where)
    return row


def errnos_model(task: Task) -> Row:
    """A sample of the matrix, in cold and warm requests."""
    row, rng, world = Row("errno in cold and warm requests"), random.Random(task.seed), World(2)
    models = {behind: world.model(task.folder / "unused", write_behind=behind) for behind in (False, True)}

    def story(counts: Row, folder: Path, behind: bool, where: str) -> None:
        settings: dict[str, Any] = {
            "cache_dir": folder,
            "write_behind": behind,
            "max_ram_bytes": 2**20 if behind else 0,
        }
        model = models[behind]
        for number in (0, 1, 0, 1):
            with attempt(counts, where):
                world.ask(counts, model, number, where, VLCache(**settings))
                model.vlcache.flush()
        counts.note("faults counted by the store", model.vlcache.stats().faults)
        close_stores(model)

    for behind in models:  # reads the weights
        story(Row(""), task.folder / f"warm-up {behind}", behind, "warm-up")
    logs = {}
    for behind in models:
        clean = Injector(task.folder / f"clean {behind}")
        with clean.armed():
            story(Row(""), task.folder / f"clean {behind}", behind, "clean")
        logs[behind] = clean.log
        row.note(f"operations, {'in the background' if behind else 'at once'}", len(clean.log))
    folder = task.folder / "store"
    for trial in tqdm(range(task.count(480, 24)), desc="errnos_model", disable=None):
        shutil.rmtree(folder, ignore_errors=True)
        behind, name, late = trial % 3 == 0, ERRNOS[trial % len(ERRNOS)], rng.random() < 0.3
        at = rng.randint(1, len(logs[behind]))
        where = f"{name}{' late' if late else ''} at {at} ({logs[behind][at - 1]}, background {behind})"
        injector = Injector(folder, at, name, late)
        row.trials += 1
        with injector.armed():
            story(row, folder, behind, where)
        if not injector.fired:
            row.note("not reached")
        with attempt(row, where):  # the fault is over: within two requests all is as it should be
            for _ in range(2):
                kind = world.ask(row, models[False], 0, where, VLCache(cache_dir=folder))
            if kind != "exact":
                row.fail(f"{where}: stores nothing afterwards")
            close_stores(models[False])
    return row


ROWS = [errnos_store, errnos_model]
