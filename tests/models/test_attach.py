"""Turning a loaded model into ours, switching it on and off, and copying it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import transformers
from torch import nn

import vlcache_hf
from tests import tiny
from vlcache_hf import VLCacheConfig
from vlcache_hf.models.auto import MODEL_CLASSES

OURS = dict(zip(tiny.ARCHITECTURES, MODEL_CLASSES))
REQUEST = tiny.batch(tiny.prompt(tiny.text(0, 3), tiny.image(0), tiny.text(1, 5)))


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def reference(architecture):
    return tiny.stock(architecture)


@pytest.fixture
def settings(tmp_path):
    return {"cache_dir": str(tmp_path / "cache")}


@pytest.fixture
def attached(architecture, settings):
    return vlcache_hf.attach(tiny.stock(architecture), settings)


def answers(model, reference, kind: str | None = None, request=REQUEST) -> None:
    out = tiny.generate(model, request, 4)
    if kind is not None:
        assert tiny.kinds(model) == [kind]
    assert out.tolist() == tiny.generate(reference, request, 4).tolist()


def test_attaching_happens_in_place(architecture, reference, settings):
    model = tiny.stock(architecture)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    assert vlcache_hf.attach(model, settings) is model
    assert type(model) is OURS[architecture]
    assert dict(model.named_modules()) == modules
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert list(model.state_dict()) == list(reference.state_dict())
    answers(model, reference, "miss")
    answers(model, reference, "exact")
    assert dict(model.named_modules()) == modules  # also after use


def test_attaching_to_a_model_of_ours_replaces_its_settings(attached, reference, tmp_path):
    answers(attached, reference, "miss")
    other = VLCacheConfig(cache_dir=tmp_path / "other", reuse="exact")
    assert vlcache_hf.attach(attached, other) is attached
    assert attached.vlcache.config is other and attached.vlcache.stats().requests == 0
    answers(attached, reference, "miss")
    assert (tmp_path / "other" / "kv").exists()


def test_defaults(architecture, monkeypatch, tmp_path):
    monkeypatch.setenv("VLCACHE_DIR", str(tmp_path / "default"))
    model = vlcache_hf.attach(tiny.stock(architecture))
    assert model.vlcache.config.cache_dir == str(tmp_path / "default")
    assert not (tmp_path / "default").exists()


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), "a string", None], ids=["module", "str", "None"])
def test_attaching_to_something_else(thing):
    with pytest.raises(TypeError, match=f"{type(thing).__name__}.*Qwen2_5_VLForConditionalGeneration"):
        vlcache_hf.attach(thing)


def test_attaching_to_the_base_model(reference):
    with pytest.raises(TypeError, match=type(reference.model).__name__):
        vlcache_hf.attach(copy.deepcopy(reference.model))


def test_attaching_to_a_subclass_of_stock(architecture):
    """Somebody else's forward would be lost."""

    class Theirs(tiny.STOCK[architecture]):
        pass

    model = Theirs(tiny.config(architecture))
    with pytest.raises(TypeError, match="Theirs"):
        vlcache_hf.attach(model)
    assert type(model) is Theirs


def test_attaching_with_wrong_settings_changes_nothing(architecture):
    model = tiny.stock(architecture)
    with pytest.raises(TypeError, match="cachedir"):
        vlcache_hf.attach(model, {"cachedir": "x"})
    assert type(model) is tiny.STOCK[architecture]
    assert model.config.text_config._attn_implementation != "vlcache"


def test_an_unavailable_kernel_changes_nothing(architecture, settings):
    if transformers.utils.is_flash_attn_2_available():
        pytest.skip("flash-attn is there")
    model = tiny.stock(architecture)
    with pytest.raises(ImportError, match="flash-attn"):
        vlcache_hf.attach(model, {**settings, "base_attn_implementation": "flash_attention_2"})
    assert type(model) is tiny.STOCK[architecture]
    answers(model, tiny.stock(architecture))


@pytest.mark.parametrize("before", ["sdpa", "eager"])
@pytest.mark.parametrize("base", ["auto", "sdpa", "eager"])
def test_kernels(architecture, reference, settings, before, base):
    model = tiny.stock(architecture)
    model.set_attn_implementation(before)
    vlcache_hf.attach(model, {**settings, "base_attn_implementation": base})
    assert model.config.text_config._attn_implementation == "vlcache"
    assert model.model.visual.config._attn_implementation == ("sdpa" if base == "auto" else base)
    assert {layer.self_attn.vlcache_kernel for layer in model.model.language_model.layers} == {
        "sdpa" if base == "auto" else base
    }
    answers(model, reference, "miss")
    answers(model, reference, "exact")


