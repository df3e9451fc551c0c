"""What holds for one request: settings, store and schedule."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from .config import DEFAULT_GUARD_THRESHOLD, VLCacheConfig
from .keys import Digest, ModelKeys
from .policies import RecomputePolicy, resolve_policy
from .precision import AS_COMPUTED
from .schedule import RecomputeSchedule
from .schedule_hub import cached_repo_id
from .store import Store


@dataclass(frozen=True)
class Options:
    """Settings of a request with the objects that they name.

    Args:
        config (`VLCacheConfig`): the settings.
        store (`Store`): the tiers of the store at `config.cache_dir`.
        schedule (`RecomputeSchedule`): ratios of the model's layers.
        model (`str`): label of the model, for people who look at what is stored. Decides nothing.
        min_tokens (`int`): tokens of an image from which on it is looked up and stored.
    """

    config: VLCacheConfig
    store: Store
    schedule: RecomputeSchedule
    model: str = ""
    min_tokens: int = 1

    @property
    def lossy_allowed(self) -> bool:
        """Whether an image of another context may be reused: not at `reuse="exact"`, and nothing is saved at r = 1."""
        return self.config.reuse == "lossy" and self.schedule.ratios[-1] < 1.0

    @property
    def guard_threshold(self) -> float:
        """The deviation above which the guard acts: the setting, else that of the schedule."""
        for found in (self.config.guard_threshold, self.schedule.guard_threshold):
            if found is not None:
                return found
        return DEFAULT_GUARD_THRESHOLD

    @property
    def policy(self) -> RecomputePolicy:
        """The policy meant by the settings."""
        return resolve_policy(self.config.policy)

    @property
    def storage(self) -> str:
        """Precision in which KV is stored and looked for: as computed where only lossless hits are wanted."""
        return self.config.storage_dtype if self.config.reuse == "lossy" else AS_COMPUTED


def model_label(config: Any, keys: ModelKeys) -> str:
    """A name of one state of a model for people, such as `Qwen/Qwen3-VL-8B-Instruct@0123456789ab`.

    Args:
        config (`PreTrainedConfig`): the model's config. Of a local folder only the name is taken, not where it lies.
        keys (`ModelKeys`): state of the model, which the digits behind the `@` stand for.
    """
    name = str(getattr(config, "_name_or_path", "") or "")
    if os.path.isdir(name):
        name = cached_repo_id(name) or os.path.basename(os.path.abspath(name))
    # A file name may hold bytes that are no text, and a header with them could not be read again.
    name = (name or config.model_type).encode("utf-8", "replace").decode()[:128]
    return f"{name}@{Digest('model', keys.vision, keys.text).hex()[:12]}"
