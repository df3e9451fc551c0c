"""Segment attention by `scaled_dot_product_attention`, one segment after the other: every device and dtype."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from vlcache_hf.attention.pages import check_segments
from vlcache_hf.plan import Segment

# Queries per masked call. A chunk sees only the keys its last query sees, so small chunks skip most of the causal
# triangle: 999 queries of 1000 keys took 19 ms so and 28 in one piece, 1000 of 1000 took 19 with a mask or with
# `is_causal=True` (one CPU core, fp32, 8 heads, 4 key heads, head_dim 64). Chunks of 64 to 256 differ by little.
MAX_CHUNK = 256
# A mask holds no more elements than this; chunks get shorter beyond 16K keys (at 4 query heads per key head).
MAX_MASK_ELEMENTS = 1 << 24


class SdpaAttention:
    """A loop of `scaled_dot_product_attention` calls; see [`SegmentAttention`].

    K and V are never repeated for grouped-query attention. Where a mask is needed, the query heads of one key head
    are folded into the query length: on CPU that is as fast as `enable_gqa=True` (20 queries of 3000 keys: 2.1 and
    2.0 ms, repeated keys 3.8 ms; a single query: 0.4 and 0.45 ms in fp32, 0.5 and 2.7 ms in bf16), and on CUDA the
    kernels that take a mask take no `enable_gqa`.
    """

    name = "sdpa"
    page_size = 1

    def __call__(
        self,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        segments: Sequence[Segment],
        scaling: float,
        scratch: dict[Hashable, Any],
    ) -> torch.Tensor:
        _, heads, tokens, head_dim = query.shape
        rows, pool_len, kv_heads, _ = key_pool.shape
        check_segments(segments, tokens, rows, pool_len)
        output = query.new_empty(1, tokens, heads, head_dim)
        start = 0
        for segment, repeats in _repeated(segments):
            part = slice(start, start + segment.length * repeats)
            start = part.stop
            if segment.kv_len == 0:
                output[:, part] = 0.0
                continue
            # Cut to the segment's keys before anything is computed: the pool behind them may hold NaN.
            keys = key_pool[segment.row, None, : segment.kv_len].transpose(1, 2)
            values = value_pool[segment.row, None, : segment.kv_len].transpose(1, 2)
            queries = query[:, :, part]
            if repeats > 1:
                output[0, part] = _attend_alike(queries, keys, values, scaling)
            elif 1 < segment.length == segment.kv_len and _fused_causal(queries, keys, values):
                attended = scaled_dot_product_attention(
                    queries, keys, values, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
                )
                output[:, part] = attended.transpose(1, 2)
            else:
                mask = _mask(segments, heads // kv_heads, query.device, scratch) if segment.length > 1 else None
                _attend_to_end(queries, keys, values, scaling, mask, output[:, part])
        return output


def _repeated(segments: Sequence[Segment]) -> Iterator[tuple[Segment, int]]:
    """Counts equal neighbours of one query: padding that sees the same keys, thousands of them in a padded batch."""
    for segment, group in itertools.groupby(segments):
        count = len(list(group))
        if segment.length == 1:
            yield segment, count
        else:
            yield from itertools.repeat((segment, 1), count)


def _fused_causal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `is_causal=True` runs fused. With fewer key heads than query heads, CUDA has only the flash kernel for
    it and else falls back to one that repeats K and V and materialises all scores.

    Args:
        queries (`torch.Tensor`): `[1, heads, length, head_dim]`.
        keys (`torch.Tensor`): `[1, kv_heads, length, head_dim]`.
        values (`torch.Tensor`): `[1, kv_heads, length, head_dim]`.
    """
    if queries.device.type != "cuda" or queries.shape[1] == keys.shape[1]:
        return True
    params = torch.backends.cuda.SDPAParams(queries, keys, values, None, 0.0, True, True)
    return torch.backends.cuda.can_use_flash_attention(params)


def _mask(
    segments: Sequence[Segment], groups: int, device: torch.device, scratch: dict[Hashable, Any]
) -> torch.Tensor:
    """The one mask of a plan. Masks are aligned to the last query and the last key, so the mask of any smaller block
    is the bottom right corner of a larger one.

    Args:
        segments (`Sequence[Segment]`): all segments of the plan.
        groups (`int`): query heads per key head.
        device (`torch.device`): where the mask goes.
        scratch (`dict`): keeps the mask for the other layers that run the same segments.

    Returns:
        `torch.Tensor`: bool `[chunk, groups, kv_len]`, true where a query sees a key, for the longest chunk and the
        largest `kv_len` of the plan.
    """
    scratch_key = ("sdpa", device, groups)
    if scratch_key not in scratch:
        kv_len = max(segment.kv_len for segment in segments)
        longest = max(segment.length for segment in segments)
        chunk = min(longest, MAX_CHUNK, max(1, MAX_MASK_ELEMENTS // (groups * kv_len)))
        mask = torch.ones(chunk, kv_len, dtype=torch.bool, device=device).tril(kv_len - chunk)
        scratch[scratch_key] = mask[:, None].expand(-1, groups, -1).contiguous()
    return scratch[scratch_key]


def _attend_alike(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention of queries that all see all keys.

    Args:
        queries (`torch.Tensor`): `[1, heads, length, head_dim]`.
        keys (`torch.Tensor`): `[1, kv_heads, kv_len, head_dim]`.
        values (`torch.Tensor`): `[1, kv_heads, kv_len, head_dim]`.
        scaling (`float`): factor on the scores.

    Returns:
        `torch.Tensor`: `[length, heads, head_dim]`.
    """
    length = queries.shape[2]
    folded = queries[0].unflatten(0, (keys.shape[1], -1)).flatten(1, 2)  # [kv_heads, groups * length, head_dim]
    attended = scaled_dot_product_attention(folded[None], keys, values, scale=scaling)
    return attended[0].unflatten(1, (-1, length)).permute(2, 0, 1, 3).flatten(1, 2)


def _attend_to_end(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    """Bottom-right aligned causal attention in chunks of queries.

    Args:
        queries (`torch.Tensor`): `[1, heads, length, head_dim]`.
        keys (`torch.Tensor`): `[1, kv_heads, kv_len, head_dim]`.
        values (`torch.Tensor`): `[1, kv_heads, kv_len, head_dim]`.
        scaling (`float`): factor on the scores.
        mask (`torch.Tensor`, *optional*): `[chunk, groups, >= kv_len]`, not needed for a single query.
        output (`torch.Tensor`): `[1, length, heads, head_dim]`, written to.
    """
    heads, length, head_dim = queries.shape[1:]
    kv_heads, kv_len = keys.shape[1:3]
    chunk = 1 if mask is None else mask.shape[0]
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        size, seen = stop - start, kv_len - length + stop
        # [kv_heads, size * groups, head_dim]: the groups inside, so that a corner of the mask is a view
        folded = queries[0, :, start:stop].unflatten(0, (kv_heads, -1)).transpose(1, 2).flatten(1, 2)
        corner = None
        if mask is not None and size > 1:
            corner = mask[chunk - size :, :, mask.shape[2] - seen :].flatten(0, 1)
        attended = scaled_dot_product_attention(
            folded[None], keys[:, :, :seen], values[:, :, :seen], attn_mask=corner, scale=scaling
        )
        attended = attended[0].unflatten(1, (size, -1)).transpose(0, 1)  # [size, kv_heads, groups, head_dim]
        output[0, start:stop] = attended.reshape(size, heads, head_dim)
