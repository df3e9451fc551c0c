"""Qwen3-VL with an image cache."""

from __future__ import annotations

from typing import Any

from transformers.modeling_outputs import MultimodalBaseModelOutputWithPast
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    BaseModelOutputWithDeepstackFeatures,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
)

from .mixin import VLCacheCoreMixin, VLCacheGenerationMixin, signature_of


class VLCacheQwen3VLModel(VLCacheCoreMixin, Qwen3VLModel):
    """`Qwen3VLModel` whose prefill is packed when a request for it comes along."""

    vlcache_stock_class = Qwen3VLModel
    vlcache_output_class = MultimodalBaseModelOutputWithPast
    vlcache_features_class = BaseModelOutputWithDeepstackFeatures

    @signature_of(Qwen3VLModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.vlcache_core_forward(Qwen3VLModel.forward, args, kwargs)


class VLCacheQwen3VLForConditionalGeneration(VLCacheGenerationMixin, Qwen3VLForConditionalGeneration):
    """`Qwen3VLForConditionalGeneration` that computes an image once and reuses it."""

    vlcache_core_class = VLCacheQwen3VLModel
    vlcache_stock_class = Qwen3VLForConditionalGeneration

    @signature_of(Qwen3VLForConditionalGeneration.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.vlcache_forward(Qwen3VLForConditionalGeneration.forward, args, kwargs)

    @signature_of(Qwen3VLForConditionalGeneration.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return self.vlcache_prepare_inputs(Qwen3VLForConditionalGeneration.prepare_inputs_for_generation, args, kwargs)
