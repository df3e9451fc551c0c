from __future__ import annotations

import dataclasses

import pytest
import torch

import tiny
from vlcache_hf import attach

INPUTS = tiny.batch(tiny.prompt(tiny.text(1, 4), tiny.image(1), tiny.text(2, 5)))


@pytest.fixture
def pair(tmp_path):
    return tiny.stock("qwen3_vl"), attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "schedule": 0.1})


def same(pair):
    stock, ours = pair
    with torch.no_grad():
        expected, got = (model(**tiny.clone(INPUTS), logits_to_keep=1).logits for model in pair)
    assert torch.allclose(got, expected, atol=1e-5)
    return ours.vlcache.last_request


def layer(model):
    return model.model.language_model.layers[1]


def visual(model):
    return model.model.visual


def add_in_place(module, args, output):
    output += 1


def add_data(module, args, output):
    output.data.add_(1)


def replace(module, args, output):
    return output * 1.5


@dataclasses.dataclass
class Callable:
    scale: float

    def __call__(self, module, args, output):
        return output * self.scale


@pytest.mark.parametrize(
    "hook", [add_in_place, add_data, replace, Callable(2.0)], ids=["in place", "data", "new", "object"]
)
@pytest.mark.parametrize("inference", [False, True])
def test_hooks_in_the_language_model_put_the_cache_out_of_action(pair, tmp_path, hook, inference):
    with torch.inference_mode(inference):
        handles = [layer(model).register_forward_hook(hook) for model in pair]
        assert "forward hooks" in same(pair).in_full
        assert not list((tmp_path / "kv").rglob("*.safetensors"))
        [handle.remove() for handle in handles]
        assert same(pair).images[0].kv == "miss"
        assert same(pair).images[0].kv == "exact"
        handles = [layer(model).register_forward_hook(hook) for model in pair]
        assert "forward hooks" in same(pair).in_full


def test_global_hooks_put_the_cache_out_of_action(pair):
    same(pair)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 1.01 if isinstance(output, torch.Tensor) else None
    )
    try:
        before = pair[1].vlcache.stats().requests
        with torch.no_grad():
            expected, got = (model(**tiny.clone(INPUTS), logits_to_keep=1).logits for model in pair)
        assert torch.allclose(got, expected, atol=1e-5)
        assert pair[1].vlcache.stats().requests == before
    finally:
        handle.remove()


def test_an_observer_behind_the_vision_tower_counts_its_calls(pair):
    calls = []
    visual(pair[1]).register_forward_hook(lambda *args: calls.append(1))
    assert same(pair).images[0].kv == "miss"
    assert same(pair).images[0].kv == "exact"
    assert tiny.generate(pair[1], INPUTS).shape[1] > 0
    assert len(calls) == 1


def attribute(module, args, output):
    output.pooler_output = output.pooler_output * 3


def in_place(module, args, output):
    output.pooler_output.data.mul_(3)


def replaced(module, args, output):
    return type(output)(**{**output, "pooler_output": output.pooler_output * 3})


@pytest.mark.parametrize("hook", [attribute, in_place, replaced])
@pytest.mark.parametrize("inference", [False, True])
def test_a_hook_that_changes_the_features_leaves_nothing(pair, tmp_path, hook, inference):
    with torch.inference_mode(inference):
        handles = [visual(model).register_forward_hook(hook) for model in pair]
        assert "image features" in same(pair).in_full
        assert not list(tmp_path.rglob("*.safetensors"))
        [handle.remove() for handle in handles]
        assert same(pair).images[0].kv == "miss"


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_inside_or_before_the_vision_tower_leave_everything_to_stock(pair, tmp_path, register):
    part = (lambda model: visual(model).blocks[0]) if register == "register_forward_hook" else visual
    for model in pair:
        getattr(part(model), register)(lambda *args: None)
    with torch.no_grad():
        expected, got = (model(**tiny.clone(INPUTS), logits_to_keep=1).logits for model in pair)
    assert torch.allclose(got, expected, atol=1e-5)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_output_capturing_is_no_hook_of_users(pair):
    with torch.no_grad():
        for model in pair:
            model(**tiny.clone(INPUTS), output_hidden_states=True)
    assert same(pair).images[0].kv == "miss"
    assert same(pair).images[0].kv == "exact"
