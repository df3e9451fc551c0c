"""The store: entries of named tensors on disk, one safetensors file each."""

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from .checksum import Verified
from .entry import BadEntryError, Entry, identity, open_entry
from .index import CapClosedError, Index, IndexUnavailable
from .layout import Layout, NonFiniteError, lay_out, write_entry
from .paths import SUFFIX, entry_key, free_bytes, is_digest, is_full, remove_entry_file, stamp, walk_entries
from .temporary import temporary_file
from .troubles import Troubles

T = TypeVar("T")

_USE_ANOTHER = "If the folder cannot be used, set cache_dir or VLCACHE_DIR to one that can."
_WAIT = "They are removed when they are a minute old, or an hour where files cannot be locked."

logger = logging.getLogger(__name__)


class DiskStore:
    """
    Keeps dicts of CPU tensors on disk, up to a number of bytes, shared by all processes that use the directory.

    Look-ups open an entry's file directly and need neither the index nor write access. Any doubt is a miss: apart from
    malformed keys nothing here raises, and each kind of trouble is logged once per store. Safe to use from several
    threads and after a fork; a pickled or deep-copied store is another store on the same directory.

    Args:
        cache_dir (`str` or `os.PathLike`): created at the first write. `~` and `$NAME` are expanded.
        max_disk_bytes (`int`, *optional*): bytes that all entries may take together. The least recently used ones make
            room for new ones, and first those that were never used again after they were stored. `None` for no limit.
        read_only (`bool`, *optional*, defaults to `False`): serve entries and change nothing.
        min_free_bytes (`int`, *optional*, defaults to 0): nothing is stored that would leave less free space.

    """

    def __init__(
        self,
        cache_dir: str | os.PathLike,
        max_disk_bytes: int | None,
        read_only: bool = False,
        min_free_bytes: int = 0,
    ):
        if max_disk_bytes is not None and max_disk_bytes < 0:
            raise ValueError(f"max_disk_bytes must be None or at least 0, got {max_disk_bytes!r}.")
        # Expanded here, because diskcache expands the path of the index by itself; absolute, to survive a chdir.
        expanded = os.path.expandvars(os.path.expanduser(os.fspath(cache_dir)))
        self.cache_dir = Path(os.path.abspath(expanded))
        self.max_disk_bytes = max_disk_bytes
        self.read_only = read_only
        self.min_free_bytes = min_free_bytes
        self.dropped = 0
        self._verified = Verified()
        self._troubles = Troubles(logger)
        self._index = Index(self.cache_dir, max_disk_bytes, lambda exc: self._fault("had to rebuild its index", exc))

    def __reduce__(self) -> tuple:
        return type(self), (self.cache_dir, self.max_disk_bytes, self.read_only, self.min_free_bytes)

    @property
    def faults(self) -> int:
        """Bad entries met and operations failed so far, by this object."""
        return self._troubles.count

    def get(self, kind: str, group: str, name: str) -> Entry | None:
        """
        Looks an entry up, and makes it the most recently used one.

        Args:
            kind (`str`): `"kv"` or `"vit"`.
            group (`str`): 64 lowercase hexadecimal characters.
            name (`str`): 64 lowercase hexadecimal characters.

        Returns:
            [`Entry`], *optional*: `None` when there is none, or none that can be trusted. A bad one is removed.

        Raises:
            `ValueError`: for a malformed key.
        """
        path = self.cache_dir / entry_key(kind, group, name)
        try:
            entry = open_entry(path, kind, group, name, self._verified)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except BadEntryError as exc:
            self._fault("found a bad entry", exc, path)
            self.discard(kind, group, name)
            return None
        except Exception as exc:
            self._fault("could not read an entry", exc, path)
            return None
        self.touch(kind, group, name)
        return entry

    def touch(self, kind: str, group: str, name: str) -> None:
        """
        Makes an entry the most recently used one, as `get` does.

        Args:
            kind, group, name (`str`): as for `get`.
        """
        if not self.read_only:
            # All that a hit writes: it needs no lock, and eviction and `names` look at it.
            path, now = self.cache_dir / entry_key(kind, group, name), stamp()
            with contextlib.suppress(OSError, BadEntryError):
                before = identity(path)
                os.utime(path, ns=(now, now))
                self._verified.moved(before, (*before[:3], now))

    def names(self, kind: str, group: str) -> list[str]:
        """
        Names of the entries of a group, most recently used first. They may be gone, or bad, when they are asked for.

        Args:
            kind (`str`): `"kv"` or `"vit"`.
            group (`str`): 64 lowercase hexadecimal characters.

        Raises:
            `ValueError`: for a malformed key.
        """
        folder = (self.cache_dir / entry_key(kind, group, group)).parent
        found = []
        with contextlib.suppress(OSError), os.scandir(folder) as files:
            for file in files:
                name = file.name.removesuffix(SUFFIX)
                if name != file.name and is_digest(name):
                    with contextlib.suppress(OSError):
                        found.append((-file.stat().st_mtime_ns, name))
        return [name for _, name in sorted(found)]

    def accepts(self, nbytes: int) -> bool:
        """
        Whether an entry of this size can be stored at all; to be asked before anything is copied.

        Args:
            nbytes (`int`): bytes of its tensors.
        """
        if self.read_only:
            return False
        if self.max_disk_bytes is not None and nbytes > self.max_disk_bytes:
            if self.max_disk_bytes:  # 0 is how to store nothing
                sizes = f"An entry of {nbytes:,} bytes is larger than max_disk_bytes ({self.max_disk_bytes:,})"
                advice = "raise max_disk_bytes (VLCACHE_MAX_DISK_BYTES), or send smaller images"
                self._troubles.warn_once("entry too large", f"{sizes} and is not kept on disk: {advice}.")
            return False
        return not self.min_free_bytes or free_bytes(self.cache_dir) - nbytes >= self.min_free_bytes

    def put(
        self,
        kind: str,
        group: str,
        name: str,
        tensors: dict[str, torch.Tensor],
        fields: dict[str, str],
        max_in_group: int | None = None,
    ) -> int:
        """
        Stores an entry, in place of one of the same key. It becomes visible at once, when it is complete.

        Args:
            kind, group, name (`str`): as for `get`.
            tensors (`dict[str, torch.Tensor]`): on the CPU, of any shape, stride, and real dtype.
            fields (`dict[str, str]`): kept beside them in the header of the file.
            max_in_group (`int`, *optional*): the least recently used entries of the group above this number go.

        Returns:
            `int`: bytes of the file; 0 when nothing was stored, because the store is read-only, the entry does not fit
            below the cap, a value is NaN or infinite, or something failed.

        Raises:
            `ValueError`: for a malformed key.
        """
        key = entry_key(kind, group, name)
        if self.read_only:
            return 0
        size = self._guard("could not store an entry", lambda: self._put(kind, group, name, tensors, fields), 0)
        if size and max_in_group is not None:
            others = [other for other in self.names(kind, group) if other != name]
            for other in others[max(0, max_in_group - 1) :]:
                self.discard(kind, group, other)
        logger.debug("stored %d bytes as %s", size, key)
        return size

    def discard(self, kind: str, group: str, name: str) -> None:
        """
        Removes an entry, if it is there.

        Args:
            kind, group, name (`str`): as for `get`.

        Raises:
            `ValueError`: for a malformed key.
        """
        key = entry_key(kind, group, name)
        if self.read_only:
            return
        remove_entry_file(self.cache_dir, key)  # also where the index cannot be used
        if self._has_index():
            self._guard("could not update its index", lambda: self._index.drop(key), None)

    def mark(self, key: str) -> None:
        """
        Sets a flag that outlives the process. It is lost after 30 days, when the entries that were in use at this time
        are evicted, or when the index cannot be used.

        Args:
            key (`str`): any text.
        """
        if not self.read_only:
            self._guard("could not update its index", lambda: self._index.mark(key), None)

    def marked(self, key: str) -> bool:
        """
        Whether a flag is set.

        Args:
            key (`str`): any text.
        """
        if self.read_only:
            return False
        return self._guard("could not read its index", lambda: self._index.marked(key), False)

    def nbytes(self) -> int:
        """Bytes of all entries in the directory."""
        if not self.read_only and self._has_index():
            with contextlib.suppress(IndexUnavailable, OSError):
                return self._index.nbytes()
        total = 0
        for key in walk_entries(self.cache_dir):
            with contextlib.suppress(OSError):
                total += os.stat(self.cache_dir / key).st_size
        return total

    def clear(self) -> None:
        """Removes all entries and flags. Other files in the directory stay."""
        if self.read_only:
            return
        if self._has_index():
            self._guard("could not update its index", self._index.clear, None)
        for key in list(walk_entries(self.cache_dir)):
            remove_entry_file(self.cache_dir, key)

    def flush(self) -> None:
        """Does nothing: what `put` has stored is stored."""

    def close(self) -> None:
        """Closes the index. The store can still be used and opens it again."""
        self._index.close()

    def _put(self, kind: str, group: str, name: str, tensors: dict[str, torch.Tensor], fields: dict[str, str]) -> int:
        layout = lay_out(kind, group, name, tensors, fields)
        if not self.accepts(layout.size):
            return 0
        key = entry_key(kind, group, name)
        try:
            return self._write(key, layout)
        except (OSError, IndexUnavailable) as exc:
            if not is_full(exc) or not self._index.evict(layout.size):
                raise
        return self._write(key, layout)  # only once more: others may fill the disk as fast as this empties it

    def _write(self, key: str, layout: Layout) -> int:
        if not self._index.make_room(layout.size):
            return 0
        with temporary_file(self.cache_dir) as temporary:
            try:
                with temporary.open() as file:
                    write_entry(file, layout)
            except NonFiniteError:
                logger.debug("an entry with NaN or infinite values is not stored")
                return 0
            now = stamp()
            os.utime(temporary.path, ns=(now, now))
            return layout.size if self._index.publish(temporary.path, key) else 0

    def _has_index(self) -> bool:
        return os.path.isdir(self.cache_dir / "index")  # `Path.is_dir` raises where permission is denied

    def _guard(self, trouble: str, operation: Callable[[], T], otherwise: T) -> T:
        try:
            return operation()
        except CapClosedError as exc:
            self._fault("has no room because of files that killed writers left", exc, advice=_WAIT)
        except IndexUnavailable as exc:
            self._fault("could not use its index", exc)
        except Exception as exc:
            self._fault(trouble, exc)
        return otherwise

    def _fault(self, trouble: str, exc: Exception, path: Path | None = None, advice: str = _USE_ANOTHER) -> None:
        self._troubles.fault(trouble, path or self.cache_dir, exc, advice)
