"""What holds for one request: settings, store and schedule."""

from __future__ import annotations

from dataclasses import dataclass

from .config import VLCacheConfig
from .schedule import RecomputeSchedule
from .store import Store


@dataclass(frozen=True)
class Options:
    """Settings of a request with the objects that they name.

    Args:
        config (`VLCacheConfig`): the settings.
        store (`Store`): the tiers of the store at `config.cache_dir`.
        schedule (`RecomputeSchedule`): ratios of the model's layers.
    """

    config: VLCacheConfig
    store: Store
    schedule: RecomputeSchedule

    @property
    def lossy_allowed(self) -> bool:
        """Whether an image of another context may be reused: not at `reuse="exact"`, and nothing is saved at r = 1."""
        return self.config.reuse == "lossy" and self.schedule.ratios[-1] < 1.0
