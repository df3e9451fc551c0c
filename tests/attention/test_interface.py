from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tiny
import vlcache_hf.attention.interface as interface


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def layer(request):
    return tiny.stock(request.param).model.language_model.layers[0].self_attn


def _states(queries, keys):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, n, 16, generator=generator) for heads, n in ((4, queries), (2, keys), (2, keys))]


def test_both_functions_are_registered():
    assert ALL_ATTENTION_FUNCTIONS["vlcache"] is interface.vlcache_attention_forward
    assert "vlcache" in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()


@pytest.mark.parametrize("queries, keys", [(7, 7), (1, 9)])
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "flash_attention_2"])
def test_without_a_plan_it_is_the_base_kernel(layer, monkeypatch, queries, keys, kernel):
    monkeypatch.setattr(layer, interface.KERNEL_ATTRIBUTE, kernel, raising=False)
    states = _states(queries, keys)
    expected, _ = sdpa_attention_forward(layer, *states, None, scaling=0.3)
    got, weights = interface.vlcache_attention_forward(layer, *states, None, scaling=0.3)
    assert torch.allclose(got, expected, atol=1e-6)
    assert (weights is not None) == (kernel == "eager")


def test_boolean_masks_reach_the_eager_kernel_as_additive_ones(layer, monkeypatch):
    monkeypatch.setattr(layer, interface.KERNEL_ATTRIBUTE, "eager", raising=False)
    states = _states(3, 5)
    mask = torch.tensor([1, 0, 1, 1, 1]).bool().expand(2, 1, 3, 5)
    expected, _ = sdpa_attention_forward(layer, *states, mask, scaling=0.3)
    got, weights = interface.vlcache_attention_forward(layer, *states, mask, scaling=0.3)
    assert torch.allclose(got, expected, atol=1e-6)
    assert not weights[..., 1].any()


def test_asking_for_attentions_gives_probabilities(layer, monkeypatch):
    monkeypatch.setattr(layer, interface.KERNEL_ATTRIBUTE, "sdpa", raising=False)
    _, weights = interface.vlcache_attention_forward(layer, *_states(4, 4), None, scaling=0.3, output_attentions=True)
    assert weights.shape == (2, 4, 4, 4)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 4))
    assert not weights.triu(1).any()


def test_a_plan_takes_over():
    seen = {}

    def attend(layer, query, key, value, scaling):
        seen.update(layer=layer, scaling=scaling)
        return "output"

    module = SimpleNamespace(layer_idx=3)
    states = _states(2, 2)
    result = interface.vlcache_attention_forward(module, *states, None, vlcache_state=SimpleNamespace(attend=attend))
    assert result == ("output", None)
    assert seen == {"layer": 3, "scaling": 0.25}


def test_a_layer_of_a_stock_class_warns(layer, monkeypatch):
    warnings = []
    monkeypatch.setattr(interface.logger, "warning_once", warnings.append)
    interface.vlcache_attention_forward(layer, *_states(2, 2), None, scaling=0.3)
    assert len(warnings) == 1 and "vlcache_hf.attach(model)" in warnings[0]


@pytest.mark.parametrize(
    "cuda, dtype, mask, applies",
    [
        (True, torch.bfloat16, None, True),
        (True, torch.float16, None, True),
        (True, torch.float32, None, False),
        (False, torch.bfloat16, None, False),
        (True, torch.bfloat16, torch.ones(1), False),
    ],
)
def test_when_flash_attention_applies(cuda, dtype, mask, applies):
    assert interface._flash_applies(SimpleNamespace(is_cuda=cuda, dtype=dtype), mask) is applies


def test_flash_attention_is_called_by_its_own_name(layer, monkeypatch):
    """The stock wrapper looks its own name up in the config, where "vlcache" stands."""
    monkeypatch.setattr(layer, interface.KERNEL_ATTRIBUTE, "flash_attention_2", raising=False)
    monkeypatch.setattr(interface, "_flash_applies", lambda query, mask: True)
    calls = {}

    def kernel(query, key, value, mask, **kwargs):
        calls.update(kwargs, shapes=[tuple(t.shape) for t in (query, key, value)], mask=mask)
        return query

    monkeypatch.setattr(interface, "_flash_attention_forward", kernel)
    interface.vlcache_attention_forward(layer, *_states(3, 5), None, scaling=0.3)
    assert calls["shapes"] == [(2, 3, 4, 16), (2, 5, 2, 16), (2, 5, 2, 16)]
    assert (calls["implementation"], calls["is_causal"], calls["softmax_scale"]) == ("flash_attention_2", True, 0.3)
    assert calls["query_length"] == 3 and calls["mask"] is None
