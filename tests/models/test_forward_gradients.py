"""Training, losses and gradients against the stock model: nothing is read or written for them."""

from __future__ import annotations

import copy

import pytest
import torch

from tests import tiny
from tests.models.conftest import close


def gradients(model, inputs, **kwargs):
    model.zero_grad()
    labels = inputs["input_ids"].masked_fill(inputs["mm_token_type_ids"].bool(), -100)
    output = model(**inputs, labels=labels, **kwargs)
    output.loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return output.loss.detach(), grads


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_loss_and_gradients(pair, chat, training):
    with torch.inference_mode():
        tiny.generate(pair.ours, chat)
    before, stats = pair.files, pair.ours.vlcache.stats()
    results = []
    try:
        for model in (pair.stock, pair.ours):
            model.train(training)
            results.append(gradients(model, chat))
    finally:
        pair.stock.eval(), pair.ours.eval()
    (loss, expected), (got_loss, got) = results
    assert abs(float(loss) - float(got_loss)) <= 1e-5
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (got[name] is None) == (gradient is None), name
        if gradient is not None:
            close(got[name], gradient, 1e-5 * max(1.0, float(gradient.abs().max())))
    assert any("visual" in name and gradient is not None for name, gradient in got.items())
    assert pair.files == before and pair.ours.vlcache.stats() == stats
    pair.check(chat, cold=["exact"])


def test_gradient_checkpointing(either, chat):
    ours, stock = copy.deepcopy(either.ours), copy.deepcopy(either.stock)
    results = []
    for model in (stock, ours):
        model.train()
        model.activation_checkpointing_enable()
        results.append(gradients(model, chat, use_cache=False))
    (loss, expected), (got_loss, got) = results
    assert abs(float(loss) - float(got_loss)) <= 1e-5
    assert all(
        gradient is None or (got[name] - gradient).abs().max() <= 1e-5 * max(1.0, float(gradient.abs().max()))
        for name, gradient in expected.items()
    )


def test_labels_without_gradients(pair, chat):
    tiny.generate(pair.ours, chat)
    got, expected = pair.forward(chat, labels=chat["input_ids"])
    assert abs(float(got.loss) - float(expected.loss)) <= 1e-5
    close(got.logits, expected.logits)
    pair.check(chat, cold=["exact"])


def test_train_mode_without_gradients(pair, chat):
    tiny.generate(pair.ours, chat)
    stats = pair.ours.vlcache.stats()
    try:
        pair.stock.train(), pair.ours.train()
        got, expected = pair.forward(chat, logits_to_keep=1)
        assert tiny.generate(pair.ours, chat).tolist() == tiny.generate(pair.stock, chat).tolist()
    finally:
        pair.stock.eval(), pair.ours.eval()
    close(got.logits, expected.logits)
    assert pair.ours.vlcache.stats() == stats


def test_dropout_is_never_stored(make_pair, chat):
    pair = make_pair("qwen3_vl", attention_dropout=0.5)
    try:
        pair.ours.train()
        tiny.generate(pair.ours, chat)
    finally:
        pair.ours.eval()
    assert pair.files == []
    pair.check(chat)


def test_saliency(pair, chat):
    """Gradients of the pixels of a model in eval mode."""
    tiny.generate(pair.ours, chat)
    stats = pair.ours.vlcache.stats()
    gradient = []
    for model in (pair.stock, pair.ours):
        pixels = chat["pixel_values"].clone().requires_grad_()
        model(**dict(chat, pixel_values=pixels), logits_to_keep=1).logits.max().backward()
        gradient.append(pixels.grad)
        model.zero_grad()
    assert gradient[0].abs().max() > 0
    close(gradient[1], gradient[0], 1e-5 * max(1.0, float(gradient[0].abs().max())))
    assert pair.ours.vlcache.stats() == stats


def test_frozen_model_with_gradients_on(qwen3, chat):
    """Nothing requires a gradient: a hit is allowed, unless the pixels do."""
    ours, stock = (copy.deepcopy(model).requires_grad_(False) for model in (qwen3.ours, qwen3.stock))
    for kinds in (["miss"], ["exact"]):
        expected, got = stock(**chat, logits_to_keep=1), ours(**chat, logits_to_keep=1)
        close(got.logits, expected.logits)
        assert not got.logits.requires_grad
        assert tiny.kinds(ours) == kinds
    gradient = []
    for model in (stock, ours):
        pixels = chat["pixel_values"].clone().requires_grad_()
        model(**dict(chat, pixel_values=pixels), logits_to_keep=1).logits.max().backward()
        gradient.append(pixels.grad)
    close(gradient[1], gradient[0], 1e-5 * max(1.0, float(gradient[0].abs().max())))
    assert ours.vlcache.stats().requests == 2
