"""Compute an image once: an image cache for Qwen2.5-VL and Qwen3-VL in Hugging Face Transformers."""

from . import attention, models
from .cache import VLCache
from .config import VLCacheConfig
from .models import (
    VLCacheQwen2_5_VLForConditionalGeneration,
    VLCacheQwen3VLForConditionalGeneration,
    VLCacheQwen3VLMoeForConditionalGeneration,
    attach,
)
from .schedule import RecomputeSchedule
from .version import __version__

attention.register()
models.register()

__all__ = [
    "RecomputeSchedule",
    "VLCache",
    "VLCacheConfig",
    "VLCacheQwen2_5_VLForConditionalGeneration",
    "VLCacheQwen3VLForConditionalGeneration",
    "VLCacheQwen3VLMoeForConditionalGeneration",
    "__version__",
    "attach",
]
