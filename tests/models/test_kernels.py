from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tiny
from vlcache_hf import attach
from vlcache_hf.attention.interface import KERNEL_ATTRIBUTE
from vlcache_hf.models import kernels


def _model(device, dtype):
    return SimpleNamespace(device=torch.device(device), dtype=dtype)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("device, dtype", [("cuda", torch.bfloat16), ("cuda", torch.float32), ("cpu", torch.bfloat16)])
def test_auto_takes_flash_attention_for_half_precision_on_cuda(monkeypatch, installed, device, dtype):
    monkeypatch.setattr(kernels, "is_flash_attn_2_available", lambda: installed)
    best = installed and device == "cuda" and dtype == torch.bfloat16
    assert kernels.resolve_base("auto", _model(device, dtype)) == ("flash_attention_2" if best else "sdpa")


def test_asking_for_what_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr(kernels, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(ImportError, match="flash_attention_2.*pip install"):
        kernels.resolve_base("flash_attention_2")
    assert kernels.resolve_base("eager") == "eager"


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_the_chosen_kernel_runs_decoding_and_the_vision_tower(tmp_path, name):
    ours = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "base_attn_implementation": name, "schedule": 0.1})
    assert ours.model.visual.config._attn_implementation == name
    assert ours.config.vision_config._attn_implementation == name
    assert {getattr(block.self_attn, KERNEL_ATTRIBUTE) for block in ours.model.language_model.layers} == {name}
    assert ours.model.language_model.config._attn_implementation == "vlcache"
    inputs = tiny.batch(tiny.prompt(tiny.text(1, 4), tiny.image(1), tiny.text(2, 5)))
    expected = tiny.generate(tiny.stock("qwen3_vl"), inputs)
    assert torch.equal(tiny.generate(ours, inputs), expected)
    assert torch.equal(tiny.generate(ours, inputs), expected)
    assert tiny.kinds(ours) == ["exact"]
