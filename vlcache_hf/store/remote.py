"""The remote tier: entries on a Redis or Valkey server, shared by many machines."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .breaker import CircuitOpenError
from .entry import BadEntryError, StoreReadError
from .forks import renew_in_children
from .layout import NonFiniteError
from .remote_entry import MAX_DESCRIPTION_BYTES, MAX_ENTRY_BYTES, RemoteEntry, TensorSpec, decode_description
from .remote_keys import META, TENSOR, all_keys, checked, digests, hash_key, names_key, parse_key, refresh
from .remote_write import write_entry
from .wire import LinkPerProcess, redacted

T = TypeVar("T")

DEFAULT_TTL_S = 7 * 24 * 3600
_MAX_NAMES = 256

logger = logging.getLogger(__name__)


class RemoteStore:
    """
    Keeps dicts of CPU tensors on a server that speaks the protocol of Redis.

    An entry is one hash, with a field for its description (JSON) and one for the bytes of each tensor, so that tensors
    are fetched as they are needed while expiry and eviction take the entry as a whole. It is filled under another name
    and renamed when it is complete. The names of a group are a sorted set by last use.

    A server that is slow or dead costs at most `timeout_s`; then it is left alone for a while (see `Breaker`). Apart
    from malformed keys nothing here raises, and each kind of trouble is logged once per store. Safe to use from
    several threads and after a fork.

    Args:
        url (`str`): `redis://`, `rediss://` (TLS), `valkey://`, `valkeys://` (TLS) or `unix://`, with user, password
            and number of the database, and `ssl_...` options of redis-py.
        timeout_s (`float`, *optional*, defaults to 0.25): seconds to wait for a server that does not answer. Transfers
            may take longer, at 64 MiB per second.
        ttl_s (`int`, *optional*, defaults to 7 days): seconds after its last use at which an entry expires.
        read_only (`bool`, *optional*, defaults to `False`): serve entries and change nothing.
        clock (`Callable[[], float]`, *optional*): seconds that never go back.

    Attributes:
        faults (`int`): bad entries met and operations failed so far, by this object. Operations that were skipped do
            not count.

    Raises:
        `ImportError`: redis-py is not installed.
        `ValueError`: a URL or number that makes no sense.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 0.25,
        ttl_s: int = DEFAULT_TTL_S,
        read_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not timeout_s > 0 or not ttl_s > 0:
            raise ValueError(f"timeout_s and ttl_s must be above 0, got {timeout_s!r} and {ttl_s!r}.")
        self._args = (url, timeout_s, ttl_s, read_only, clock)
        self.address = redacted(url)
        self.ttl_s = ttl_s
        self.read_only = read_only
        self.faults = 0
        self.dropped = 0
        self._links = LinkPerProcess(url, timeout_s, clock)
        self._clock = clock
        self.after_fork()
        renew_in_children(self)
        self._warned: set[str] = set()
        self._touched: OrderedDict[str, float] = OrderedDict()

    def after_fork(self) -> None:
        """In a child: another thread of the parent may have held the lock, which nobody would release here."""
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple:
        return type(self), self._args

    def __repr__(self) -> str:
        return f"RemoteStore({self.address!r})"

    @property
    def state(self) -> str:
        """Whether the server is in use: `"closed"` (it is), `"open"` or `"half-open"`."""
        return self._links.get().breaker.state

    def get(self, kind: str, group: str, name: str) -> RemoteEntry | None:
        """As `DiskStore.get`. The tensors are fetched when rows of them are asked for."""
        key = hash_key(kind, group, name)
        commands: list[Any] = [("HGET", key, META)]
        if not self.read_only:
            commands += refresh(kind, group, name, self.ttl_s, "XX")
        try:
            reply, *refreshed = self._links.get().call(commands, limit=MAX_DESCRIPTION_BYTES)
            if isinstance(reply, Exception):
                raise reply
            trouble = next((item for item in refreshed if isinstance(item, Exception)), None)
            listed = bool(refreshed) and refreshed[1] == 1
            if reply is None:
                if listed:  # it has expired
                    self._call("could not update a group", ("ZREM", names_key(kind, group), name))
                return None
            description = decode_description(reply, kind, group, name)
            if trouble is not None:  # a full server or a replica: it may be read all the same
                self._fault("could not refresh an entry", trouble)
            elif refreshed and not listed:
                self._call("could not update a group", *refresh(kind, group, name, self.ttl_s))
        except CircuitOpenError:
            return None
        except BadEntryError as exc:
            self._fault("found a bad entry", exc)
            self.discard(kind, group, name)
            return None
        except Exception as exc:
            self._fault("could not read an entry", exc)
            return None
        self._used(key)
        return RemoteEntry(description, lambda tensor, spec: self._fetch(key, tensor, spec))

    def touch(self, kind: str, group: str, name: str) -> None:
        """As `DiskStore.touch`, but not more often than matters for expiry: it may be called at each local hit."""
        key = hash_key(kind, group, name)
        with self._lock:
            last = self._touched.get(key)
        if self.read_only or (last is not None and self._clock() - last < min(3600, self.ttl_s / 10)):
            return
        self._used(key)
        self._call("could not refresh an entry", *refresh(kind, group, name, self.ttl_s, "XX"))

    def names(self, kind: str, group: str) -> list[str]:
        """As `DiskStore.names`."""
        key = names_key(kind, group)
        replies = self._call("could not list a group", ("ZREVRANGE", key, 0, _MAX_NAMES - 1))
        return digests(replies[0]) if replies else []

    def accepts(self, nbytes: int) -> bool:
        """As `DiskStore.accepts`. Asks nobody: the server is trusted to make room."""
        return not self.read_only and nbytes <= MAX_ENTRY_BYTES and self.state != "open"

    def put(
        self,
        kind: str,
        group: str,
        name: str,
        tensors: dict[str, torch.Tensor],
        fields: dict[str, str],
        max_in_group: int | None = None,
    ) -> int:
        """As `DiskStore.put`; what another machine has stored is not sent again.

        Returns:
            `int`: bytes of the tensors; 0 when the entry is not on the server now.
        """
        key = hash_key(kind, group, name)
        size = sum(tensor.nbytes for tensor in tensors.values())
        if not self.accepts(size):
            return 0

        def write() -> int:
            try:
                write_entry(self._links.get().call, kind, group, name, tensors, fields, self.ttl_s)
            except NonFiniteError:
                logger.debug("an entry with NaN or infinite values is not stored")
                return 0
            self._used(key)
            return size

        written = self._guard("could not store an entry", write, 0)
        if written and max_in_group is not None:
            surplus = ("ZREVRANGE", names_key(kind, group), max(1, max_in_group), max(1, max_in_group) + _MAX_NAMES)
            for replies in self._call("could not list a group", surplus):
                for other in digests(replies):
                    self.discard(kind, group, other)
        return written

    def discard(self, kind: str, group: str, name: str) -> None:
        """As `DiskStore.discard`."""
        key = hash_key(kind, group, name)
        if not self.read_only:
            gone = ("ZREM", names_key(kind, group), name)
            self._call("could not remove an entry", ("UNLINK", key), gone)

    def mark(self, key: str) -> None:
        """Does nothing: flags are kept by the local tier."""

    def marked(self, key: str) -> bool:
        """Always `False`."""
        return False

    def nbytes(self) -> int:
        """Bytes of the tensors of all entries on the server. Reads every description: not for requests."""

        def count() -> int:
            total = 0
            call = self._links.get().call
            for page in all_keys(call, self._clock):
                for key in filter(None, map(parse_key, page)):
                    (reply,) = call([("HGET", hash_key(*key), META)], limit=MAX_DESCRIPTION_BYTES)
                    with contextlib.suppress(BadEntryError):
                        total += decode_description(reply, *key).nbytes
            return total

        return self._guard("could not be counted", count, 0)

    def clear(self) -> None:
        """Removes all entries from the server, those of other machines too. Other keys stay."""

        def remove() -> None:
            call = self._links.get().call
            for page in all_keys(call, self._clock):
                if page:
                    checked(call([("UNLINK", *page)]))

        if not self.read_only:
            self._guard("could not be cleared", remove, None)

    def flush(self) -> None:
        """Does nothing: what `put` has stored is stored."""

    def close(self) -> None:
        """Closes the connections. The store can still be used and opens them again."""
        self._links.get().close()

    def _fetch(self, key: str, name: str, spec: TensorSpec) -> torch.Tensor:
        try:
            return spec.receive(lambda target: self._links.get().fetch(("HGET", key, TENSOR + name), target))
        except CircuitOpenError as exc:
            raise StoreReadError(f"tensor {name!r}: the server at {self.address} is left alone for now") from exc
        except Exception as exc:
            self._fault("could not read a tensor", exc)
            why = self._links.get().explain(exc)
            raise StoreReadError(f"tensor {name!r} at {self.address}: {why}") from None

    def _used(self, key: str) -> None:
        with self._lock:
            self._touched[key] = self._clock()
            self._touched.move_to_end(key)
            while len(self._touched) > 4096:
                self._touched.popitem(last=False)

    def _call(self, trouble: str, *commands: tuple[Any, ...]) -> list[Any]:
        return self._guard(trouble, lambda: checked(self._links.get().call(commands)), [])

    def _guard(self, trouble: str, operation: Callable[[], T], otherwise: T) -> T:
        try:
            return operation()
        except CircuitOpenError:
            pass
        except Exception as exc:
            self._fault(trouble, exc)
        return otherwise

    def _fault(self, trouble: str, exc: Exception) -> None:
        with self._lock:
            self.faults += 1
            first = trouble not in self._warned
            self._warned.add(trouble)
        if first:
            why = self._links.get().explain(exc)
            logger.warning("The remote VLCache store %s (%s: %s); going on without.", trouble, self.address, why)