# --- on and off


def test_switching_off_and_on(attached, reference):
    answers(attached, reference, "miss")
    before = attached.vlcache.stats().requests
    for other in ("sdpa", "eager", {"text_config": "sdpa"}):
        attached.set_attn_implementation(other)
        answers(attached, reference)
        assert attached.vlcache.stats().requests == before
        attached.set_attn_implementation("vlcache")
        assert attached.model.visual.config._attn_implementation != "vlcache"
        answers(attached, reference, "exact")
        before += 1


@pytest.mark.parametrize(
    "wanted", [{"text_config": "vlcache"}, {"text_config": "vlcache", "vision_config": "vlcache"}]
)
def test_switching_on_with_a_dict(attached, reference, wanted):
    attached.set_attn_implementation("sdpa")
    attached.set_attn_implementation(wanted)
    assert attached.config.text_config._attn_implementation == "vlcache"
    assert attached.model.visual.config._attn_implementation != "vlcache"
    answers(attached, reference, "miss")
    answers(attached, reference, "exact")


def test_switching_to_nonsense_is_an_error(attached, reference):
    with pytest.raises(ValueError, match="nonsense"):
        attached.set_attn_implementation("nonsense")
    answers(attached, reference, "miss")


def test_a_stock_model_switched_to_vlcache_runs_as_stock(architecture, reference):
    model = tiny.stock(architecture)
    model.set_attn_implementation("vlcache")
    assert type(model) is tiny.STOCK[architecture]
    answers(model, reference)


def test_training_mode_bypasses(attached, reference):
    answers(attached, reference, "miss")
    requests = attached.vlcache.stats().requests
    attached.train()
    answers(attached, copy.deepcopy(reference).train())
    assert attached.vlcache.stats().requests == requests
    attached.eval()
    answers(attached, reference, "exact")


# --- copies


def test_a_copy_is_independent(attached, reference):
    answers(attached, reference, "miss")
    other = copy.deepcopy(attached)
    assert type(other) is type(attached) and other.vlcache is not attached.vlcache
    assert other.vlcache.config == attached.vlcache.config and other.vlcache.stats().requests == 0
    answers(other, reference, "exact")
    with torch.no_grad():
        other.model.language_model.layers[0].self_attn.v_proj.weight.mul_(-2)
    tiny.generate(other, REQUEST, 2)
    assert tiny.kinds(other) == ["miss"]
    answers(attached, reference, "exact")


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickle(attached, reference, how):
    answers(attached, reference, "miss")
    if how == "pickle":
        other = pickle.loads(pickle.dumps(attached))
    else:
        buffer = io.BytesIO()
        torch.save(attached, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert type(other) is type(attached) and type(other.model) is type(attached.model)
    answers(other, reference, "exact")


def test_a_copy_of_the_settings_is_not_shared_by_mistake(attached):
    other = copy.deepcopy(attached)
    other.vlcache.config.namespace = "other"
    assert attached.vlcache.config.namespace == ""


def test_moving_and_casting(attached, reference):
    answers(attached, reference, "miss")
    attached.to(torch.bfloat16)
    wanted = tiny.generate(copy.deepcopy(reference).to(torch.bfloat16), REQUEST, 2)
    assert tiny.generate(attached, REQUEST, 2).tolist() == wanted.tolist()
    assert tiny.kinds(attached) == ["miss"]


def test_half_a_batch_of_calls_by_forward_and_generate(attached, reference):
    """Both paths find what the other stored."""
    with torch.no_grad():
        attached(**REQUEST, logits_to_keep=1)
        assert tiny.kinds(attached) == ["miss"]
        answers(attached, reference, "exact")
        out = attached(**REQUEST, logits_to_keep=1).logits
        assert tiny.kinds(attached) == ["exact"]
        torch.testing.assert_close(out, reference(**REQUEST, logits_to_keep=1).logits, atol=1e-5, rtol=1e-5)


def test_attaching_leaves_the_class_of_others_alone(attached, architecture):
    assert type(tiny.stock(architecture)) is tiny.STOCK[architecture]
    assert "vlcache" not in repr(tiny.stock(architecture).config)
    assert tiny.STOCK[architecture].__name__ == type(attached).__name__
