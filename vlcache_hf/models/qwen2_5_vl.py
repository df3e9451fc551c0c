"""Qwen2.5-VL with an image cache."""

from __future__ import annotations

from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPooling, MultimodalBaseModelOutputWithPast
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLModel,
)

from .mixin import VLCacheCoreMixin, VLCacheGenerationMixin, signature_of


class VLCacheQwen2_5_VLModel(VLCacheCoreMixin, Qwen2_5_VLModel):
    """`Qwen2_5_VLModel` whose prefill is packed when a request for it comes along."""

    vlcache_stock_class = Qwen2_5_VLModel
    vlcache_output_class = MultimodalBaseModelOutputWithPast
    vlcache_features_class = BaseModelOutputWithPooling

    @signature_of(Qwen2_5_VLModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.vlcache_core_forward(Qwen2_5_VLModel.forward, args, kwargs)


class VLCacheQwen2_5_VLForConditionalGeneration(VLCacheGenerationMixin, Qwen2_5_VLForConditionalGeneration):
    """`Qwen2_5_VLForConditionalGeneration` that computes an image once and reuses it."""

    vlcache_core_class = VLCacheQwen2_5_VLModel
    vlcache_stock_class = Qwen2_5_VLForConditionalGeneration

    @signature_of(Qwen2_5_VLForConditionalGeneration.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.vlcache_forward(Qwen2_5_VLForConditionalGeneration.forward, args, kwargs)

    @signature_of(Qwen2_5_VLForConditionalGeneration.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return self.vlcache_prepare_inputs(
            Qwen2_5_VLForConditionalGeneration.prepare_inputs_for_generation, args, kwargs
        )
