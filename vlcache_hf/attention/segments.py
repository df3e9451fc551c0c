"""Attention over segments: the interface of its backends, and the choice between them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from vlcache_hf.attention import flash, varlen
from vlcache_hf.attention.flash import FlashAttention
from vlcache_hf.attention.sdpa import SdpaAttention
from vlcache_hf.attention.varlen import VarlenAttention
from vlcache_hf.plan import Segment

logger = logging.getLogger(__name__)

# In order of preference.
BACKENDS = ("flash_attention_2", "varlen", "sdpa")


class SegmentAttention(Protocol):
    """Attention of packed segments of queries to the leading keys of their batch rows.

    Args:
        name (`str`): name of the backend.
        page_size (`int`): `pool_len` must be a multiple of this.
    """

    name: str
    page_size: int

    def __call__(
        self,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        segments: Sequence[Segment],
        scaling: float,
        scratch: dict[Hashable, Any],
    ) -> torch.Tensor:
        """
        Args:
            query (`torch.Tensor`): `[1, heads, n, head_dim]`, rotated; the segments' queries one after the other.
            key_pool (`torch.Tensor`): `[batch, pool_len, kv_heads, head_dim]`, rotated and contiguous. A row's visible
                tokens come first; what lies behind them is never used and may be anything, NaN included.
            value_pool (`torch.Tensor`): `[batch, pool_len, kv_heads, head_dim]`, likewise.
            segments (`Sequence[Segment]`): what each run of queries sees; zero where it sees nothing.
            scaling (`float`): factor on the scores.
            scratch (`dict`): empty at first, and the same object in every call with the same segments: masks and
                index tensors are kept in it, so that they are built once for all layers of a device.

        Returns:
            `torch.Tensor`: `[1, n, heads, head_dim]`, contiguous.
        """
        ...


def available(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Names of the backends that can be used, the best one first.

    Args:
        device (`torch.device`): where the attention runs.
        dtype (`torch.dtype`): dtype of queries, keys and values.
        head_dim (`int`): size of a head.
    """
    return [name for name in BACKENDS if not _find(name, device, dtype, head_dim)[1]]


def resolve(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> SegmentAttention:
    """Chooses the backend.

    Args:
        name (`str`): `"auto"`, or one of `"flash_attention_2"`, `"varlen"`, `"sdpa"` to insist on.
        device (`torch.device`): where the attention runs.
        dtype (`torch.dtype`): dtype of queries, keys and values.
        head_dim (`int`): size of a head.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"Unknown segment attention {name!r}; use 'auto' or one of {', '.join(map(repr, BACKENDS))}.")
    reasons: list[str] = []
    for candidate in BACKENDS if name == "auto" else (name,):
        make, problem = _find(candidate, device, dtype, head_dim)
        if make is not None:
            _announce(candidate, str(device), str(dtype), "; ".join(reasons))
            return make()
        reasons.append(f"{candidate}: {problem}")
    usable = " or ".join(map(repr, available(device, dtype, head_dim)))
    raise ValueError(f"Segment attention {name!r} cannot be used: {problem}. Or use 'auto' or {usable}.")


def _find(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[Callable[[], SegmentAttention] | None, str]:
    """What makes the backend and an empty string, or `None` and why it cannot be used and what to do."""
    if name == "sdpa":
        return SdpaAttention, ""
    problem = _unfit(device, dtype, head_dim)
    if problem:
        return None, problem
    if name == "flash_attention_2":
        kernel, problem = flash.find_kernel()
        return (functools.partial(FlashAttention, kernel), "") if kernel is not None else (None, problem)
    kernel, problem = varlen.find_kernel()
    return (functools.partial(VarlenAttention, kernel), "") if kernel is not None else (None, problem)


def _unfit(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why flash kernels, torch's and flash-attn's alike, cannot run these tensors, or an empty string."""
    if device.type != "cuda" or torch.version.hip is not None:
        where = "ROCm" if device.type == "cuda" else f"device {device.type!r}"
        return f"it runs on NVIDIA GPUs, not on {where}; move the model to one"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}; load the model in one of them"
    if head_dim % 8 or head_dim > 256:
        return f"it takes head sizes that are multiples of 8 up to 256, not {head_dim}; no setting changes that"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs compute capability 8.0, {device} has {major}.{minor}; use a newer GPU"
    return ""


@functools.lru_cache(maxsize=None)
def _announce(name: str, device: str, dtype: str, passed_over: str) -> None:
    """Logs a choice, once: the cache is what remembers that it was."""
    logger.info("Segment attention on %s in %s: %s%s", device, dtype, name, f" ({passed_over})" if passed_over else "")
