"""Turning a loaded model into one of ours, in place."""

from __future__ import annotations

import types
from typing import Any

from ..attention import NAME
from ..config import VLCacheConfig
from .auto import MODEL_CLASSES
from .kernels import resolve_base
from .mixin import VLCacheGenerationMixin


def attach(model: Any, vlcache_config: VLCacheConfig | dict[str, Any] | None = None) -> Any:
    """Gives a loaded model an image cache, in place.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A stock `Qwen2_5_VL-`, `Qwen3VL-` or `Qwen3VLMoeForConditionalGeneration`, quantised, offloaded or wrapped
            by PEFT as it may be, or a model of ours, whose settings are then replaced.
        vlcache_config (`VLCacheConfig` or `dict`, *optional*): settings of the cache.

    Returns:
        The same object.

    Raises:
        `TypeError`: the model is of another class.
    """
    settings = VLCacheConfig.from_any(vlcache_config)
    resolve_base(settings.base_attn_implementation)  # an error leaves the model as it was
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, VLCacheGenerationMixin):
        ours = next((cls for cls in MODEL_CLASSES if type(inner) is cls.vlcache_stock_class), None)
        if ours is None:
            supported = ", ".join(cls.vlcache_stock_class.__name__ for cls in MODEL_CLASSES)
            raise TypeError(f"Cannot attach to a {type(inner).__name__}. Supported classes: {supported}.")
        inner.__class__ = ours
        inner.model.__class__ = ours.vlcache_core_class
        for module in (inner, inner.model):
            if "_old_forward" in module.__dict__:
                # accelerate's hook kept the bound forward of the stock class
                module._old_forward = types.MethodType(type(module).forward, module)
    inner.vlcache_install(settings)
    inner.set_attn_implementation(NAME)
    return model
