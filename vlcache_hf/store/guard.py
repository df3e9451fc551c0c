"""Reading from a server that may send anything, at any pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .entry import BadEntryError

_MAX_LINE = 4096


class UnfitReplyError(BadEntryError):
    """A reply is not what was asked for, or too long. The rest of it was not read; the server may be well."""


class Guard:
    """A socket that reads and writes until a deadline only, and takes no more than a number of bytes.

    A timeout of the socket alone would start anew with each byte that a server trickles.

    Args:
        sock: a connected socket.
        clock (`Callable[[], float]`): seconds that never go back.
    """

    def __init__(self, sock: Any, clock: Callable[[], float]) -> None:
        self._sock = sock
        self._clock = clock
        self._deadline = clock()
        self._left = 0

    def allow(self, deadline: float, nbytes: int) -> None:
        """Sets both bounds.

        Args:
            deadline (`float`): on the clock.
            nbytes (`int`): bytes that may be received from now on.
        """
        self._deadline, self._left = deadline, nbytes

    def recv(self, size: int) -> bytes:
        self._arm()
        data = self._sock.recv(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise UnfitReplyError("the server sends more than was asked for")
        return data

    def recv_into(self, target: memoryview) -> int:
        """Reads up to `target.nbytes` bytes, at least one. The caller counts them."""
        self._arm()
        return self._sock.recv_into(target)

    def sendall(self, data: Any) -> None:
        self._arm()
        self._sock.sendall(data)

    def settimeout(self, timeout: float | None) -> None:
        """Does nothing: the deadline rules."""

    def _arm(self) -> None:
        left = self._deadline - self._clock()
        if left <= 0:
            raise TimeoutError("the time for this operation is over")
        self._sock.settimeout(left)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def read_value(guard: Guard, target: memoryview) -> bool:
    """Reads a reply that is one value of known length ("bulk string") into memory.

    Args:
        guard (`Guard`): with nothing left to read from earlier replies.
        target (`memoryview`): as long as the value must be.

    Returns:
        `bool`: `False` when the server has no value.

    Raises:
        `UnfitReplyError`: the value has another length, or the key holds no such value.
        `ConnectionError`: the server has closed the connection, or cannot serve now.
        `ValueError`: the reply is no reply to this.
    """
    head = b""
    while b"\r\n" not in head:
        part = guard.recv(64)
        if not part:
            raise ConnectionError("closed by the server")
        head += part
        if len(head) > _MAX_LINE:
            raise ValueError("the reply is no value")
    line, _, rest = head.partition(b"\r\n")
    if line == b"$-1":
        return False
    if line.startswith(b"-WRONGTYPE"):
        raise UnfitReplyError("its key holds something else")
    if line[:1] == b"-":  # it is loading, has been moved, ...: nothing is wrong with the value
        raise ConnectionError(f"the server says {line[1:100]!r}")
    if line[:1] != b"$":
        raise ValueError(f"the reply is no value: {line[:100]!r}")
    if line != b"$%d" % target.nbytes:
        raise UnfitReplyError(f"the server has a value of another size: {line[1:30]!r} instead of {target.nbytes}")
    # the value and the two bytes that end it
    filled = min(len(rest), target.nbytes)
    target[:filled] = rest[:filled]
    end = bytearray(2)
    ended = len(rest) - filled
    while filled < target.nbytes or ended < 2:
        part_of = target[filled:] if filled < target.nbytes else memoryview(end)[ended:]
        count = guard.recv_into(part_of)
        if not count:
            raise ConnectionError("closed by the server")
        if filled < target.nbytes:
            filled += count
        else:
            ended += count
    return True
