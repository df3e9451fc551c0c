"""What an audit tries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..config import VLCacheConfig
from ..schedule import RecomputeSchedule

# With these no stored KV of another context is reused, so there is nothing to audit.
WITHOUT_REUSE = ("encoder_only",)
DEFAULT_SCHEDULES: tuple[str | float, ...] = (0.0, 0.035, 0.1, 0.3, "auto")


@dataclass(frozen=True)
class AuditSettings:
    """What an audit tries.

    Args:
        schedules (sequence, *optional*): values of `VLCacheConfig.schedule`, each below 1.
        policies (sequence of `str`, *optional*): values of `VLCacheConfig.policy`; each is tried with each schedule.
        guard (`str`, *optional*, defaults to `"off"`): `VLCacheConfig.guard` while reusing.
        guard_threshold (`float`, *optional*): `VLCacheConfig.guard_threshold`.
        lossy_multi_image (`bool`, *optional*, defaults to `False`): `VLCacheConfig.lossy_multi_image`.
        max_new_tokens (`int`, *optional*, defaults to 32): tokens of an answer.
        max_flips (`float`, *optional*, defaults to 0.01): share of answers that may differ, for the recommendation.

    Raises:
        `ValueError`: a value is out of its range; the message names it.
    """

    schedules: Sequence[str | float | RecomputeSchedule] = DEFAULT_SCHEDULES
    policies: Sequence[str] = ("prefix",)
    guard: str = "off"
    guard_threshold: float | None = None
    lossy_multi_image: bool = False
    max_new_tokens: int = 32
    max_flips: float = 0.01

    def __post_init__(self) -> None:
        for schedule in self.schedules:
            VLCacheConfig(schedule=schedule)
            if schedule == 1.0:
                raise ValueError("A schedule of 1 recomputes everything: there is no reuse to audit.")
        for policy in self.policies:
            VLCacheConfig(policy=policy)
            if policy in WITHOUT_REUSE:
                raise ValueError(f"The policy {policy!r} reuses no KV: there is nothing to audit.")
        if not self.schedules or not self.policies:
            raise ValueError("Give at least one schedule and one policy.")
        VLCacheConfig(guard=self.guard, guard_threshold=self.guard_threshold, lossy_multi_image=self.lossy_multi_image)
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be a whole number from 1, got {self.max_new_tokens!r}.")
        if not 0.0 < self.max_flips < 1.0:
            raise ValueError(f"`max_flips` must be a share between 0 and 1, got {self.max_flips!r}.")

    def cases(self) -> Iterator[tuple[str, str, str, str | float | RecomputeSchedule]]:
        """Label, name of the schedule, policy and schedule of each way to reuse."""
        for policy in self.policies:
            for schedule in self.schedules:
                name = f"{schedule:g}" if isinstance(schedule, (int, float)) else _name(schedule)
                yield (name if policy == "prefix" else f"{name} {policy}"), name, policy, schedule


def _name(schedule: str | RecomputeSchedule) -> str:
    return schedule if isinstance(schedule, str) else f"mean {schedule.mean:.3g}"
