from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb

from vlcache_hf.rope import rotate_into, signed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bitwise_equal_to_the_stock_rotation(dtype):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 3, 17, 16, generator=generator).to(dtype)
    angles = torch.randn(1, 17, 8, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected, _ = apply_rotary_pos_emb(states, states, cos, sin)
    assert torch.equal(rotate_into(torch.empty_like(states), states, cos, signed(sin)), expected)


def test_writes_into_a_part_of_a_pool():
    pool = torch.zeros(2, 5, 1, 4)
    states = torch.randn(3, 1, 4)
    rotate_into(pool[1, 1:4], states, torch.ones(3, 1, 4), torch.zeros(3, 1, 4))
    assert torch.equal(pool[1, 1:4], states)
    assert pool.count_nonzero() == states.numel()
