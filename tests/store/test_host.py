from __future__ import annotations

import pytest
import torch

from streams import pinning
from vlcache_hf.store.host import HostMemory


def check(memory, dtype=torch.float32):
    tensor = torch.arange(24).view(4, 6).t().to(dtype)[1:]
    copy = memory.copy(tensor)
    assert copy.dtype == dtype and copy.device.type == "cpu" and copy.is_contiguous()
    assert copy.data_ptr() != tensor.data_ptr()
    assert torch.equal(copy.to(torch.float32), tensor.to(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_copies_are_pinned_where_they_can_be(monkeypatch, dtype):
    asked = pinning(monkeypatch, True)
    memory = HostMemory(pins=True)
    for _ in range(2):
        check(memory, dtype)
    assert asked == [(5, 4), (5, 4)]


def test_when_locked_memory_is_short_copies_are_ordinary_ones(monkeypatch):
    asked = pinning(monkeypatch, False)
    memory = HostMemory(pins=True)
    for _ in range(2):
        check(memory)
    assert asked == [(5, 4)], "it is not tried again"


def test_nothing_is_pinned_unasked(monkeypatch):
    asked = pinning(monkeypatch, True)
    check(HostMemory(pins=False))
    assert asked == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_copies_are_ordinary_ones():
    check(HostMemory(pins=True))
