"""Storage of named tensors: bytes and keys, nothing of models. Importing it touches no disk."""

from .base import Store, StoredEntry
from .behind import WriteBehind
from .disk import DiskStore
from .entry import Entry, StoreReadError
from .memory import MemoryEntry, RamTier
from .remote import RemoteStore
from .remote_entry import RemoteEntry
from .tiered import Tiered

__all__ = [
    "DiskStore",
    "Entry",
    "MemoryEntry",
    "RamTier",
    "RemoteEntry",
    "RemoteStore",
    "Store",
    "StoreReadError",
    "StoredEntry",
    "Tiered",
    "WriteBehind",
]
