"""Storage of named tensors on disk: bytes and keys, nothing of models. Importing it touches no disk."""

from .disk import DiskStore
from .entry import Entry, StoreReadError

__all__ = ["DiskStore", "Entry", "StoreReadError"]
