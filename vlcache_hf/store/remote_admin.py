"""Work on all entries of a server, for operators: what fails is raised here, not turned into a miss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .breaker import Breaker
from .entry import BadEntryError, StoreReadError
from .remote_entry import MAX_DESCRIPTION_BYTES, Description, decode_description
from .remote_keys import META, TENSOR, all_keys, checked, hash_key, names_key, parse_key
from .wire import Command, Link, redacted

T = TypeVar("T")
Key = tuple[str, str, str]

_PATIENCE_S = 5.0  # a person waits longer than a request,
_TRANSFER_S = 60.0  # and may sit at the end of a slow line
_LAST_TIME = 1 << 33  # seconds since the epoch


class RemoteError(Exception):
    """The server did not do what it was asked to. The message names it, and holds no password."""


@dataclass(frozen=True)
class Listed:
    """
    An entry on a server.

    Args:
        kind, group, name (`str`): its key.
        description (`Description`, *optional*): what it holds; `None` when that is not known.
        problem (`str`, *optional*): why not.
        ttl_s (`int`, *optional*): seconds until it expires; `None` when it does not.
        used (`float`, *optional*): time of the last use, in seconds since the epoch, as far as the server knows it.
    """

    kind: str
    group: str
    name: str
    description: Description | None
    problem: str | None
    ttl_s: int | None
    used: float | None

    @property
    def key(self) -> str:
        """Its key on the server."""
        return hash_key(self.kind, self.group, self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors; 0 when that is not known."""
        return 0 if self.description is None else self.description.nbytes


class RemoteAdmin:
    """
    A server, seen by who looks after it. Keys that are not ours are never touched.

    Args:
        url (`str`): as for `RemoteStore`.

    Raises:
        `ImportError`: redis-py is not installed.
        `ValueError`: the URL is not understood.
    """

    def __init__(self, url: str) -> None:
        self.address = redacted(url)
        self._link = Link(url, _PATIENCE_S, time.monotonic)

    def keys(self) -> list[Key]:
        """Keys of all entries, sorted. Raises `RemoteError`."""

        def find() -> set[Key]:
            pages = all_keys(self._call, time.monotonic)
            return {key for page in pages for key in map(parse_key, page) if key is not None}

        return sorted(self._try(find))

    def look(self, kind: str, group: str, name: str) -> Listed | None:
        """What the server says about an entry; that does not count as a use.

        Args:
            kind, group, name (`str`): its key.

        Returns:
            `Listed`, *optional*: `None` when it is gone.

        Raises:
            `RemoteError`: the server did not answer.
        """
        key = hash_key(kind, group, name)
        questions = [("HGET", key, META), ("TTL", key), ("ZSCORE", names_key(kind, group), name)]
        description, problem, ttl, used = None, None, None, None
        try:
            reply, ttl, used = self._call(questions, limit=MAX_DESCRIPTION_BYTES)
            if ttl == -2:
                return None
            description = decode_description(_value(reply), kind, group, name)
        except BadEntryError as exc:
            problem = str(exc)
        except Exception as exc:
            raise self._error(exc) from None
        return Listed(kind, group, name, description, problem, _seconds(ttl), _time(used))

    def check(self, entry: Listed, progress: Callable[[int], Any]) -> bool:
        """Fetches the tensors of an entry and checks every block against its checksum.

        Args:
            entry (`Listed`): the entry.
            progress (`Callable[[int], Any]`): told how many bytes were read, again and again.

        Returns:
            `bool`: `False` when the entry has gone meanwhile.

        Raises:
            `BadEntryError`: the entry is not what it should be.
            `RemoteError`: the server did not answer.
        """
        if entry.description is None:
            raise BadEntryError(entry.problem)
        for name, spec in sorted(entry.description.tensors.items()):
            command = ("HGET", entry.key, TENSOR + name)
            try:
                spec.receive(lambda target: self._fresh(_TRANSFER_S).fetch(command, target))
            except (BadEntryError, StoreReadError) as exc:
                # it may have expired, or been stored anew, since it was described
                now = self.look(entry.kind, entry.group, entry.name)
                if now is None or now.description != entry.description:
                    return False
                raise BadEntryError(f"tensor {name!r}: {exc}") from None
            except Exception as exc:
                raise self._error(exc) from None
            progress(spec.nbytes)
        return True

    def discard(self, entry: Listed) -> None:
        """Removes an entry. Raises `RemoteError`."""
        gone = ("ZREM", names_key(entry.kind, entry.group), entry.name)
        self._try(lambda: checked(self._call([("UNLINK", entry.key), gone])[:1]))

    def clear(self, kind: str | None = None) -> int:
        """Removes all entries, whichever machine has stored them.

        Args:
            kind (`str`, *optional*): only those of this kind.

        Returns:
            `int`: how many there were.

        Raises:
            `RemoteError`: the server did not do it, or not to the end.
        """

        def remove() -> int:
            removed: set[Key | None] = set()
            for page in all_keys(self._call, time.monotonic, kind):
                if page:
                    checked(self._call([("UNLINK", *page)]))
                    removed.update(map(parse_key, page))
            return len(removed - {None})

        return self._try(remove)

    def close(self) -> None:
        """Closes the connections."""
        self._link.close()

    def _fresh(self, patience_s: float = _PATIENCE_S) -> Link:
        # time for each operation by itself: only for requests does it add up
        self._link.breaker = Breaker(patience_s, time.monotonic)
        return self._link

    def _call(self, commands: Sequence[Command], limit: int | None = None) -> list[Any]:
        return self._fresh().call(commands, limit=limit)

    def _try(self, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except Exception as exc:
            raise self._error(exc) from None

    def _error(self, exc: Exception) -> RemoteError:
        return RemoteError(f"The server {self.address} did not answer as it should: {self._link.explain(exc)}")


def _value(reply: Any) -> Any:
    if isinstance(reply, Exception):
        if str(reply).startswith("WRONGTYPE"):
            raise BadEntryError("its key holds something else")
        raise reply
    return reply


def _seconds(reply: Any) -> int | None:
    return reply if isinstance(reply, int) and reply >= 0 else None


def _time(reply: Any) -> float | None:
    try:
        value = float(reply)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) and 0 <= value < _LAST_TIME else None
