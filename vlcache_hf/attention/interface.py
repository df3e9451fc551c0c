"""The attention and mask functions registered under the name `"vlcache"`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging

logger = logging.get_logger(__name__)

NAME = "vlcache"
KERNEL_ATTRIBUTE = "vlcache_kernel"
STATE = "vlcache_state"

_STOCK_CLASS_WARNING = (
    'This model was loaded as a stock class with `attn_implementation="vlcache"`: it runs as stock and nothing is '
    "reused. Load it with `AutoModelForImageTextToText`, with a `VLCache...ForConditionalGeneration` class, or call "
    "`vlcache_hf.attach(model)`. Architectures other than Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE are not supported."
)


def vlcache_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a layer: of the active tokens in a packed prefill, else the model's base kernel.

    Args:
        module (`nn.Module`): the attention layer.
        query (`torch.Tensor` of shape `(batch, heads, queries, head_dim)`): queries, before RoPE in a packed prefill.
        key (`torch.Tensor`), value (`torch.Tensor`):
            `(batch, kv_heads, keys, head_dim)`; in a packed prefill the pools of `PrefillCache.update`.
        attention_mask (`torch.Tensor`, *optional*): boolean, `(batch, 1, queries, keys)`, True where seen.
        scaling (`float`, *optional*): factor of the scores.
        dropout (`float`, *optional*): dropout of the probabilities, 0 outside training.

    Returns:
        `tuple`: the output, `(batch, queries, heads, head_dim)`, and the probabilities where they were asked for.
    """
    state = kwargs.pop(STATE, None)
    if state is not None:
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        return state.attend(module.layer_idx, query, key, value, factor), None
    kernel = getattr(module, KERNEL_ATTRIBUTE, None)
    if kernel is None:
        kernel = "sdpa"
        if not torch.compiler.is_compiling():
            logger.warning_once(_STOCK_CLASS_WARNING)
    if kernel == "eager" or kwargs.get("output_attentions"):
        return _eager(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    if kernel == "flash_attention_2" and _flash_applies(query, attention_mask):
        causal = kwargs.get("is_causal")
        output = _flash_attention_forward(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            None,
            query_length=query.shape[2],
            is_causal=getattr(module, "is_causal", True) if causal is None else causal,
            dropout=dropout,
            softmax_scale=scaling,
            implementation=kernel,
        )
        return output, None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _flash_applies(query: torch.Tensor, attention_mask: torch.Tensor | None) -> bool:
    """flash-attention takes half precision on CUDA and no mask; SDPA takes the rest."""
    return attention_mask is None and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def _eager(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The stock eager attention of the module's own architecture, which takes additive masks."""
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and causal and queries > 1:
        attention_mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(
            keys - queries if keys >= queries else 0
        )[None, None]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def register() -> None:
    """Makes `attn_implementation="vlcache"` known to Transformers. Touches nothing else."""
    AttentionInterface.register(NAME, vlcache_attention_forward)
    # without a mask function of the same name padding and cached continuation are silently wrong
    AttentionMaskInterface.register(NAME, sdpa_mask)
