"""Weights that are elsewhere: accelerate keeps them on the CPU or on disk and leaves `meta` tensors behind."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from transformers import AutoModelForImageTextToText

import vlcache_hf
from tests import tiny
from vlcache_hf import fingerprint

REQUEST = tiny.batch(tiny.prompt(tiny.text(0, 3), tiny.image(0), tiny.text(1, 5)))


def device_map(*on_disk: str) -> dict[str, str]:
    parts = [
        "model.visual",
        "model.language_model.embed_tokens",
        "model.language_model.norm",
        "model.language_model.rotary_emb",
        "lm_head",
        *(f"model.language_model.layers.{i}" for i in range(4)),
    ]
    return {part: "disk" if any(part.endswith(end) for end in on_disk) else "cpu" for part in parts}


SOME_LAYERS = device_map("layers.1", "layers.2")
NEARLY_ALL = device_map("layers.0", "layers.1", "layers.2", "layers.3", "visual", "embed_tokens", "norm")


@torch.no_grad()
def check(stock, ours, kind: str | None) -> None:
    out = ours(**tiny.clone(REQUEST), logits_to_keep=1).logits
    if kind is not None:
        assert tiny.kinds(ours) == [kind]
    torch.testing.assert_close(out, stock(**REQUEST, logits_to_keep=1).logits, atol=1e-5, rtol=1e-5)
    assert tiny.generate(ours, REQUEST, 3).tolist() == tiny.generate(stock, REQUEST, 3).tolist()


def on_meta(model) -> int:
    return sum(parameter.device.type == "meta" for parameter in model.parameters())


def load(folder, tmp_path, placement, **kwargs):
    return AutoModelForImageTextToText.from_pretrained(
        folder,
        device_map=placement,
        offload_folder=tmp_path / "offload",
        attn_implementation="vlcache",
        vlcache_config={"cache_dir": tmp_path / "cache"},
        **kwargs,
    )


def save(tmp_path, architecture="qwen3_vl", seed=0):
    stock = tiny.stock(architecture, seed)
    stock.save_pretrained(tmp_path / f"model{seed}")
    return stock, tmp_path / f"model{seed}"


@pytest.mark.parametrize("placement", [SOME_LAYERS, NEARLY_ALL, {"": "cpu"}], ids=["some", "nearly all", "cpu"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_loaded_with_a_device_map(tmp_path, architecture, placement):
    stock, folder = save(tmp_path, architecture)
    ours = load(folder, tmp_path, placement)
    assert (on_meta(ours) > 0) == ("disk" in placement.values())
    check(stock, ours, "miss")
    check(stock, ours, "exact")
    assert ours.vlcache.stats().vision_calls == 1


def test_an_offloaded_model_shares_entries_with_the_model_in_memory(tmp_path):
    """Not needed, but it shows that the weights themselves were read."""
    stock, folder = save(tmp_path)
    check(stock, load(folder, tmp_path, None), "miss")
    check(stock, load(folder, tmp_path, SOME_LAYERS), "exact")


@pytest.mark.parametrize("placement", [SOME_LAYERS, NEARLY_ALL], ids=["some", "nearly all"])
def test_two_offloaded_models_share_nothing(tmp_path, placement):
    for seed in (0, 1):
        stock, folder = save(tmp_path, seed=seed)
        check(stock, load(folder, tmp_path, placement), "miss")
    stock, folder = save(tmp_path, seed=0)
    check(stock, load(folder, tmp_path, placement), "exact")


def test_models_that_differ_only_on_disk_share_nothing(tmp_path):
    stock, folder = save(tmp_path)
    check(stock, load(folder, tmp_path, SOME_LAYERS), "miss")
    with torch.no_grad():
        stock.model.language_model.layers[1].self_attn.k_proj.weight[3, 5] += 1
    stock.save_pretrained(folder)
    check(stock, load(folder, tmp_path, SOME_LAYERS), "miss")


def dispatched(tmp_path):
    model = tiny.stock("qwen3_vl")
    return dispatch_model(model, SOME_LAYERS, main_device="cpu", offload_dir=str(tmp_path / "offload"))


def offloaded_to_cpu(tmp_path):
    return cpu_offload(tiny.stock("qwen3_vl"), execution_device=torch.device("cpu"))


def offloaded_to_disk(tmp_path):
    return disk_offload(tiny.stock("qwen3_vl"), str(tmp_path / "offload"), execution_device=torch.device("cpu"))


def with_buffers(tmp_path):
    return cpu_offload(tiny.stock("qwen3_vl"), execution_device=torch.device("cpu"), offload_buffers=True)


@pytest.mark.parametrize("move", [dispatched, offloaded_to_cpu, offloaded_to_disk, with_buffers])
def test_attached_to_an_offloaded_model(tmp_path, move):
    model = move(tmp_path)
    assert on_meta(model) > 0
    ours = vlcache_hf.attach(model, {"cache_dir": tmp_path / "cache"})
    check(tiny.stock("qwen3_vl"), ours, "miss")
    check(tiny.stock("qwen3_vl"), ours, "exact")


@pytest.mark.parametrize("move", [dispatched, offloaded_to_cpu, offloaded_to_disk])
def test_attached_first_and_offloaded_then(tmp_path, move, monkeypatch):
    ours = vlcache_hf.attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path / "cache"})
    check(tiny.stock("qwen3_vl"), ours, "miss")
    monkeypatch.setattr(tiny, "stock", lambda *args: ours)
    moved = move(tmp_path)
    monkeypatch.undo()
    assert moved is ours and on_meta(ours) > 0
    check(tiny.stock("qwen3_vl"), ours, "exact")


def test_offloaded_weights_are_read_for_the_fingerprint_once(tmp_path, monkeypatch):
    """A model of 16 GB on disk cannot be read anew for each request."""
    ours = load(save(tmp_path)[1], tmp_path, SOME_LAYERS)
    tiny.generate(ours, REQUEST)
    read = []
    original = fingerprint._hash

    def spy(hasher, weight):
        read.append(weight.key)
        return original(hasher, weight)

    monkeypatch.setattr(fingerprint, "_hash", spy)
    tiny.generate(ours, REQUEST)
    assert tiny.kinds(ours) == ["exact"]
    assert read == []


def test_weights_that_cannot_be_read_are_not_cached(tmp_path, monkeypatch, caplog):
    """Neither a crash nor an empty fingerprint."""
    stock = tiny.stock("qwen3_vl")
    ours = vlcache_hf.attach(offloaded_to_cpu(tmp_path), {"cache_dir": tmp_path / "cache"})
    monkeypatch.setattr(fingerprint, "_offloaded", lambda module, name: None)
    for _ in range(2):
        assert tiny.generate(ours, REQUEST).tolist() == tiny.generate(stock, REQUEST).tolist()
    assert not (tmp_path / "cache").exists()
    assert sum("Nothing is cached" in record.getMessage() for record in caplog.records) == 1
