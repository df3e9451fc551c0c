"""What went wrong, counted, and each kind of it logged once."""

from __future__ import annotations

import logging
import threading

from .forks import renew_in_children


class Troubles:
    """
    Counts the faults of a store.

    Args:
        logger (`logging.Logger`): of the store.

    Attributes:
        count (`int`): faults so far.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.count = 0
        self._logger = logger
        self._warned: set[str] = set()
        self.after_fork()
        renew_in_children(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def fault(self, trouble: str, where: object, exc: Exception, advice: str) -> None:
        """
        Counts a fault.

        Args:
            trouble (`str`): what the store could not do; the kind of fault.
            where (`object`): a path.
            exc (`Exception`): why.
            advice (`str`): what can be done about it.
        """
        with self._lock:
            self.count += 1
        self.warn_once(
            trouble, f"The VLCache store {trouble} ({where}: {type(exc).__name__}: {exc}); going on without. {advice}"
        )

    def warn_once(self, kind: str, message: str) -> None:
        """
        Logs a warning, if it is the first of its kind.

        Args:
            kind (`str`): any text.
            message (`str`): what was wrong and what to do.
        """
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            self._logger.warning("%s", message)
