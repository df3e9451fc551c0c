"""Rotary position embedding of keys and queries, kept out of the decoder layers (see `state`)."""

from __future__ import annotations

import torch


def rotate_into(out: torch.Tensor, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates `states` into `out`, with the roundings of the stock `apply_rotary_pos_emb` and no full-size temporary.

    Args:
        out (`torch.Tensor`): destination, of the shape and dtype of `states`; must not overlap it.
        states (`torch.Tensor` of shape `(..., head_dim)`): keys or queries before RoPE.
        cos (`torch.Tensor`), sin (`torch.Tensor`): broadcastable to `states`.
    """
    half = states.shape[-1] // 2
    torch.mul(states, cos, out=out)
    out[..., :half] -= states[..., half:] * sin[..., :half]
    out[..., half:] += states[..., :half] * sin[..., half:]
    return out
