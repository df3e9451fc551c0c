"""Rotary position embedding of keys and queries, kept out of the decoder layers (see `state`)."""

from __future__ import annotations

import torch


def signed(sin: torch.Tensor) -> torch.Tensor:
    """sin with its first half negated, as `rotate_into` takes it: done once for all layers.

    Args:
        sin (`torch.Tensor` of shape `(..., head_dim)`): as the model computes it.
    """
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def rotate_into(out: torch.Tensor, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates `states` into `out`, with the roundings of the stock `apply_rotary_pos_emb`.

    Args:
        out (`torch.Tensor`): destination, of the shape and dtype of `states`; must not overlap it.
        states (`torch.Tensor` of shape `(..., head_dim)`): keys or queries before RoPE.
        cos (`torch.Tensor`), sin (`torch.Tensor`): broadcastable to `states`; sin as `signed` makes it.
    """
    torch.mul(states, cos, out=out)
    swapped = torch.roll(states, states.shape[-1] // 2, dims=-1)
    swapped *= sin
    out += swapped
    return out
