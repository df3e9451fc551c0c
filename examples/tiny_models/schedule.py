"""Learning rate, and lines that say how far a training is."""

from __future__ import annotations

import math


def rate(step: int, steps: int, warm_up: int = 50, floor: float = 0.03) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine down to `floor`."""
    if step < min(warm_up, steps // 4):
        return (step + 1) / min(warm_up, steps // 4)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * step / steps))


class Progress:
    """Prints a line every so many steps.

    Args:
        every (`int`): how many.
    """

    def __init__(self, every: int = 25) -> None:
        self.every = every

    def due(self, step: int, steps: int) -> bool:
        return step % self.every == 0 or step == steps - 1

    def say(self, step: int, steps: int, text: str, seconds: float) -> None:
        if self.due(step, steps):
            print(f"{step + 1:>6}/{steps} {text}  {seconds:.0f} s", flush=True)
