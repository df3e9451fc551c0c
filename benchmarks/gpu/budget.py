"""Work in order of importance within a budget of time, each piece guarded from the others."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Budget:
    """What was done, what was left out and what broke.

    Args:
        minutes (`float`): after these no work is started.
        clock (`Callable`, *optional*): seconds that never go back.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._limit = 60 * minutes
        self.seconds: dict[str, float] = {}
        self.left_out: list[str] = []
        self.errors: dict[str, str] = {}

    def left(self) -> float:
        """Seconds that are left."""
        return self._limit - (self._clock() - self._start)

    def allows(self, work: str, needs: float) -> bool:
        """Whether there is time for a piece of work; notes it if not.

        Args:
            work (`str`): its name.
            needs (`float`): seconds that it may take.
        """
        if self.left() >= needs:
            return True
        print(f"Left out: {work} ({max(self.left(), 0):.0f} s left, {needs:.0f} s wanted)", flush=True)
        self.left_out.append(work)
        return False

    @contextmanager
    def guarded(self, work: str) -> Iterator[None]:
        """Notes an exception of a piece of work, and how long it took.

        Args:
            work (`str`): its name.
        """
        start = self._clock()
        print(f"--- {work} ({self.left():.0f} s left)", flush=True)
        try:
            yield
        except Exception as error:  # whatever one piece does, the others are worth having
            traceback.print_exc()
            self.errors[work] = f"{type(error).__name__}: {error}"
        finally:
            self.seconds[work] = round(self._clock() - start, 1)
