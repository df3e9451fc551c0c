"""Keys and commands of the remote tier."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from .paths import KINDS, entry_key, is_digest

FORMAT = "2"
PREFIX = f"vlcache:{FORMAT}:"  # versions with another format, on other machines, neither see nor remove our entries
META = "meta"
TENSOR = "t:"
_ADMIN_S = 60.0  # for work on all entries


def hash_key(kind: str, group: str, name: str) -> str:
    """Key of an entry. Raises `ValueError` for a malformed one."""
    entry_key(kind, group, name)
    return _in_group(kind, group, name)


def names_key(kind: str, group: str) -> str:
    """Key of the names of a group. Raises `ValueError` for a malformed one."""
    entry_key(kind, group, group)
    return _in_group(kind, group, "names")


def new_key(kind: str, group: str) -> str:
    """Key of an entry that is being written."""
    return _in_group(kind, group, f"new-{uuid.uuid4().hex}")


def _in_group(kind: str, group: str, last: str) -> str:
    return f"{PREFIX}{kind}:{{{group}}}:{last}"  # braces: all keys of a group live in one slot of a cluster


def parse_key(key: bytes) -> tuple[str, str, str] | None:
    """Kind, group and name of the entry with this key, `None` when it is no key of an entry."""
    kind, _, rest = key.decode("ascii", "replace").removeprefix(PREFIX).partition(":{")
    group, _, name = rest.partition("}:")
    return (kind, group, name) if kind in KINDS and is_digest(group) and is_digest(name) else None


def refresh(kind: str, group: str, name: str, ttl_s: int, *options: str) -> list[tuple[Any, ...]]:
    """Three commands that make an entry the most recently used one.

    Args:
        kind, group, name (`str`): its key.
        ttl_s (`int`): seconds until it expires.
        options (`str`): `"XX"` not to list what is not listed. The second reply is 1 when the list has changed.
    """
    names = names_key(kind, group)
    return [
        ("EXPIRE", hash_key(kind, group, name), ttl_s),
        ("ZADD", names, *options, "CH", time.time(), name),
        ("EXPIRE", names, ttl_s),
    ]


def checked(replies: list[Any]) -> list[Any]:
    """The replies. Raises the first error among them."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def digests(reply: object) -> list[str]:
    """The digests in a reply; what else is in there is left out."""
    if not isinstance(reply, list):
        return []
    texts = (item.decode("ascii", "replace") for item in reply if isinstance(item, bytes))
    return [text for text in texts if is_digest(text)]


def all_keys(
    call: Callable[..., list[Any]], clock: Callable[[], float], kind: str | None = None
) -> Iterator[list[bytes]]:
    """All keys below the prefix, in pages. One may come twice.

    Args:
        call (`Callable[..., list[Any]]`): `Link.call`.
        clock (`Callable[[], float]`): seconds that never go back.
        kind (`str`, *optional*): only those of this kind.

    Raises:
        `TimeoutError`: there are more than can be listed in a minute.
    """
    prefix = PREFIX if kind is None else f"{PREFIX}{kind}:"
    cursor, end = b"0", clock() + _ADMIN_S
    while True:
        page = call([("SCAN", cursor, "MATCH", prefix + "*", "COUNT", 500)], limit=1 << 20)
        cursor, keys = checked(page)[0]
        yield [key for key in keys if isinstance(key, bytes) and key.startswith(prefix.encode())]
        if cursor == b"0":
            return
        if clock() > end:
            raise TimeoutError(f"not done after {_ADMIN_S:.0f} s")
