"""Small and medium entries whose content follows from their number, so that any other content is seen."""

from __future__ import annotations

import hashlib

import torch

from vlcache_hf.store import DiskStore, StoreReadError

ROWS = (64, 500, 2000, 24_000)  # 6 KB to 2.3 MB: in one block of checksums and in several
POOL = 16


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def key(number: int) -> tuple[str, str, str]:
    """Three entries each share a group."""
    return "kv" if number % 2 else "vit", digest(f"group {number // 3}"), digest(f"name {number}")


def tensors(number: int, rows: int | None = None) -> dict[str, torch.Tensor]:
    count = ROWS[number % len(ROWS)] if rows is None else rows
    ramp = torch.arange(count * 16)
    return {
        "a": (ramp + 1000 * number).float().view(count, 16),
        "b": ((ramp * 7 + number) % 1000).to(torch.int16).view(count, 16),
    }


def put(store: DiskStore, number: int, rows: int | None = None, max_in_group: int | None = None) -> int:
    return store.put(*key(number), tensors(number, rows), {"number": str(number)}, max_in_group)


def look(store: DiskStore, number: int, rows: int | None = None) -> str:
    """`"hit"`, `"miss"` or `"wrong ..."`, after reading every byte."""
    entry = store.get(*key(number))
    if entry is None:
        return "miss"
    expected = tensors(number, rows)
    try:
        if dict(entry.fields) != {"number": str(number)} or entry.keys() != sorted(expected):
            return f"wrong fields {dict(entry.fields)} or names {entry.keys()}"
        for name, tensor in expected.items():
            if entry.shape(name) != tuple(tensor.shape):
                return f"wrong shape of {name}: {entry.shape(name)}"
            if not torch.equal(entry.rows(name, 0, len(tensor)), tensor):
                return f"wrong content of {name}"
    except StoreReadError:
        store.discard(*key(number))  # as whoever reads an entry does
        return "miss"
    return "hit"


def file_size(number: int, folder: str) -> int:
    """Bytes of an entry's file, measured in a folder of its own."""
    return put(DiskStore(folder, None), number)
