"""Qwen3-VL-MoE with an image cache."""

from __future__ import annotations

from typing import Any

from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import (
    BaseModelOutputWithDeepstackFeatures,
    Qwen3VLMoeBaseModelOutputWithPast,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLMoeModel,
)

from .mixin import VLCacheCoreMixin, VLCacheGenerationMixin, signature_of


class VLCacheQwen3VLMoeModel(VLCacheCoreMixin, Qwen3VLMoeModel):
    """`Qwen3VLMoeModel` whose prefill is packed when a request for it comes along."""

    vlcache_stock_class = Qwen3VLMoeModel
    vlcache_output_class = Qwen3VLMoeBaseModelOutputWithPast
    vlcache_features_class = BaseModelOutputWithDeepstackFeatures

    @signature_of(Qwen3VLMoeModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.vlcache_core_forward(Qwen3VLMoeModel.forward, args, kwargs)


class VLCacheQwen3VLMoeForConditionalGeneration(VLCacheGenerationMixin, Qwen3VLMoeForConditionalGeneration):
    """`Qwen3VLMoeForConditionalGeneration` that computes an image once and reuses it."""

    vlcache_core_class = VLCacheQwen3VLMoeModel
    vlcache_stock_class = Qwen3VLMoeForConditionalGeneration

    @signature_of(Qwen3VLMoeForConditionalGeneration.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.vlcache_forward(Qwen3VLMoeForConditionalGeneration.forward, args, kwargs)

    @signature_of(Qwen3VLMoeForConditionalGeneration.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return self.vlcache_prepare_inputs(
            Qwen3VLMoeForConditionalGeneration.prepare_inputs_for_generation, args, kwargs
        )
