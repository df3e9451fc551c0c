"""A circuit breaker: a server that is dead or slow is left alone for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .forks import renew_in_children

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
_RECOVERY = 0.1  # seconds of patience that come back in each second


class CircuitOpenError(Exception):
    """The server is being left alone; nothing was tried."""


class Breaker:
    """Decides whether an operation may be tried, and how long it may wait.

    Waiting is paid from one purse for all operations, so that many slow answers cost no more than one that never
    comes. When it is empty, or an operation fails, the circuit opens: nothing is tried for a back-off, then a single
    operation probes. Each time it opens again soon after it closed, the back-off doubles.

    Args:
        patience_s (`float`): seconds that may be waited before the circuit opens.
        clock (`Callable[[], float]`): seconds that never go back.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self.patience_s = patience_s
        self._clock = clock
        self.after_fork()
        renew_in_children(self)
        self._patience = patience_s
        self._refilled = clock()
        self._backoff = FIRST_BACKOFF_S
        self._until: float | None = None  # None while closed
        self._closed_at = clock() - MAX_BACKOFF_S
        self._probing = False

    def after_fork(self) -> None:
        """In a child: another thread of the parent may have held the lock, which nobody would release here."""
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        """`"closed"`, `"open"`, or `"half-open"` when the next operation is a probe."""
        with self._lock:
            if self._until is None:
                return "closed"
            return "open" if self._clock() < self._until else "half-open"

    def enter(self) -> float:
        """Starts an operation. Each call is followed by `succeeded` or `failed`.

        Returns:
            `float`: seconds that it may wait.

        Raises:
            `CircuitOpenError`: it must not be tried.
        """
        with self._lock:
            now = self._clock()
            if self._until is not None:
                if now < self._until or self._probing:
                    raise CircuitOpenError
                self._probing = True
                self._patience = self.patience_s
            else:
                self._patience = min(self.patience_s, self._patience + _RECOVERY * (now - self._refilled))
            self._refilled = now
            return self._patience

    def succeeded(self, waited_s: float) -> None:
        """Ends an operation that was answered.

        Args:
            waited_s (`float`): seconds it took beyond what is fair.
        """
        with self._lock:
            self._patience -= waited_s
            if self._patience <= 0:
                self._open()
            elif self._probing:
                self._probing, self._until, self._closed_at = False, None, self._clock()

    def failed(self) -> None:
        """Ends an operation that was not answered."""
        with self._lock:
            self._open()

    def _open(self) -> None:
        now = self._clock()
        if self._until is None:
            if now - self._closed_at >= MAX_BACKOFF_S:  # it has been well for a while
                self._backoff = FIRST_BACKOFF_S
            else:
                self._backoff = min(MAX_BACKOFF_S, 2 * self._backoff)
        elif self._probing:
            self._backoff = min(MAX_BACKOFF_S, 2 * self._backoff)
        else:
            return  # operations of other threads that were under way when it opened
        self._probing, self._until = False, now + self._backoff
