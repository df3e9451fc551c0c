"""From how many tokens on an image is worth looking up: what a hit costs against what it saves (`min_tokens`)."""

from __future__ import annotations

import math
from typing import Any

import torch

from .config import VLCacheConfig

# Host seconds that an exact hit takes for each image, whatever its size: the entry is found, opened and checked; at
# each layer its rows are placed and rotated. Measured on one core (benchmarks/results/ttft_small.json).
SECONDS_PER_IMAGE = 1.5e-3
SECONDS_PER_LAYER = 1e-4
# Sustained operations per second of a prefill: of one CPU thread in float32, of a GPU in 16 bits. On a slower one a
# hit saves more than is counted: a few images are computed that could have been reused.
CPU_THREAD_FLOPS = 5e10
CUDA_FLOPS = 1e14
# Tokens that are looked up in any case: the count is coarse, and for toy models on a GPU it means nothing.
HIGHEST = 128


def text_flops(text_config: Any) -> float:
    """Operations per token of the decoder layers, attention over other tokens left out.

    Args:
        text_config (`PreTrainedConfig`): config of the text model. Of experts those that a token is sent to count.
    """
    hidden, heads = text_config.hidden_size, text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or hidden // heads
    attention = hidden * head_dim * 2 * (heads + text_config.num_key_value_heads)
    experts = getattr(text_config, "num_experts_per_tok", None)
    width = experts * text_config.moe_intermediate_size if experts else text_config.intermediate_size
    return 2.0 * text_config.num_hidden_layers * (attention + 3 * hidden * width)


def vision_flops(vision_config: Any) -> float:
    """Operations per image token of the vision tower's layers, likewise.

    Args:
        vision_config (`PreTrainedConfig`): config of the vision tower, whose patches are merged to tokens.
    """
    hidden = vision_config.hidden_size
    matrices = 3 if "qwen2_5" in vision_config.model_type else 2  # of the MLP, which Qwen2.5-VL gates
    per_patch = 4 * hidden**2 + matrices * hidden * vision_config.intermediate_size
    return 2.0 * vision_config.depth * per_patch * vision_config.spatial_merge_size**2


def min_tokens(settings: VLCacheConfig, config: Any, device: str) -> int:
    """Tokens of an image from which on it is looked up and stored.

    With `"auto"` computed, not timed: equal settings on equal hardware decide alike.

    Args:
        settings (`VLCacheConfig`): the settings.
        config (`PreTrainedConfig`): the model's, with `text_config` and `vision_config`.
        device (`str`): type of the device that the weights are on: `"cpu"`, `"cuda"`, ... With `"meta"`, weights that
            accelerate loads when they are needed, a forward is slow in any case.
    """
    if not isinstance(settings.min_tokens, str):
        return settings.min_tokens
    speed = CUDA_FLOPS if device == "cuda" else CPU_THREAD_FLOPS * torch.get_num_threads()
    saved = (text_flops(config.text_config) + vision_flops(config.vision_config)) / speed
    cost = SECONDS_PER_IMAGE + SECONDS_PER_LAYER * config.text_config.num_hidden_layers
    return min(HIGHEST, math.ceil(cost / saved))
