"""Compute an image once: an image cache for Qwen2.5-VL and Qwen3-VL in Hugging Face Transformers."""

from typing import Any

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
    "VLCacheProcessor",
    "VLCacheQwen2_5_VLForConditionalGeneration",
    "VLCacheQwen3VLForConditionalGeneration",
    "VLCacheQwen3VLMoeForConditionalGeneration",
    "__version__",
    "attach",
    "attach_processor",
]


def __getattr__(name: str) -> Any:
    # image processors need PIL, and torchvision where it is there: nothing that a text-only import should wait for
    if name in ("VLCacheProcessor", "attach_processor"):
        from . import processing

        return getattr(processing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
