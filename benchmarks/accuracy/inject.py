"""A stock forward in which stored KV takes the place of a picture's own, row by row and layer by layer.

Nothing of the library takes part: these are the measurements of the paper's section 3, where all tokens are computed
and only what attention sees of the picture is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vlcache_hf.rope import rotate_into, signed

NAME = "vlcache_benchmark_inject"


@dataclass
class Injection:
    """What attention sees of a picture instead of its own KV.

    Args:
        start (`int`), stop (`int`): its tokens in the prompt.
        stored (`list`): of each layer, keys (rotated to this place) and values, `(1, kv_heads, T, head_dim)`.
        taken (`list[torch.Tensor]`): of each layer, which tokens come from `stored`, bool of shape `(T,)`.
        outputs (`list[torch.Tensor]`): filled, by layer: attention outputs of the picture, `(T, heads, head_dim)`.
    """

    start: int
    stop: int
    stored: list[tuple[torch.Tensor, torch.Tensor]]
    taken: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)


_active: ContextVar[Injection | None] = ContextVar("vlcache_benchmark_injection", default=None)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    injection = _active.get()
    if injection is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    span = slice(injection.start, injection.stop)
    taken = injection.taken[module.layer_idx][:, None]
    key, value = key.clone(), value.clone()
    for own, stored in zip((key, value), injection.stored[module.layer_idx], strict=True):
        own[:, :, span] = torch.where(taken, stored, own[:, :, span])
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    injection.outputs.append(output[0, span].float())
    return output, None


def register() -> None:
    """Makes the attention known, with the mask of SDPA."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def injecting(injection: Injection) -> Iterator[Injection]:
    """Forwards inside see the stored KV."""
    token = _active.set(injection)
    try:
        yield injection
    finally:
        _active.reset(token)


def picture_span(model: Any, input_ids: torch.Tensor, number: int = -1) -> tuple[int, int]:
    """First token and end of a picture of a prompt of one row; by default the last one.

    Args:
        model (`PreTrainedModel`): whose config knows the image token.
        input_ids (`torch.Tensor` of shape `(1, S)`): the prompt.
        number (`int`, *optional*, defaults to -1): which picture.
    """
    places = (input_ids[0] == model.config.image_token_id).nonzero()[:, 0].tolist()
    breaks = [0, *(i for i in range(1, len(places)) if places[i] != places[i - 1] + 1), len(places)]
    runs = [(places[a], places[b - 1] + 1) for a, b in zip(breaks, breaks[1:])]
    return runs[number]


def moved(
    model: Any, entry: list[tuple[torch.Tensor, torch.Tensor]], shift: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A picture's rotated keys, and values, as they would be `shift` positions later.

    All three axes of M-RoPE move by as much, so this is one rotation by a constant angle.
    """
    positions = torch.full((3, 1, 1), abs(shift), device=model.device)
    cos, sin = model.model.language_model.rotary_emb(entry[0][0].float(), positions)
    cos, sin = cos[:, None], signed(sin[:, None] if shift >= 0 else -sin[:, None])
    found = []
    for keys, values in entry:
        turned = rotate_into(torch.empty_like(keys, dtype=torch.float32), keys.float(), cos, sin)
        found.append((turned.to(keys.dtype), values))
    return found


def first_position(model: Any, inputs: Any, start: int) -> int:
    """M-RoPE position of the first token of a picture."""
    positions, _ = model.model.get_rope_index(
        inputs["input_ids"],
        inputs["mm_token_type_ids"],
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )
    return int(positions[0, 0, start])
