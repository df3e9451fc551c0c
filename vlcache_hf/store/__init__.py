"""Storage of named tensors on disk: bytes and keys, nothing of models. Importing it touches no disk."""

from .base import Store, StoredEntry
from .behind import WriteBehind
from .disk import DiskStore
from .entry import Entry, StoreReadError
from .memory import MemoryEntry, RamTier

__all__ = [
    "DiskStore",
    "Entry",
    "MemoryEntry",
    "RamTier",
    "Store",
    "StoreReadError",
    "StoredEntry",
    "WriteBehind",
]
