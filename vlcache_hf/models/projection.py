"""Keys and values of a decoder layer alone, for rows that no layer above needs."""

from __future__ import annotations

from typing import Any

import torch

from ..state import KVProjection


def kv_projection(text_model: Any) -> KVProjection | None:
    """What computes keys before RoPE and values of some rows of a layer, by the layer's own modules.

    Args:
        text_model (`PreTrainedModel`): the text model.

    Returns:
        A function from the layer's number and hidden states `(1, n, hidden)` to two tensors `(n, kv_heads, head_dim)`;
        `None` where a layer or its attention is not the stock one, so that it may do more than project and normalise.
    """
    for block in text_model.layers:
        if not (_is_stock(block) and _is_stock(block.self_attn)):
            return None

    def project(layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block = text_model.layers[layer]
        attention = block.self_attn
        normed = block.input_layernorm(hidden)
        keys, values = (
            module(normed)[0].unflatten(-1, (-1, attention.head_dim))
            for module in (attention.k_proj, attention.v_proj)
        )
        return attention.k_norm(keys) if hasattr(attention, "k_norm") else keys, values

    return project


def _is_stock(module: Any) -> bool:
    kind = type(module)
    # accelerate moves the original forward aside when it hooks a module
    forward = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
    replaced = forward is not None and getattr(forward, "__func__", None) is not kind.forward
    known = kind.__module__.startswith("transformers.models.") and kind.forward.__module__ == kind.__module__
    return known and not replaced
