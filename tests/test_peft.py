"""PEFT adapters: whatever is switched, merged or replaced, outputs are those of stock with the same adapters."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from packaging.version import Version

import vlcache_hf
from tests import tiny
from vlcache_hf import VLCacheQwen3VLForConditionalGeneration

peft = pytest.importorskip("peft")
# peft 0.21 reads an attribute that Transformers 5.24 has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "linear_fc1", "linear_fc2"]
TEXT_ONLY = ["q_proj", "k_proj", "v_proj"]
REQUEST = tiny.batch(tiny.prompt(tiny.text(0, 3), tiny.image(0), tiny.text(1, 5)))


def lora(seed: int = 0, targets=ALL, **kwargs):
    torch.manual_seed(100 + seed)
    return peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False, **kwargs)


def add(model, name: str, seed: int, targets=ALL, **kwargs) -> None:
    config = lora(seed, targets, **kwargs)
    torch.manual_seed(200 + seed)
    model.add_adapter(name, config)


def wrap(model, name: str = "a", seed: int = 0, **kwargs):
    config = lora(seed, **kwargs)
    torch.manual_seed(200 + seed)
    return peft.get_peft_model(model, config, adapter_name=name).eval()


@pytest.fixture(params=["attached before", "attached after"])
def pair(request, tmp_path):
    """A wrapped stock model and ours, with adapters `a` and `b`."""
    settings = {"cache_dir": tmp_path / "cache"}
    stock, ours = tiny.stock("qwen3_vl"), tiny.stock("qwen3_vl")
    if request.param == "attached before":
        ours = wrap(vlcache_hf.attach(ours, settings))
    else:
        ours = wrap(ours)
        assert vlcache_hf.attach(ours, settings) is ours
    assert type(ours.get_base_model()) is VLCacheQwen3VLForConditionalGeneration
    stock = wrap(stock)
    for model in (stock, ours):
        add(model, "b", 1)
        model.eval()
    return stock, ours


@torch.no_grad()
def check(stock, ours, kind: str | None, request=REQUEST) -> None:
    """Logits and greedy tokens are those of stock; the image was served as said."""
    out = ours(**tiny.clone(request), logits_to_keep=1).logits
    found = tiny.kinds(ours)
    wanted = stock(**tiny.clone(request), logits_to_keep=1).logits
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    if kind is not None:
        assert found == [kind]
    assert tiny.generate(ours, request, 3).tolist() == tiny.generate(stock, request, 3).tolist()


def both(pair, action):
    for model in pair:
        action(model)


def test_switching(pair):
    stock, ours = pair
    with torch.no_grad():
        ours.set_adapter("a"), stock.set_adapter("a")
        a = stock(**REQUEST).logits
        stock.set_adapter("b")
        assert not torch.allclose(a, stock(**REQUEST).logits, atol=1e-2)  # adapters that change nothing test nothing
        stock.set_adapter("a")
    for kind in ("miss", "exact"):
        for name in ("a", "b"):
            both(pair, lambda model: model.set_adapter(name))
            check(stock, ours, kind)
        with contextlib.ExitStack() as stack:
            both(pair, lambda model: stack.enter_context(model.disable_adapter()))
            check(stock, ours, kind)


def test_several_adapters_at_once(pair):
    stock, ours = pair
    check(stock, ours, "miss")
    for names, kind in ((["a", "b"], "miss"), (["a"], "exact"), (["a", "b"], "exact"), (["b"], "miss")):
        both(pair, lambda model: model.base_model.set_adapter(names))
        check(stock, ours, kind)


def test_base_entries_are_those_of_the_bare_model(tmp_path):
    settings = {"cache_dir": tmp_path / "cache"}
    bare, stock = vlcache_hf.attach(tiny.stock("qwen3_vl"), settings), tiny.stock("qwen3_vl")
    check(stock, bare, "miss")
    ours, stock_peft = wrap(vlcache_hf.attach(tiny.stock("qwen3_vl"), settings)), wrap(tiny.stock("qwen3_vl"))
    check(stock_peft, ours, "miss")
    with ours.disable_adapter():
        check(stock, ours, "exact")
    ours.unload()
    check(stock, bare, "exact")


def test_unload_gives_the_base_back(pair):
    stock, ours = pair
    with contextlib.ExitStack() as stack:
        both(pair, lambda model: stack.enter_context(model.disable_adapter()))
        check(stock, ours, "miss")
    stock, ours = stock.unload(), ours.unload()
    check(stock, ours, "exact")


def test_another_adapter_of_the_same_name(pair):
    stock, ours = pair
    check(stock, ours, "miss")
    for seed in (5, 6):
        both(pair, lambda model: model.delete_adapter("a"))
        both(pair, lambda model: add(model, "a", seed))
        both(pair, lambda model: (model.set_adapter("a"), model.eval()))
        check(stock, ours, "miss")
        check(stock, ours, "exact")


def test_an_adapter_loaded_from_disk(pair, tmp_path):
    stock, ours = pair
    check(stock, ours, "miss")
    other = wrap(tiny.stock("qwen3_vl"), "a", seed=9)
    other.save_pretrained(tmp_path / "adapter")
    both(pair, lambda model: model.delete_adapter("a"))
    both(pair, lambda model: model.load_adapter(tmp_path / "adapter" / "a", "a"))
    both(pair, lambda model: (model.set_adapter("a"), model.eval()))
    check(stock, ours, "miss")
    check(other, ours, "exact")


def test_edited_adapter_weights(pair):
    stock, ours = pair
    check(stock, ours, "miss")
    with torch.no_grad():
        for model in pair:
            model.base_model.model.model.language_model.layers[0].self_attn.k_proj.lora_B["a"].weight[0, 0] += 1
    check(stock, ours, "miss")


def test_the_scale_counts(pair):
    stock, ours = pair
    check(stock, ours, "miss")
    for factor, kind in ((0.5, "miss"), (2.0, "exact")):

        def scale(model):
            for module in model.modules():
                if hasattr(module, "scaling") and isinstance(module.scaling, dict):
                    module.scaling["a"] *= factor

        both(pair, scale)
        check(stock, ours, kind)


def test_inactive_adapters_do_not_count(pair):
    stock, ours = pair
    check(stock, ours, "miss")
    both(pair, lambda model: add(model, "c", 3))
    both(pair, lambda model: (model.set_adapter("a"), model.eval()))
    check(stock, ours, "exact")


def test_an_adapter_of_the_text_model_keeps_the_features(tmp_path):
    settings = {"cache_dir": tmp_path / "cache"}
    stock, ours = tiny.stock("qwen3_vl"), vlcache_hf.attach(tiny.stock("qwen3_vl"), settings)
    check(stock, ours, "miss")
    stock, ours = wrap(stock, targets=TEXT_ONLY), wrap(ours, targets=TEXT_ONLY)
    check(stock, ours, "miss")
    assert ours.vlcache.stats().vision_calls == 1


def test_merging_and_unmerging(pair):
    stock, ours = pair
    check(stock, ours, "miss")
    both(pair, lambda model: model.merge_adapter(["a"]))
    check(stock, ours, None)
    check(stock, ours, "exact")
    both(pair, lambda model: model.unmerge_adapter())
    check(stock, ours, None)
    with contextlib.ExitStack() as stack:
        both(pair, lambda model: stack.enter_context(model.disable_adapter()))
        check(stock, ours, None)


def test_base_after_merging(pair):
    stock, ours = pair
    with contextlib.ExitStack() as stack:
        both(pair, lambda model: stack.enter_context(model.disable_adapter()))
        check(stock, ours, "miss")
    both(pair, lambda model: model.merge_adapter(["b"]))
    check(stock, ours, "miss")
    both(pair, lambda model: model.set_adapter("a"))
    check(stock, ours, None)


def test_merging_another_adapter_of_the_same_name(pair):
    """No request sees the model unmerged in between: merging edits weights where no counter looks."""
    stock, ours = pair
    both(pair, lambda model: model.merge_adapter(["a"]))
    check(stock, ours, "miss")
    both(pair, lambda model: model.unmerge_adapter())
    both(pair, lambda model: model.delete_adapter("a"))
    both(pair, lambda model: add(model, "a", 7))
    both(pair, lambda model: (model.set_adapter("a"), model.eval()))
    both(pair, lambda model: model.merge_adapter(["a"]))
    check(stock, ours, "miss")


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("met", ["base", "adapter", "both"])
def test_merge_and_unload(pair, met, safe):
    """What is left is the bare module tree with other weights in the same tensors."""
    stock, ours = pair
    if met != "base":
        check(stock, ours, "miss")
    if met != "adapter":
        with contextlib.ExitStack() as stack:
            both(pair, lambda model: stack.enter_context(model.disable_adapter()))
            check(stock, ours, "miss")
    stock, ours = (model.merge_and_unload(safe_merge=safe) for model in pair)
    assert not any("lora" in name for name, _ in ours.named_parameters())
    check(stock, ours, "miss")
    check(stock, ours, "exact")


@pytest.mark.parametrize("frozen", [False, True])
def test_an_adapter_merged_into_a_model_in_use(tmp_path, frozen):
    """No request sees the wrapper: the same module tree, the same tensors, the same version counters."""
    stock, ours = tiny.stock("qwen3_vl"), vlcache_hf.attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path / "cache"})
    if frozen:
        ours.requires_grad_(False)
    check(stock, ours, "miss")
    check(wrap(stock).merge_and_unload(), wrap(ours).merge_and_unload(), "miss")


def test_dora(tmp_path):
    settings = {"cache_dir": tmp_path / "cache"}
    stock, ours = tiny.stock("qwen3_vl"), vlcache_hf.attach(tiny.stock("qwen3_vl"), settings)
    pair = tuple(wrap(model, use_dora=True) for model in (stock, ours))
    stock, ours = pair
    check(stock, ours, "miss")
    check(stock, ours, "exact")
    with torch.no_grad():
        for model in pair:
            layer = model.base_model.model.model.language_model.layers[0].self_attn.k_proj
            layer.lora_magnitude_vector["a"].weight[0] += 1
    check(stock, ours, "miss")
    both(pair, lambda model: model.merge_adapter())
    check(stock, ours, None)


def test_modules_to_save(tmp_path):
    settings = {"cache_dir": tmp_path / "cache"}
    stock, ours = tiny.stock("qwen3_vl"), vlcache_hf.attach(tiny.stock("qwen3_vl"), settings)
    pair = tuple(wrap(m, targets=TEXT_ONLY, modules_to_save=["embed_tokens", "merger"]) for m in (stock, ours))
    stock, ours = pair
    check(stock, ours, "miss")
    with torch.no_grad():
        for model in pair:
            model.base_model.model.model.language_model.embed_tokens.modules_to_save["a"].weight[2:140] *= 1.5
    check(stock, ours, "miss")
    with contextlib.ExitStack() as stack:
        both(pair, lambda model: stack.enter_context(model.disable_adapter()))
        check(stock, ours, "miss")
    check(stock, ours, "exact")


def test_ia3(tmp_path):
    stock, ours = tiny.stock("qwen3_vl"), vlcache_hf.attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path / "cache"})
    check(stock, ours, "miss")

    def make(model):
        config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
        wrapped = peft.get_peft_model(model, config).eval()
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "ia3" in name:
                    parameter.mul_(1.7)
        return wrapped

    stock, ours = make(stock), make(ours)
    check(stock, ours, "miss")
    check(stock, ours, "exact")


def test_one_adapter_per_batch_row(tmp_path):
    """`adapter_names` reaches the layers through hooks that index the batch; a packed prefill has no batch."""
    stock, ours = tiny.stock("qwen3_vl"), vlcache_hf.attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path / "cache"})
    pair = stock, ours = wrap(stock, targets=TEXT_ONLY), wrap(ours, targets=TEXT_ONLY)
    for model in pair:
        add(model, "b", 1, targets=TEXT_ONLY)
        model.eval()
    row = tiny.prompt(tiny.text(0, 3), tiny.image(0), tiny.text(1, 5))
    request = tiny.batch(row, row, row)
    names = ["a", "b", "__base__"]
    wanted = tiny.generate(stock, request, adapter_names=names).tolist()
    assert len({str(tokens) for tokens in wanted}) == 3
    for _ in range(2):
        assert tiny.generate(ours, request, adapter_names=names).tolist() == wanted
    for name in ("a", "b"):
        both(pair, lambda model: model.set_adapter(name))
        check(stock, ours, None)


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_wrapper_for_causal_models(tmp_path, order):
    settings = {"cache_dir": tmp_path / "cache"}
    stock = wrap(tiny.stock("qwen3_vl"), task_type="CAUSAL_LM")
    ours = tiny.stock("qwen3_vl")
    if order == "before":
        ours = wrap(vlcache_hf.attach(ours, settings), task_type="CAUSAL_LM")
    else:
        ours = vlcache_hf.attach(wrap(ours, task_type="CAUSAL_LM"), settings)
    for kind in ("miss", "exact"):
        out = tiny.generate(ours, REQUEST)
        assert tiny.kinds(ours) == [kind]
        assert out.tolist() == tiny.generate(stock, REQUEST).tolist()
    out = tiny.generate(ours, REQUEST, cache_implementation="static")
    assert out.tolist() == tiny.generate(stock, REQUEST).tolist()
    assert tiny.kinds(ours) == ["exact"]


@pytest.mark.skipif(Version(peft.__version__) < Version("0.22"), reason="Transformers 5.24 wants peft 0.22")
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_integration_of_transformers(tmp_path, order):
    settings = {"cache_dir": tmp_path / "cache"}
    stock, ours = tiny.stock("qwen3_vl"), tiny.stock("qwen3_vl")
    if order == "before":
        vlcache_hf.attach(ours, settings)
        check(stock, ours, "miss")
    for model in (stock, ours):
        for seed, name in enumerate("ab"):
            config = lora(seed)
            torch.manual_seed(300 + seed)
            model.add_adapter(config, adapter_name=name)
        model.eval()
    if order == "after":
        vlcache_hf.attach(ours, settings)
    pair = stock, ours
    for kind in ("miss", "exact"):
        for name in ("a", "b", ["a", "b"]):
            both(pair, lambda model: model.set_adapter(name))
            check(stock, ours, kind)
        both(pair, lambda model: model.disable_adapters())
        check(stock, ours, "exact" if order == "before" else kind)
        both(pair, lambda model: model.enable_adapters())
    both(pair, lambda model: model.delete_adapter("a"))
    both(pair, lambda model: model.set_adapter("b"))
    check(stock, ours, "exact")


def test_a_copy_of_a_wrapped_model(pair):
    stock, ours = pair
    check(stock, ours, "miss")
    other = copy.deepcopy(ours)
    check(stock, other, "exact")
    other.set_adapter("b"), stock.set_adapter("b")
    check(stock, other, "miss")
    stock.set_adapter("a")
    check(stock, ours, "exact")


def test_training_an_adapter_between_requests(pair):
    stock, ours = pair
    check(stock, ours, "miss")
    for model in pair:
        model.train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        model(**tiny.clone(REQUEST), labels=REQUEST["input_ids"]).loss.backward()
        optimizer.step()
        model.eval()
    check(stock, ours, "miss")
