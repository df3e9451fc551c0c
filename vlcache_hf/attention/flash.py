"""Segment attention by flash-attn 2's `flash_attn_varlen_func`."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from vlcache_hf.attention.pages import PagedLayout, paged_attention
from vlcache_hf.plan import Segment

logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1)
def find_kernel() -> tuple[Callable[..., torch.Tensor] | None, str]:
    """Looks for `flash_attn_varlen_func` with a block table.

    Returns:
        `tuple`: the function and an empty string, or `None` and why it cannot be used and what to do.
    """
    try:
        module = importlib.import_module("flash_attn")
    # A build for another torch or CUDA fails with any of these, depending on which symbol or library is missing.
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "flash_attn":
            return None, "flash_attn is not installed; run `pip install flash-attn --no-build-isolation`"
        problem = (
            f"flash_attn is installed but cannot be imported ({type(error).__name__}: {error}); reinstall flash-attn "
            f"for torch {torch.__version__}"
        )
        logger.warning("%s.", problem)
        return None, problem
    kernel = getattr(module, "flash_attn_varlen_func", None)
    if kernel is None or "block_table" not in inspect.signature(kernel).parameters:
        version = getattr(module, "__version__", "of unknown version")
        return None, f"flash_attn {version} has no `flash_attn_varlen_func` with a `block_table`; upgrade flash-attn"
    return kernel, ""


class FlashAttention:
    """One call of flash-attn 2 for all segments; see [`SegmentAttention`].

    Args:
        kernel (`Callable`): `flash_attn_varlen_func`.
    """

    name = "flash_attention_2"
    page_size = 256  # version 2 takes multiples of 256 only

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
            # With a block table, `cu_seqlens_k` gives the lengths only; causal is aligned bottom-right.
            return self.kernel(
                packed,
                keys,
                values,
                cu_seqlens_q=layout.cu_seqlens_q,
                cu_seqlens_k=layout.cu_seqlens_k,
                max_seqlen_q=layout.max_q,
                max_seqlen_k=layout.max_k,
                softmax_scale=scaling,
                causal=True,
                block_table=layout.block_table,
            )

        return paged_attention(call, query, key_pool, value_pool, segments, self.page_size, scratch)
