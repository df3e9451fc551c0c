"""Makes one file operation of the store fail: every one it performs is counted, and the k-th raises."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vlcache_hf.store import entry as entry_module

ERRNOS = (
    *("ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS"),
    *("EIO", "ENOENT", "ESTALE", "EMFILE", "EINTR", "EBUSY"),
)
# what SQLite makes of them
_SQLITE = {
    **dict.fromkeys(("ENOSPC", "EDQUOT", "EFBIG"), "database or disk is full"),
    **dict.fromkeys(("EACCES", "EPERM", "EROFS"), "attempt to write a readonly database"),
    **dict.fromkeys(("EIO", "ESTALE"), "disk I/O error"),
    **dict.fromkeys(("ENOENT", "EMFILE"), "unable to open database file"),
    "EINTR": "interrupted",
    "EBUSY": "database is locked",
}
_BY_PATH = ("open", "replace", "unlink", "utime", "mkdir", "chmod", "rmdir", "scandir", "listdir", "stat", "lstat")
# these may have taken effect when they report an error, as on a network file system
_CHANGES = ("replace", "unlink", "utime", "mkdir", "rmdir", "write", "sqlite COMMIT")


def is_change(what: str) -> bool:
    """Whether an operation may have taken effect although it reports an error."""
    return what in _CHANGES


class Injector:
    """Counts the operations below a folder, and lets one of them fail.

    Args:
        root (`Path`): the store's folder.
        at (`int`, *optional*): which operation fails, from 1; `None` for none.
        name (`str`): of the errno.
        late (`bool`): whether the operation takes effect before it reports the error.

    Attributes:
        log (`list[str]`): names of the operations so far.
    """

    def __init__(self, root: Path, at: int | None = None, name: str = "EIO", late: bool = False) -> None:
        self._root = str(root)
        self._at, self._name, self._late = at, name, late
        self._lock = threading.Lock()
        self._descriptors: set[int] = set()
        self.log: list[str] = []

    @property
    def fired(self) -> bool:
        return self._at is not None and len(self.log) >= self._at

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Replaces the operations while the block runs."""
        real = {name: getattr(os, name) for name in (*_BY_PATH, "close", "fdopen", "statvfs")}
        connect, safe_open = sqlite3.connect, entry_module.safe_open
        for name in (*_BY_PATH, "statvfs"):
            setattr(os, name, self._by_path(name, real[name]))
        os.close = self._close(real["close"])  # type: ignore[assignment]
        os.fdopen = self._fdopen(real["fdopen"])  # type: ignore[assignment]
        sqlite3.connect = self._connect(connect)  # type: ignore[assignment]
        entry_module.safe_open = self._safe_open(safe_open)
        try:
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)
            sqlite3.connect, entry_module.safe_open = connect, safe_open  # type: ignore[assignment]

    def step(self, what: str, operation: Callable[[], Any]) -> Any:
        """Performs an operation, or lets it fail."""
        with self._lock:
            self.log.append(what)
            fails = len(self.log) == self._at
        if not fails:
            return operation()
        if self._late and is_change(what):
            operation()
        if what.startswith("sqlite"):
            raise sqlite3.OperationalError(_SQLITE[self._name])
        code = getattr(errno, self._name)
        raise OSError(code, os.strerror(code))

    def _ours(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._root)

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if not self._ours(path):
                return real(path, *args, **kwargs)
            result = self.step(name, lambda: real(path, *args, **kwargs))
            if name == "open":
                self._descriptors.add(result)
            return _Scan(self, result) if name == "scandir" else result

        return wrapped

    def _close(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def wrapped(descriptor: int) -> None:
            if descriptor not in self._descriptors:
                return real(descriptor)
            self._descriptors.discard(descriptor)
            real(descriptor)  # a close that fails has closed
            return self.step("close", lambda: None)

        return wrapped

    def _fdopen(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(descriptor: int, *args: Any, **kwargs: Any) -> Any:
            file = real(descriptor, *args, **kwargs)
            if descriptor not in self._descriptors:
                return file
            self._descriptors.discard(descriptor)
            return _File(self, file)

        return wrapped

    def _connect(self, real: Callable[..., Any]) -> Callable[..., Any]:
        injector = self

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, *args: Any) -> Any:
                run = super().execute
                return injector.step(f"sqlite {sql.split()[0]}", lambda: run(sql, *args))

        def wrapped(database: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._ours(database):
                return real(database, *args, **kwargs)
            return self.step("sqlite connect", lambda: real(database, *args, **kwargs, factory=Connection))

        return wrapped

    def _safe_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, **kwargs: Any) -> Any:
            return _Handle(self, self.step("safe_open", lambda: real(path, **kwargs)))

        return wrapped


class _Proxy:
    """Passes everything on; the methods named in `counted` are operations that can fail."""

    counted: tuple[str, ...] = ()

    def __init__(self, injector: Injector, real: Any) -> None:
        self._injector, self._real = injector, real

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name not in self.counted:
            return value
        return lambda *args, **kwargs: self._injector.step(name, lambda: value(*args, **kwargs))

    def __enter__(self) -> Any:
        self._real.__enter__()
        return self


class _File(_Proxy):
    counted = ("write", "seek")

    def __exit__(self, *exc: Any) -> None:
        self._real.__exit__(*exc)
        self._injector.step("close", lambda: None)  # where network file systems tell that there was no space


class _Handle(_Proxy):
    counted = ("metadata", "keys", "get_slice", "get_tensor")


class _Scan(_Proxy):
    def __exit__(self, *exc: Any) -> None:
        self._real.__exit__(*exc)

    def __iter__(self) -> Iterator[Any]:
        return (_Found(self._injector, file) for file in self._real)


class _Found(_Proxy):
    counted = ("stat",)
