"""Segment attention by torch's own `torch.nn.attention.varlen.varlen_attn`."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from vlcache_hf.attention.pages import PagedLayout, paged_attention
from vlcache_hf.plan import Segment


@functools.lru_cache(maxsize=1)
def find_kernel() -> tuple[Callable[..., torch.Tensor] | None, str]:
    """Looks for `varlen_attn` with a block table.

    Returns:
        `tuple`: the function and an empty string, or `None` and why it cannot be used and what to do.
    """
    remedy = "upgrade to torch >= 2.12"
    try:
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return None, f"torch {torch.__version__} has no usable `varlen_attn` ({error}); {remedy}"
    if "block_table" not in inspect.signature(kernel).parameters:
        return None, f"`varlen_attn` of torch {torch.__version__} takes no `block_table`; {remedy}"
    return kernel, ""


def _replaced_kernel() -> str | None:
    """Name of the kernel put in place of torch's flash-attn 2 by `activate_flash_attention_impl`, if any."""
    current = getattr(importlib.import_module("torch.nn.attention"), "current_flash_attention_impl", None)
    return current() if current is not None else None


class VarlenAttention:
    """One call of torch's `varlen_attn` for all segments; see [`SegmentAttention`].

    Args:
        kernel (`Callable`): `varlen_attn`.
    """

    name = "varlen"
    page_size = 256  # undocumented, but torch's copy of flash-attn 2 refuses pages that are no multiple of 256

    def __init__(self, kernel: Callable[..., torch.Tensor]):
        self.kernel = kernel

    def __call__(
        self,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        segments: Sequence[Segment],
        scaling: float,
        scratch: dict[Hashable, Any],
    ) -> torch.Tensor:
        def call(packed: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: PagedLayout) -> torch.Tensor:
            return self.kernel(
                packed,
                keys,
                values,
                layout.cu_seqlens_q,
                # Flash-attn 2 insists on `cu_seq_k`; flash-attn 3 refuses it beside a block table. The lengths come
                # from `seqused_k` either way.
                layout.cu_seqlens_k if _replaced_kernel() is None else None,
                layout.max_q,
                layout.max_k,
                scale=scaling,
                window_size=(-1, 0),  # causal, aligned bottom-right
                enable_gqa=packed.shape[1] != keys.shape[2],
                seqused_k=layout.seqused_k,
                block_table=layout.block_table,
            )

        return paged_attention(call, query, key_pool, value_pool, segments, self.page_size, scratch)
