"""Talking to a Redis or Valkey server within bounds: of time, and of the bytes that it may make us take."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .breaker import Breaker
from .forks import renew_in_children
from .guard import Guard, UnfitReplyError, read_value

SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
MIN_BYTES_PER_S = 64 << 20
_OVERHEAD = 64 << 10  # bytes of a reply that are not payload
_IDLE = 8  # connections kept
_OPTIONS = {"connection_class", "db", "host", "password", "path", "port", "username"}
_SECRETS = {"password", "ssl_password"}
_MAX_MESSAGE = 300

Command = Sequence[Any]
T = TypeVar("T")


def redacted(url: str) -> str:
    """The URL without user, password and options, for messages."""
    try:
        parts = urlsplit(url)
        # rebuilt from its parts: of a URL that cannot be parsed any piece may be the password
        host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname or ""
        port = "" if parts.port is None else f":{parts.port}"
        return f"{parts.scheme}://{host}{port}{parts.path}"
    except ValueError:
        return f"{url.partition('://')[0]}://..."


class Link:
    """Connections to a server, behind a circuit breaker. Safe to use from several threads, not across a fork.

    An operation may wait `timeout_s` (less when others have waited lately), plus what its bytes take at
    `MIN_BYTES_PER_S`. Connecting happens in a thread of its own: nothing else bounds the time that resolving a name
    takes.

    Args:
        url (`str`): `redis://`, `rediss://`, `valkey://`, `valkeys://` or `unix://`.
        timeout_s (`float`): seconds.
        clock (`Callable[[], float]`): seconds that never go back.

    Raises:
        `ImportError`: redis-py is not installed.
        `ValueError`: the URL is not understood.
    """

    def __init__(self, url: str, timeout_s: float, clock: Callable[[], float]) -> None:
        self.breaker = Breaker(timeout_s, clock)
        self._clock = clock
        self._grace = timeout_s / 50  # what an answer may take anyway
        self.after_fork()
        renew_in_children(self)
        self._idle: list[Any] = []
        self._connection_class, self._settings = _settings(url)

    def after_fork(self) -> None:
        """In a child: another thread of the parent may have held the lock, which nobody would release here."""
        self._lock = threading.Lock()

    def explain(self, error: BaseException) -> str:
        """An error for messages: one line of printable text without passwords, which a server may send back.

        Args:
            error (`BaseException`): what `call` or `fetch` has raised.
        """
        text = f"{type(error).__name__}: {error}"
        for name in _SECRETS & self._settings.keys():
            text = text.replace(str(self._settings[name]), "***")
        text = "".join(char if char.isprintable() else "?" for char in text)
        return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."

    def call(self, commands: Sequence[Command], payload: int = 0, limit: int | None = None) -> list[Any]:
        """Sends commands and reads their replies.

        Args:
            commands (`Sequence[Command]`): each a name and its arguments.
            payload (`int`): bytes in the commands or in the replies that are worth waiting for.
            limit (`int`, *optional*): bytes that the replies may have. By default `payload`.

        Returns:
            `list[Any]`: a reply for each: `bytes`, `int`, `None`, a list, or the error that it led to.

        Raises:
            `CircuitOpenError`: the server is being left alone.
            `Exception`: the server did not answer in time, or not as a server should.
        """
        bytes_allowed = payload if limit is None else limit
        return self._call(payload, lambda link, deadline: self._replies(link, commands, deadline, bytes_allowed))

    def fetch(self, command: Command, target: memoryview) -> bool:
        """Sends a command and puts the one value that it answers where it belongs, without a copy.

        Args:
            command (`Command`): a name and its arguments.
            target (`memoryview`): as long as the value must be.

        Returns:
            `bool`: `False` when there is no value.

        Raises:
            `CircuitOpenError`: the server is being left alone.
            `UnfitReplyError`: the value has another length, or the server says that it cannot be had.
            `Exception`: the server did not answer in time, or not as a server should.
        """

        def talk(connection: Any, deadline: float) -> bool:
            connection.guard.allow(deadline, target.nbytes + _OVERHEAD)
            connection.send_packed_command(connection.pack_command(*command), check_health=False)
            return read_value(connection.guard, target)

        return self._call(target.nbytes, talk)

    def _call(self, payload: int, talk: Callable[[Any, float], T]) -> T:
        patience = self.breaker.enter()
        start = self._clock()
        fair = self._grace + payload / MIN_BYTES_PER_S
        try:
            result = self._exchange(talk, start + fair + patience)
        except UnfitReplyError:  # one bad value, which the caller removes; the server is well
            self._answered(start, fair)
            raise
        except BaseException:
            self.breaker.failed()
            raise
        self._answered(start, fair)
        return result

    def _answered(self, start: float, fair: float) -> None:
        self.breaker.succeeded(max(0.0, self._clock() - start - fair))

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def _exchange(self, talk: Callable[[Any, float], T], deadline: float) -> T:
        from redis.exceptions import ConnectionError as RedisConnectionError

        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._with(connection, talk, deadline)
            except (RedisConnectionError, ConnectionError):
                self.close()  # closed by the server since it was used last, as the others will be
        return self._with(self._connect(deadline), talk, deadline)

    def _with(self, connection: Any, talk: Callable[[Any, float], T], deadline: float) -> T:
        try:
            result = talk(connection, deadline)
        except BaseException:
            connection.disconnect()
            raise
        if connection.demoted:
            connection.disconnect()
            self.close()  # the other ones lead to the same server, while its name may lead to the new primary
        else:
            self._keep(connection)
        return result

    @staticmethod
    def _replies(connection: Any, commands: Sequence[Command], deadline: float, limit: int) -> list[Any]:
        from redis.exceptions import ReadOnlyError, ResponseError

        connection.guard.allow(deadline, limit + _OVERHEAD)
        connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(connection.read_response(disable_decoding=True))
            except ResponseError as error:
                connection.demoted |= isinstance(error, ReadOnlyError)
                replies.append(error)
        return replies

    def _keep(self, connection: Any) -> None:
        with self._lock:
            if len(self._idle) < _IDLE:
                self._idle.append(connection)
                return
        connection.disconnect()

    def _connect(self, deadline: float) -> Any:
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        left = max(0.001, deadline - self._clock())

        def connect() -> None:
            try:
                bounds = {"socket_connect_timeout": left, "socket_timeout": left}
                connection = self._connection_class(**self._settings, **bounds)
                connection.prepare(deadline, self._clock)
                connection.connect()
                answer.put(connection if connection.guard is not None else TypeError("this redis-py is not supported"))
            except Exception as exc:
                answer.put(exc)

        threading.Thread(target=connect, name="vlcache-connect", daemon=True).start()
        try:
            connection = answer.get(timeout=left)
        except queue.Empty:
            raise TimeoutError("no connection in time") from None
        if isinstance(connection, Exception):
            raise connection
        return connection


def _settings(url: str) -> tuple[Any, dict[str, Any]]:
    try:
        from redis.backoff import NoBackoff
        from redis.connection import Connection, SSLConnection, parse_url
        from redis.retry import Retry
    except ImportError as exc:
        raise ImportError(f"A remote store needs redis-py: pip install 'vlcache-hf[remote]' ({exc}).") from exc
    from redis._parsers import _RESP2Parser

    scheme, separator, rest = url.partition("://")
    if scheme not in SCHEMES or not separator:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"The URL of a remote store must start with one of {known}, got {redacted(url)!r}.")
    try:
        parsed = parse_url(f"{SCHEMES[scheme]}://{rest}")
    except Exception:  # its message may quote the password
        raise ValueError(
            f"The URL of the remote store, {redacted(url)!r}, cannot be parsed. Special characters in a password are "
            "written as %XX."
        ) from None
    settings = {key: value for key, value in parsed.items() if key in _OPTIONS or key.startswith("ssl_")}
    base: Any = settings.pop("connection_class", Connection)
    if issubclass(base, SSLConnection):
        settings.setdefault("ssl_check_hostname", True)  # which redis-py 5 does not do by itself
    settings |= {
        "retry": Retry(NoBackoff(), 0),  # the breaker decides what is tried again, and when
        "health_check_interval": 0,
        # in Python, where it allocates what has arrived; hiredis allocates what a server announces
        "parser_class": _RESP2Parser,
        "protocol": 2,
        "socket_read_size": 256 << 10,
    }

    class Guarded(base):
        guard: Guard | None = None
        demoted = False  # the server has become a replica, which takes no writes

        def prepare(self, deadline: float, clock: Callable[[], float]) -> None:
            self._bounds = deadline, clock

        def _connect(self) -> Any:
            deadline, clock = self._bounds
            self.guard = Guard(super()._connect(), clock)
            self.guard.allow(deadline, _OVERHEAD)
            return self.guard

    return Guarded, settings


class LinkPerProcess:
    """The link of the present process: sockets and locks do not survive a fork.

    Args:
        url (`str`), timeout_s (`float`), clock (`Callable[[], float]`): as for `Link`.
    """

    def __init__(self, url: str, timeout_s: float, clock: Callable[[], float]) -> None:
        self._args = url, timeout_s, clock
        self._made = os.getpid(), Link(url, timeout_s, clock)

    def get(self) -> Link:
        pid, link = self._made
        if pid != os.getpid():
            link = Link(*self._args)
            self._made = os.getpid(), link
        return link
