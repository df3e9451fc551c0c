"""The model classes: stock Transformers models with a cache for their images."""

from .attach import attach
from .auto import register
from .qwen2_5_vl import VLCacheQwen2_5_VLForConditionalGeneration
from .qwen3_vl import VLCacheQwen3VLForConditionalGeneration
from .qwen3_vl_moe import VLCacheQwen3VLMoeForConditionalGeneration

__all__ = [
    "VLCacheQwen2_5_VLForConditionalGeneration",
    "VLCacheQwen3VLForConditionalGeneration",
    "VLCacheQwen3VLMoeForConditionalGeneration",
    "attach",
    "register",
]
