"""What is known of images that were processed before."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from ..keys import Digest
from ..store import Store

KIND = "src"
_REMEMBERED = 4096
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}


@dataclass
class KnownImage:
    """What processing an image gave.

    Args:
        grid (`tuple[int, int, int]`): its `image_grid_thw` row.
        width (`int`): values per patch.
        dtype (`torch.dtype`): of the values.
        digests (`dict[str, str]`): `pixel_digest` by dtype.
    """

    grid: tuple[int, int, int]
    width: int
    dtype: torch.dtype
    digests: dict[str, str] = field(default_factory=dict)


class KnownImages:
    """Finds what is known of an image, in memory or in the store.

    Args:
        store (`Store`): where it outlives the process.
        namespace (`str`): part of every key.
    """

    def __init__(self, store: Store, namespace: str) -> None:
        self._store = store
        self._namespace = namespace
        self._recent: OrderedDict[str, KnownImage] = OrderedDict()
        self._lock = threading.Lock()

    def key(self, source: str, settings: str) -> str:
        """The key of an image under settings: a digest of both.

        Args:
            source (`str`): from `source_digest`.
            settings (`str`): from `settings_digest`.
        """
        return Digest("source", "2", self._namespace, source, settings).hex()

    def find(self, key: str) -> KnownImage | None:
        """What is known under a key."""
        with self._lock:
            known = self._recent.get(key)
            if known is not None:
                self._recent.move_to_end(key)
                return known
        entry = self._store.get(KIND, key, key)
        known = None if entry is None else _read(entry.fields.get("known", ""))
        if known is not None:
            self._remember(key, known)
        return known

    def learn(self, key: str, known: KnownImage) -> None:
        """Notes what is known, here and in the store."""
        self._remember(key, known)
        text = json.dumps([known.grid, known.width, str(known.dtype), known.digests])
        self._store.put(KIND, key, key, {}, {"known": text})

    def _remember(self, key: str, known: KnownImage) -> None:
        with self._lock:
            self._recent[key] = known
            self._recent.move_to_end(key)
            if len(self._recent) > _REMEMBERED:
                self._recent.popitem(last=False)


def _read(text: str) -> KnownImage | None:
    try:
        grid, width, dtype, digests = json.loads(text)
        known = KnownImage(tuple(grid), width, _DTYPES[dtype], dict(digests))
    except (ValueError, TypeError, KeyError):
        return None
    numbers = [*known.grid, known.width]
    sound = len(known.grid) == 3 and all(type(n) is int and 0 < n < 1 << 20 for n in numbers)
    texts = all(
        isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype)
        and isinstance(digest, str)
        and len(digest) <= 64
        for name, digest in known.digests.items()
    )
    return known if sound and texts and known.digests else None
