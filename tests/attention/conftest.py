"""Random segments over pools whose unused positions are NaN, and the plain answer to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st

from vlcache_hf.plan import Segment


@dataclass(frozen=True)
class Case:
    """Arguments of a segment attention call, in float64 but exact in bfloat16, so that rounding them costs nothing."""

    query: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    segments: tuple[Segment, ...]
    scaling: float

    def run(self, attention, dtype=torch.float32, device="cpu", scratch=None) -> torch.Tensor:
        tensors = (tensor.to(device, dtype) for tensor in (self.query, self.key_pool, self.value_pool))
        output = attention(*tensors, self.segments, self.scaling, {} if scratch is None else scratch)
        _, heads, tokens, head_dim = self.query.shape
        assert output.shape == (1, tokens, heads, head_dim) and output.is_contiguous() and output.dtype == dtype
        return output

    def expected(self) -> torch.Tensor:
        """`[1, n, heads, head_dim]`: written out query by query."""
        groups = self.query.shape[1] // self.key_pool.shape[2]
        rows = []
        for segment in self.segments:
            for i in range(segment.length):
                seen = segment.kv_len - segment.length + 1 + i if segment.kv_len else 0
                query = self.query[0, :, len(rows)]
                keys = self.key_pool[segment.row, :seen].repeat_interleave(groups, 1)
                values = self.value_pool[segment.row, :seen].repeat_interleave(groups, 1)
                weights = (torch.einsum("hd,khd->hk", query, keys) * self.scaling).softmax(-1)
                rows.append(torch.einsum("hk,khd->hd", weights, values))
        return torch.stack(rows)[None]


def build_case(
    segments: list[Segment], page_size: int = 1, kv_heads: int = 2, groups: int = 2, head_dim: int = 8, seed: int = 0
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    batch = 1 + max(segment.row for segment in segments)
    visible = [max([s.kv_len for s in segments if s.row == row], default=0) for row in range(batch)]
    pool_len = (max(visible) // page_size + 1) * page_size  # the longest row, too, ends in unused positions

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().double()

    pools = randn(2, batch, pool_len, kv_heads, head_dim)
    for row, length in enumerate(visible):
        pools[:, row, length:] = torch.nan
    tokens = sum(segment.length for segment in segments)
    query = randn(1, kv_heads * groups, tokens, head_dim)
    return Case(query, pools[0], pools[1], tuple(segments), head_dim**-0.5)


@st.composite
def draw_case(draw, page_sizes: tuple[int, ...] = (1,), max_kv: int = 40) -> Case:
    segments = []
    for row in range(draw(st.integers(1, 3))):
        segments += [Segment(row, 1, 0)] * draw(st.integers(0, 2))
        for kv_len in sorted(draw(st.lists(st.integers(1, max_kv), max_size=4))):
            # Ending where the row's earlier segments end, or behind, and overlapping them or not.
            length = draw(st.one_of(st.just(1), st.just(kv_len), st.integers(1, kv_len)))
            segments.append(Segment(row, length, kv_len))
    segments = draw(st.permutations(segments)) or [Segment(0, 1, 0)]
    numbers = [draw(st.integers(1, 3)) for _ in range(2)]
    return build_case(segments, draw(st.sampled_from(page_sizes)), *numbers, seed=draw(st.integers(0, 9)))


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    return build_case


@pytest.fixture(scope="session")
def cases() -> Callable[..., st.SearchStrategy[Case]]:
    return draw_case


@pytest.fixture(scope="session")
def nested() -> list[Segment]:
    """A row with two nested segments and a whole-row one, padding queries in front of a second row."""
    return [
        Segment(0, 5, 5),
        Segment(0, 20, 300),
        Segment(0, 1, 513),
        Segment(1, 1, 0),
        Segment(1, 1, 0),
        Segment(1, 40, 256),
    ]
