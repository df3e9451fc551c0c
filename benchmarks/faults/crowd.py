"""Many processes on one folder that is far too small for them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Child, Row, Task, attempt, collect, used_bytes_now
from tqdm import tqdm
from world import World

PROCESSES, REQUESTS, PROMPTS = 8, 50, 12


def crowd(task: Task) -> Row:
    """8 processes x 50 requests, cap of 3 entries; half of the processes write in the background and keep RAM."""
    processes, requests = task.count(PROCESSES, 4), task.count(REQUESTS, 10)
    row, world = Row(f"{processes} processes x {requests}, cap of 3 entries"), World(PROMPTS)
    entry = _largest_entry(world, task.folder / "measure")
    folder, cap = task.folder / "store", 3 * entry

    def member(number: int, begin: Callable[[], None]) -> dict[str, Any]:
        mine, rng = Row(""), random.Random(1000 * task.seed + number)
        behind = number % 2 == 0
        # two entries let RAM evict, too
        model = world.model(folder, max_disk_bytes=cap, write_behind=behind, max_ram_bytes=2 * entry if behind else 0)
        for request in range(requests):
            where = f"process {number}, request {request}"
            # a few prompts are asked often, so that there are hits besides evictions
            prompt = min(rng.randrange(PROMPTS), rng.randrange(PROMPTS))
            with attempt(mine, where):
                world.ask(mine, model, prompt, where)
                if rng.random() < 0.2:
                    model.vlcache.flush()
        with attempt(mine, f"process {number}, flush"):
            model.vlcache.flush()
        stats = model.vlcache.stats()
        mine.note("stored", stats.entries_stored)
        mine.note("store faults", stats.faults)
        mine.note("dropped", stats.dropped)
        return mine.__dict__

    children = [Child(lambda begin, number=number: member(number, begin)) for number in range(processes)]
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(row, folder, cap, processes * entry, done))
    watcher.start()
    for number, child in enumerate(tqdm(children, desc="crowd", disable=None)):
        counts = collect(row, child, f"process {number}", 300)
        if counts is not None:
            row.add(counts, f"process {number}")
            row.trials += requests
    done.set()
    watcher.join()
    row.saw_bytes(used_bytes_now(folder) or 0, cap, processes * entry)
    with attempt(row, "afterwards"):  # a calm process finds everything in order
        model = world.model(folder, max_disk_bytes=cap)
        for _ in range(2):
            kind = world.ask(row, model, 0, "afterwards")
        if kind != "exact":
            row.fail("afterwards nothing is stored")
    return row


def _watch(row: Row, folder: Path, cap: int, allowed: int, done: threading.Event) -> None:
    while not done.wait(0.03):
        total = used_bytes_now(folder)
        if total is not None:
            row.note("samples of the bytes")
            row.saw_bytes(total, cap, allowed)


def _largest_entry(world: World, folder: Path) -> int:
    model = world.model(folder)
    for prompt in range(PROMPTS):
        world.ask(Row(""), model, prompt, "measure")
    return max(path.stat().st_size for path in folder.rglob("*.safetensors"))


ROWS = [crowd]
