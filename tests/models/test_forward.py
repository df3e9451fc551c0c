"""Direct `forward()` against the stock model, cold and warm: outputs, caches, gradients, training."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache

import vlcache_hf
from tests import tiny
from tests.models.conftest import close
from vlcache_hf import VLCache

IMAGE_AND_TEXT = [tiny.text(0, 5), tiny.image(0), tiny.text(1, 6)]


def test_signature(pair):
    for name in ("forward", "prepare_inputs_for_generation", "generate"):
        assert inspect.signature(getattr(pair.ours, name)) == inspect.signature(getattr(pair.stock, name))
    for name in ("forward", "get_image_features", "get_rope_index"):
        mine, theirs = getattr(pair.ours.model, name), getattr(pair.stock.model, name)
        assert inspect.signature(mine) == inspect.signature(theirs)


def test_last_logits(pair, chat):
    pair.check_forward(chat)


@pytest.mark.parametrize("keep", [1, 3, 6, torch.tensor([0, 5]), torch.tensor([-1]), 0, 12, 10_000], ids=str)
def test_logits_to_keep(either, chat, keep):
    """Rows whose logits are asked for are computed; an image among them is not reused."""
    length = chat["input_ids"].shape[1]
    for call in range(2):
        (got, expected), towers = either.towers(lambda: either.forward(chat, logits_to_keep=keep))
        close(got.logits, expected.logits)
        assert got.cache.get_seq_length() == expected.cache.get_seq_length() == length
        assert towers == 1 - call
        tail = isinstance(keep, int) and 0 < keep <= 6  # of the text behind the image
        assert either.kinds == ["exact" if tail and call else "miss"]
    assert either.ours.vlcache.last_request.in_full == (
        "`logits_to_keep` chooses single positions" if isinstance(keep, torch.Tensor) else None
    )


def test_default_forward_gives_all_logits(either, chat):
    tiny.generate(either.ours, chat)
    got, expected = either.forward(chat)
    assert got.logits.shape[1] == chat["input_ids"].shape[1]
    close(got.logits, expected.logits)
    assert either.kinds == ["miss"]
    either.check(chat, cold=["exact"])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keep", [0, 1, 4])
def test_padded_batch(either, side, keep):
    """Also the logits at padding are those of stock."""
    rows = [
        tiny.prompt(tiny.text(0, 7)),
        tiny.prompt(*IMAGE_AND_TEXT),
        tiny.prompt(tiny.image(1, 4, 4), tiny.text(2, 5), tiny.image(2, 4, 8), tiny.text(3, 7)),
    ]
    inputs = tiny.batch(*rows, side=side)
    for _ in range(2):
        got, expected = either.forward(inputs, logits_to_keep=keep)
        close(got.logits, expected.logits)
    # left: what is asked for is text; right: the shorter rows end in padding, whose logits ask for no image
    assert either.kinds == (["miss"] * 3 if keep == 0 else ["exact"] * 3)


def test_generate_and_forward_share_entries(pair, chat):
    tiny.generate(pair.ours, chat)
    (got, expected), towers = pair.towers(lambda: pair.forward(chat, logits_to_keep=1))
    close(got.logits, expected.logits)
    assert pair.kinds == ["exact"] and towers == 0


def test_positional_arguments(pair, chat):
    """`input_ids` by position, as some trainers and wrappers call it."""
    rest = {name: value for name, value in chat.items() if name != "input_ids"}
    with torch.no_grad():
        expected = pair.stock(chat["input_ids"], **rest, logits_to_keep=1).logits
        close(pair.ours(chat["input_ids"], **rest, logits_to_keep=1).logits, expected)
        close(pair.ours(chat["input_ids"], **rest, logits_to_keep=1).logits, expected)
    assert pair.kinds == ["exact"]


def test_cache_kinds(either, chat):
    length = chat["input_ids"].shape[1]
    for make in (
        lambda: DynamicCache(),
        lambda: DynamicCache(config=either.stock.config),
        lambda: StaticCache(config=either.stock.config, max_cache_len=64),
        lambda: VLCache(),
        lambda: VLCache(either.stock.config),
    ):
        either.ours.vlcache.clear()
        for kinds in (["miss"], ["exact"]):
            caches = [make(), make()]
            with torch.no_grad():
                expected = either.stock(**chat, cache=caches[0], logits_to_keep=1)
                got = either.ours(**chat, cache=caches[1], logits_to_keep=1)
            close(got.logits, expected.logits)
            assert either.kinds == kinds
            assert got.cache is caches[1]
            for mine, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
                assert type(mine) is type(theirs)
                assert int(mine.get_seq_length()) == int(theirs.get_seq_length()) == length
                close(mine.keys[:, :, :length], theirs.keys[:, :, :length])
                close(mine.values[:, :, :length], theirs.values[:, :, :length])


def test_use_cache_false(pair, chat):
    pair.check_forward(chat, use_cache=False)
    got, expected = pair.forward(chat, use_cache=False, logits_to_keep=1)
    assert got.cache is None and expected.cache is None and list(got.keys()) == list(expected.keys())


def test_config_without_cache(qwen3, chat):
    ours, stock = copy.deepcopy(qwen3.ours), copy.deepcopy(qwen3.stock)
    for model in (ours, stock):
        model.config.use_cache = model.config.text_config.use_cache = False
    with torch.no_grad():
        for kinds in (["miss"], ["exact"]):
            expected, got = stock(**chat, logits_to_keep=1), ours(**chat, logits_to_keep=1)
            close(got.logits, expected.logits)
            assert (got.cache is None) == (expected.cache is None)
            assert tiny.kinds(ours) == kinds


def test_output_of_a_hit(pair, chat):
    """Keys, types and features are those of stock; the features come when they are looked at."""
    for _ in range(2):
        (got, expected), _ = pair.towers(lambda: pair.forward(chat, logits_to_keep=1))
        assert type(got) is type(expected)
        assert list(got.keys()) == list(expected.keys())
        assert got.hidden_states is None and got.loss is None
    assert pair.kinds == ["exact"]
    features, wanted = got.image_outputs, expected.image_outputs
    assert len(features.pooler_output) == len(wanted.pooler_output) == 1
    close(features.pooler_output[0], wanted.pooler_output[0])
    for level, wanted_level in zip(
        getattr(features, "deepstack_features", None) or [],
        getattr(wanted, "deepstack_features", None) or [],
        strict=True,
    ):
        close(level[0], wanted_level[0])


def test_without_return_dict(pair, chat):
    for kinds in (["miss"], ["exact"]):
        got, expected = pair.forward(chat, return_dict=False, logits_to_keep=1)
        assert isinstance(got, tuple) and isinstance(expected, tuple)
        close(got[0], expected[0])
        assert pair.kinds == kinds
        assert got[1].get_seq_length() == expected[1].get_seq_length()
    full, expected = pair.forward(chat, return_dict=False)
    close(full[0], expected[0])


def test_tuple_has_as_many_parts(pair, chat):
    """Code that unpacks `logits, cache, features = model(..., return_dict=False)`."""
    for keep in (1, 1, 0):
        got, expected = pair.forward(chat, return_dict=False, logits_to_keep=keep)
        assert [type(part) for part in got] == [type(part) for part in expected]


def test_output_can_be_pickled(qwen3, chat):
    for _ in range(2):
        got, expected = qwen3.forward(chat, logits_to_keep=1)
        pickle.dumps(expected)
        again = pickle.loads(pickle.dumps(got))
        close(again.logits, got.logits)
        close(again.image_outputs.pooler_output[0], expected.image_outputs.pooler_output[0])


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_values_of_all_rows(make_pair, chat, name):
    for architecture in ("qwen2_5_vl", "qwen3_vl"):
        pair = make_pair(architecture, {"base_attn_implementation": "eager"})
        eager = copy.deepcopy(pair.stock)
        eager.set_attn_implementation("eager")
        tiny.generate(pair.ours, chat)
        with torch.no_grad():
            expected = eager(**chat, **{name: True})
            got = pair.ours(**chat, **{name: True})
        field = name.removeprefix("output_")
        assert len(got[field]) == len(expected[field]) > 0
        for one, other in zip(got[field], expected[field]):
            close(one, other, 1e-4)
        close(got.logits, expected.logits)


def test_router_logits(make_pair, chat):
    pair = make_pair("qwen3_vl_moe")
    tiny.generate(pair.ours, chat)
    got, expected = pair.forward(chat, output_router_logits=True)
    assert len(got.router_logits) == len(expected.router_logits) == 4
    for one, other in zip(got.router_logits, expected.router_logits):
        close(one, other)
    close(got.aux_loss, expected.aux_loss)


def test_hidden_states_asked_for_in_the_config(qwen3, chat):
    ours, stock = copy.deepcopy(qwen3.ours), copy.deepcopy(qwen3.stock)
    for model in (ours, stock):
        model.config.output_hidden_states = True
        model.config.text_config.output_hidden_states = True
    tiny.generate(qwen3.ours, chat)
    with torch.no_grad():
        expected, got = stock(**chat, logits_to_keep=1), ours(**chat, logits_to_keep=1)
    assert len(got.hidden_states or ()) == len(expected.hidden_states or ())
    close(got.logits, expected.logits)


def test_switched_off(pair, chat):
    tiny.generate(pair.ours, chat)
    stats = pair.ours.vlcache.stats()
    pair.ours.set_attn_implementation("sdpa")
    got, expected = pair.forward(chat, logits_to_keep=1)
    close(got.logits, expected.logits)
    assert pair.ours.vlcache.stats() == stats
    pair.ours.set_attn_implementation("vlcache")
    pair.check(chat, cold=["exact"])


@pytest.mark.slow
def test_compiled_forward(qwen3, chat):
    """`model.forward = torch.compile(model.forward)`, as the Transformers docs have it: right for direct calls, and
    `generate()` still serves its prefill."""
    torch.compiler.reset()
    ours = vlcache_hf.attach(copy.deepcopy(qwen3.ours), {"cache_dir": qwen3.cache_dir})
    ours.forward = torch.compile(ours.forward, backend="eager", fullgraph=True)
    text = tiny.batch(tiny.prompt(tiny.text(0, 9)))
    with torch.no_grad():
        close(ours(**text).logits, qwen3.stock(**text).logits)
    expected = tiny.generate(qwen3.stock, chat, 4)
    try:
        for kinds in (["miss"], ["exact"]):
            assert tiny.generate(ours, chat, 4).tolist() == expected.tolist()
            assert tiny.kinds(ours) == kinds
    finally:
        torch.compiler.reset()
