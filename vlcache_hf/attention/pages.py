"""Index tensors for kernels that read keys through a block table, so that nested segments share them uncopied."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from vlcache_hf.plan import Segment


@dataclass(frozen=True)
class PagedLayout:
    """What a paged varlen kernel needs to know about `S` segments that see at least one key.

    Args:
        cu_seqlens_q (`torch.Tensor`): int32 `[S + 1]`, where each segment's queries start among the kept ones.
        cu_seqlens_k (`torch.Tensor`): int32 `[S + 1]`, running sum of the `kv_len`s; only its differences matter.
        seqused_k (`torch.Tensor`): int32 `[S]`, the `kv_len`s themselves.
        block_table (`torch.Tensor`): int32 `[S, ceil(max_k / page_size)]`, the pages of each segment's batch row.
        max_q (`int`): longest segment; 0 if no segment sees a key.
        max_k (`int`): largest `kv_len`.
        kept (`torch.Tensor`, *optional*): int64 indices of the queries that see a key, or `None` if all do.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    max_q: int
    max_k: int
    kept: torch.Tensor | None


# (query [n, heads, head_dim], key and value pages [pages, page_size, kv_heads, head_dim], layout) -> like the query
PagedKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PagedLayout], torch.Tensor]


def check_segments(segments: Sequence[Segment], tokens: int, rows: int, pool_len: int) -> None:
    """Refuses segments that do not fit the tensors: a kernel would read another row's keys without a word.

    Args:
        segments (`Sequence[Segment]`): the segments, in the order of the packed queries.
        tokens (`int`): number of packed queries.
        rows (`int`): number of batch rows in the pools.
        pool_len (`int`): positions per row in the pools.
    """
    for segment in segments:
        if not 0 <= segment.row < rows:
            raise ValueError(f"{segment} is outside a pool of {rows} batch rows.")
        if not 0 <= segment.kv_len <= pool_len:
            raise ValueError(f"{segment} needs more keys than a row of the pool holds ({pool_len}).")
        if segment.kv_len and not 1 <= segment.length <= segment.kv_len:
            raise ValueError(f"{segment} must hold at least one query and no more queries than keys.")
    total = sum(segment.length for segment in segments)
    if total != tokens:
        raise ValueError(f"The segments hold {total} queries in all, but {tokens} are packed.")


def as_pages(pool: torch.Tensor, page_size: int) -> torch.Tensor:
    """Views a pool as pages, without a copy.

    Args:
        pool (`torch.Tensor`): `[batch, pool_len, kv_heads, head_dim]`, contiguous.
        page_size (`int`): tokens per page.

    Returns:
        `torch.Tensor`: `[batch * pool_len / page_size, page_size, kv_heads, head_dim]`.
    """
    if pool.shape[1] % page_size:
        raise ValueError(f"A pool row holds {pool.shape[1]} positions; pad it to a multiple of {page_size}.")
    return pool.view(-1, page_size, *pool.shape[2:])


def build_layout(
    segments: Sequence[Segment], pool_len: int, page_size: int, device: torch.device | str
) -> PagedLayout:
    """Builds the index tensors of `segments`. Every host integer comes from the segments: the device is not awaited.

    Args:
        segments (`Sequence[Segment]`): the segments, in the order of the packed queries.
        pool_len (`int`): positions per row in the pools, a multiple of `page_size`.
        page_size (`int`): tokens per page.
        device (`torch.device`): where the tensors go.

    Returns:
        `PagedLayout`: the layout of the segments that see a key; the others are left out of the kernel call.
    """
    seen = [segment for segment in segments if segment.kv_len]
    max_k = max((segment.kv_len for segment in seen), default=0)

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    kept = None
    if len(seen) < len(segments):
        starts = accumulate((segment.length for segment in segments), initial=0)
        indices = [
            start + i for start, segment in zip(starts, segments) if segment.kv_len for i in range(segment.length)
        ]
        kept = torch.tensor(indices, dtype=torch.int64, device=device)

    # All entries lie inside the segment's own batch row, those past its last key too, so none is ever out of range.
    first_page = int32([segment.row * (pool_len // page_size) for segment in seen])
    pages = torch.arange(-(-max_k // page_size), dtype=torch.int32, device=device)
    return PagedLayout(
        cu_seqlens_q=int32(list(accumulate((segment.length for segment in seen), initial=0))),
        cu_seqlens_k=int32(list(accumulate((segment.kv_len for segment in seen), initial=0))),
        seqused_k=int32([segment.kv_len for segment in seen]),
        block_table=first_page[:, None] + pages,
        max_q=max((segment.length for segment in seen), default=0),
        max_k=max_k,
        kept=kept,
    )


def paged_attention(
    kernel: PagedKernel,
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    segments: Sequence[Segment],
    page_size: int,
    scratch: dict[Hashable, Any],
) -> torch.Tensor:
    """Runs all segments in one call of `kernel`.

    Args:
        kernel (`PagedKernel`): the call.
        query (`torch.Tensor`): `[1, heads, n, head_dim]`.
        key_pool (`torch.Tensor`): `[batch, pool_len, kv_heads, head_dim]`.
        value_pool (`torch.Tensor`): `[batch, pool_len, kv_heads, head_dim]`.
        segments (`Sequence[Segment]`): the segments, in the order of the packed queries.
        page_size (`int`): tokens per page.
        scratch (`dict`): keeps the layout for the other layers that run the same segments.

    Returns:
        `torch.Tensor`: `[1, n, heads, head_dim]`, contiguous.
    """
    rows, pool_len = key_pool.shape[:2]
    key_pages, value_pages = as_pages(key_pool, page_size), as_pages(value_pool, page_size)
    scratch_key = ("pages", query.device, rows, pool_len, page_size)
    if scratch_key not in scratch:
        check_segments(segments, query.shape[2], rows, pool_len)
        scratch[scratch_key] = build_layout(segments, pool_len, page_size, query.device)
    layout: PagedLayout = scratch[scratch_key]

    packed = query[0].transpose(0, 1)
    if layout.kept is None and layout.max_q:
        return kernel(packed, key_pages, value_pages, layout).contiguous()[None]
    # Queries that see no key answer zero; a kernel need not define what attention over nothing is.
    output = packed.new_zeros(packed.shape)
    if layout.kept is not None and layout.max_q:
        output[layout.kept] = kernel(packed[layout.kept], key_pages, value_pages, layout)
    return output[None]
