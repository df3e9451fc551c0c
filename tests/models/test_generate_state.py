"""What `generate()` leaves behind and finds: positions, interruptions, hooks, wrong inputs, modes, threads."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import vlcache_hf
from tests import tiny


def test_without_token_types(pair, chat):
    """`generate()` then uses sequential positions: another layout, never mixed with M-RoPE."""
    bare = {name: value for name, value in chat.items() if name != "mm_token_type_ids"}
    first = pair.check(chat)
    second = pair.check(bare)
    pair.check(chat, cold=["exact"])
    assert first.tolist() != second.tolist()
    assert pair.ours.vlcache.stats().reused == 0


def test_rope_deltas_follow_stock(pair):
    """Image, other size, text only, image, a batch, a single row: as stock leaves them, cold and warm."""
    one = tiny.batch(tiny.prompt(tiny.text(0, 5), tiny.image(0), tiny.text(1, 6)))
    two = tiny.batch(tiny.prompt(tiny.text(0, 5), tiny.image(1, 4, 12), tiny.text(1, 6)))
    text = tiny.batch(tiny.prompt(tiny.text(4, 9)))
    ragged = tiny.batch(
        tiny.prompt(tiny.text(0, 5), tiny.image(0), tiny.text(1, 6)), tiny.prompt(tiny.text(4, 9)), side="left"
    )
    for _ in range(2):
        for inputs in (one, two, text, one, ragged, one):
            expected, got = tiny.generate(pair.stock, inputs), tiny.generate(pair.ours, inputs)
            assert got.tolist() == expected.tolist()
            assert pair.ours.model.rope_deltas.tolist() == pair.stock.model.rope_deltas.tolist()
            (out, wanted) = pair.forward(inputs, logits_to_keep=1)
            assert (out.logits - wanted.logits).abs().max() <= 1e-5
            assert pair.ours.model.rope_deltas.tolist() == pair.stock.model.rope_deltas.tolist()
    assert pair.ours.vlcache.stats().exact > 10


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["decoder", "tower"])
def test_broken_off_prefill_stores_nothing(either, chat, monkeypatch, error, where):
    core = either.ours.model
    part = core.language_model.layers[2].mlp if where == "decoder" else core.visual.blocks[1].mlp
    real = type(part).forward

    def fail(module, *args, **kwargs):
        if module is part:
            raise error("stop")
        return real(module, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(part), "forward", fail)
        with pytest.raises(error, match="stop"):
            tiny.generate(either.ours, chat)
    assert either.files == []
    either.check(chat)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_of_each_row(qwen3, chat, tmp_path):
    """PEFT's `adapter_names` chooses by hooks, row by row, what no active adapter tells."""
    peft = pytest.importorskip("peft")
    models = []
    for source in (qwen3.stock, qwen3.ours):
        torch.manual_seed(0)
        lora = peft.LoraConfig(
            r=4, lora_alpha=64, target_modules=r".*language_model.*(k|v)_proj", init_lora_weights=False
        )
        models.append(peft.get_peft_model(copy.deepcopy(source), lora, adapter_name="one"))
        models[-1].add_adapter("two", lora)
    stock, ours = (model.eval() for model in models)
    vlcache_hf.attach(ours, {"cache_dir": tmp_path / "peft"})
    both = {name: torch.cat([value, value]) for name, value in chat.items()}
    answers = []
    for inputs, names in [(chat, None), (chat, ["two"]), (chat, ["__base__"]), (both, ["one", "two"]), (chat, None)]:
        kwargs = {"adapter_names": names} if names else {}
        expected = tiny.generate(stock, inputs, 4, **kwargs).tolist()
        assert tiny.generate(ours, inputs, 4, **kwargs).tolist() == expected
        answers.append(expected[0][-4:])
    assert answers[0] != answers[1] != answers[2]
    assert tiny.kinds(ours.get_base_model()) == ["exact"]


def steer(_, __, output):
    return output * 1.5


@pytest.mark.parametrize("where", ["decoder", "tower"])
def test_hooks_that_change_values(pair, chat, where):
    """Steering hooks of users: what was computed under them is never served without them, and the other way round."""
    handles = []
    for hooked in (True, False, True, False):
        for model in (pair.stock, pair.ours) if hooked else ():
            core = model.model
            part = core.language_model.layers[1] if where == "decoder" else core.visual.blocks[0]
            handles.append(part.register_forward_hook(steer))
        try:
            for _ in range(2):
                expected = tiny.generate(pair.stock, chat, return_dict_in_generate=True, output_logits=True)
                got = tiny.generate(pair.ours, chat, return_dict_in_generate=True, output_logits=True)
                pair.same(got, expected)
        finally:
            while handles:
                handles.pop().remove()
    assert pair.kinds == ["exact"]  # without hooks


def test_inputs_are_not_changed(either, chat):
    before = tiny.clone(chat)
    for _ in range(2):
        either.ours.generate(**chat, max_new_tokens=3, do_sample=False)
        assert all(chat[name].equal(value) for name, value in before.items())
    assert either.kinds == ["exact"]


def test_wrong_number_of_features_fails_as_stock(either, chat):
    short = dict(chat, pixel_values=tiny.image(0, 4, 8)[0], image_grid_thw=torch.tensor([[1, 4, 8]]))
    with pytest.raises(Exception) as expected:
        tiny.generate(either.stock, short)
    with pytest.raises(type(expected.value)) as got:
        tiny.generate(either.ours, short)
    assert str(got.value) == str(expected.value)
    either.check(chat)


def test_pixels_without_grid_fail_as_stock(either, chat):
    bare = {name: value for name, value in chat.items() if name != "image_grid_thw"}
    with pytest.raises(Exception) as expected:
        tiny.generate(either.stock, bare)
    with pytest.raises(type(expected.value)):
        tiny.generate(either.ours, bare)


def test_inference_mode(either, chat):
    """Tensors stored under inference mode serve calls outside of it, and the other way round."""
    expected = tiny.generate(either.stock, chat)
    with torch.inference_mode():
        assert tiny.generate(either.ours, chat).tolist() == expected.tolist()
    assert either.kinds == ["miss"]
    either.check(chat, cold=["exact"])
    with torch.inference_mode():
        assert tiny.generate(either.ours, chat).tolist() == expected.tolist()
    assert either.kinds == ["exact"]


def test_last_request_is_of_its_thread(qwen3, chat):
    seen = []
    tiny.generate(qwen3.ours, chat, 2)
    thread = threading.Thread(target=lambda: seen.append(qwen3.ours.vlcache.last_request))
    thread.start()
    thread.join()
    assert seen == [None] and qwen3.kinds == ["miss"]
