"""Flipped bytes, in entry files and in the database of the index."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import entries
from harness import Row, Task, attempt, used_bytes
from tqdm import tqdm
from world import World, close_stores

from vlcache_hf import VLCache
from vlcache_hf.store import DiskStore
from vlcache_hf.store.paths import entry_key

_ROWS = 300


def flip(path: Path, rng: random.Random) -> str:
    """Changes one byte in place; says where. Half of the flips hit the first part, which steers all else."""
    data = bytearray(path.read_bytes())
    if path.suffix == ".db":
        first = 100 if rng.random() < 0.3 else 4096  # header, and the schema's page
    else:
        first = 8 + int.from_bytes(data[:8], "little")
    place = rng.randrange(min(first, len(data)) if rng.random() < 0.5 else len(data))
    if path.suffix == ".db" and rng.random() < 0.7:  # most of a database is zeros that mean nothing
        place = next((i for i in range(place, len(data)) if data[i]), place)
    before = data[place]
    data[place] ^= rng.choice([1 << rng.randrange(8), rng.randrange(1, 256)])
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(data[place : place + 1])
    return f"byte {place} of {path.name[-12:]} ({len(data)} bytes): {before} to {data[place]}"


def flips_entry(task: Task) -> Row:
    """One byte of an entry; read by a store that is new, or by one that has known other files of the same key."""
    row, rng = Row("flipped byte in an entry"), random.Random(task.seed)
    folder = task.folder / "store"
    old = DiskStore(folder, None)
    for trial in tqdm(range(task.count(600, 30)), desc="flips_entry", disable=None):
        number, known = rng.randrange(entries.POOL), trial % 2 == 0
        old.discard(*entries.key(number))  # as eviction does; file systems give the next file the same inode
        entries.put(old, number)
        where = f"{'known' if known else 'new'} store, entry {number}, "
        where += flip(folder / entry_key(*entries.key(number)), rng)
        row.trials += 1
        with attempt(row, where):
            store = old if known else DiskStore(folder, None)
            row.saw(entries.look(store, number), where)
            again = entries.look(store, number) if entries.put(store, number) else "not stored"
            row.saw(again, where)
            if again != "hit":
                row.fail(f"{where}: cannot be stored again")
            if not known:
                row.note("seen, new store", store.faults > 0)
                store.close()
    return row


def flips_header(task: Task) -> Row:
    """Every bit of a header, and every letter of a dtype that makes another one of the same size."""
    row, number = Row("every bit of a header"), 1
    folder = task.folder / "store"
    entries.put(DiskStore(folder, None), number, _ROWS)
    path = folder / entry_key(*entries.key(number))
    good = path.read_bytes()
    size = 8 + int.from_bytes(good[:8], "little")
    changes = [(place, good[place] ^ (1 << bit)) for place in range(size) for bit in range(8)]
    if task.quick:
        changes = random.Random(task.seed).sample(changes, 200)
    changes += [(found.end(), ord("I")) for found in re.finditer(rb'"dtype":"(?=F)', good)]
    changes += [(found.end(), ord("F")) for found in re.finditer(rb'"dtype":"(?=I)', good)]
    for place, value in tqdm(changes, desc="flips_header", disable=None):
        path.write_bytes(good[:place] + bytes([value]) + good[place + 1 :])
        where = f"byte {place}, after {good[max(0, place - 12) : place]!r}: {good[place]} to {value}"
        row.trials += 1
        with attempt(row, where):
            row.saw(entries.look(DiskStore(folder, None, read_only=True), number, _ROWS), where)
    path.write_bytes(good)
    if entries.look(DiskStore(folder, None), number, _ROWS) != "hit":
        row.fail("the entry as it was is a miss")
    return row


def flips_index(task: Task) -> Row:
    """One byte of the database, with the store open or closed."""
    row, rng = Row("flipped byte in the index"), random.Random(task.seed)
    template, folder = task.folder / "template", task.folder / "store"
    first = DiskStore(template, None)
    entry = max(entries.put(first, number, _ROWS) for number in range(6))
    cap = 6 * entry + entry // 2
    for mark in range(5):
        first.mark(f"mark {mark}")
    first.close()
    for trial in tqdm(range(task.count(600, 30)), desc="flips_index", disable=None):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)
        store = DiskStore(folder, cap)
        if trial % 2:
            store.marked("mark 0")  # opens the index
        where = f"{'open' if trial % 2 else 'closed'}, {flip(folder / 'index' / 'cache.db', rng)}"
        row.trials += 1
        with attempt(row, where):
            for number in range(6):
                row.saw(entries.look(store, number, _ROWS), where)
            store.mark("new")
            store.marked("mark 1")
            # the first may meet the damage; once is enough to repair it
            stored = [entries.put(store, number, _ROWS) > 0 for number in (6, 7, 8)]
            row.note("puts that met the damage", stored.count(False))
            if not any(stored[1:]):
                row.fail(f"{where}: stores nothing afterwards")
            row.saw_bytes(used_bytes(folder), cap, entry, where)
            for number in range(9):
                row.saw(entries.look(store, number, _ROWS), where)
            store.nbytes()
            row.note("faults counted by the store", store.faults)
            store.close()
    return row


def flips_model(task: Task) -> Row:
    """One byte anywhere, before requests of a model."""
    row, rng, world = Row("flipped byte before requests"), random.Random(task.seed), World(4)
    template, folder = task.folder / "template", task.folder / "store"
    model = world.model(template)
    for number in range(4):
        world.ask(Row(""), model, number, "cold")
    close_stores(model)
    for trial in tqdm(range(task.count(150, 12)), desc="flips_model", disable=None):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)
        kind = ("kv", "vit", "index")[trial % 3]
        files = sorted(path for path in (folder / kind).rglob("*") if path.is_file() and path.stat().st_size)
        if trial < 6 and kind != "index":  # the flip that no shape and no checksum of the values tells
            for path in files:
                path.write_bytes(path.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"I32"', 1 + trial))
            where = f"dtypes in all headers of {kind}"
        else:
            where = flip(rng.choice(files), rng)
        if kind == "vit":
            shutil.rmtree(folder / "kv")  # else nobody reads features
        row.trials += 1
        with attempt(row, where):
            kinds = [world.ask(row, model, number % 4, where, VLCache(cache_dir=folder)) for number in range(8)]
            if kinds[4:] != ["exact"] * 4:
                row.fail(f"{where}: not stored again ({kinds[4:]})")
            row.note("faults counted by the store", model.vlcache.stats().faults)
        close_stores(model)
    return row


ROWS = [flips_entry, flips_header, flips_index, flips_model]
