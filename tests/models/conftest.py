"""Pairs of a stock model and the same model with an image cache, and the checks that compare them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import vlcache_hf
from tests import tiny

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.15, torch.float16: 0.02}
_MODELS: dict[Any, tuple[Any, Any]] = {}


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert (got.float() - expected.float()).abs().max().item() <= tolerance


def files(folder: Path) -> list[str]:
    """Entries in a cache directory."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))


def bare(inputs: dict[str, Any], *names: str) -> dict[str, Any]:
    """Inputs without some of them."""
    return {name: value for name, value in inputs.items() if name not in names}


def positions(pair: Pair, inputs: dict[str, Any]) -> torch.Tensor:
    """M-RoPE positions `(3, B, S)` as the stock model makes them."""
    return pair.stock.model.get_rope_index(
        inputs["input_ids"],
        image_grid_thw=inputs.get("image_grid_thw"),
        attention_mask=inputs["attention_mask"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
    )[0]


@dataclass
class Pair:
    """A stock model and ours with the same weights and an empty cache directory.

    Args:
        stock: the stock model.
        ours: the same model with a cache.
        cache_dir (`Path`): where `ours` stores.
    """

    stock: Any
    ours: Any
    cache_dir: Path

    @property
    def kinds(self) -> list[str]:
        return tiny.kinds(self.ours)

    @property
    def files(self) -> list[str]:
        return files(self.cache_dir)

    def towers(self, call: Callable[[], Any]) -> tuple[Any, int]:
        """The result of a call, and how often it ran the vision tower of our model."""
        visual, count = self.ours.model.visual, 0
        real = type(visual).forward

        @functools.wraps(real)
        def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += module is visual
            return real(module, *args, **kwargs)

        # on the class: a hook on the module could rightly keep a library from caching what it gives
        type(visual).forward = counted
        try:
            return call(), count
        finally:
            type(visual).forward = real

    def check(
        self,
        inputs: dict[str, Any],
        tokens: int = 8,
        cold: list[str] | None = None,
        warm: list[str] | None = None,
        seed: int | None = None,
        make: Callable[[Any], dict[str, Any]] = lambda model: {},
        **kwargs: Any,
    ) -> Any:
        """`generate()` of the stock model, then twice of ours: equal, and the second time a hit without the tower.

        Args:
            inputs (`dict`): model inputs.
            tokens (`int`): number of new tokens.
            cold (`list[str]`), warm (`list[str]`): what becomes of the images; by default misses, then exact hits.
            seed (`int`, *optional*): set before each call.
            make (`Callable`): makes further arguments for a call of a model, anew for each.
            **kwargs: further arguments.

        Returns:
            What the stock model gave.
        """

        def run(model: Any) -> Any:
            if seed is not None:
                torch.manual_seed(seed)
            return tiny.generate(model, inputs, tokens, **kwargs, **make(model))

        images = len(inputs["image_grid_thw"])
        expected = run(self.stock)
        got, _ = self.towers(lambda: run(self.ours))
        self.same(got, expected)
        assert self.kinds == (["miss"] * images if cold is None else cold), self.ours.vlcache.last_request
        got, towers = self.towers(lambda: run(self.ours))
        self.same(got, expected)
        assert self.kinds == (["exact"] * images if warm is None else warm), self.ours.vlcache.last_request
        assert self.ours.vlcache.last_request.in_full is None
        assert towers == 0
        return expected

    def same(self, got: Any, expected: Any) -> None:
        if isinstance(expected, torch.Tensor):
            assert got.tolist() == expected.tolist()
            return
        assert type(got) is type(expected)
        assert list(got.keys()) == list(expected.keys())
        assert got.sequences.tolist() == expected.sequences.tolist()
        for name in ("scores", "logits"):
            for one, other in zip(got.get(name) or (), expected.get(name) or (), strict=True):
                finite = other.isfinite()
                assert one.isfinite().equal(finite)
                close(one[finite], other[finite])
        if expected.get("cache") is not None:
            assert got.cache.get_seq_length() == expected.cache.get_seq_length()
            for mine, theirs in zip(got.cache.layers, expected.cache.layers, strict=True):
                assert type(mine) is type(theirs)
                length = int(theirs.get_seq_length())
                close(mine.keys[:, :, :length], theirs.keys[:, :, :length])
                close(mine.values[:, :, :length], theirs.values[:, :, :length])

    def forward(self, inputs: dict[str, Any], **kwargs: Any) -> tuple[Any, Any]:
        """`forward()` of both models without gradients: ours and the stock one's."""
        with torch.no_grad():
            expected = self.stock(**tiny.clone(inputs), **kwargs)
            return self.ours(**tiny.clone(inputs), **kwargs), expected

    def check_forward(
        self,
        inputs: dict[str, Any],
        keep: int = 1,
        warm: list[str] | None = None,
        features: bool = False,
        **kwargs: Any,
    ) -> None:
        """`forward()` cold and warm: equal logits, and the second time a hit without the tower.

        Args:
            inputs (`dict`): model inputs.
            keep (`int`): `logits_to_keep`.
            warm (`list[str]`, *optional*): what becomes of the images in the second call; by default exact hits.
            features (`bool`): whether the features are stored already.
            **kwargs: further arguments.
        """
        images = len(inputs["image_grid_thw"])
        for wanted in (["miss"] * images, ["exact"] * images if warm is None else warm):
            (got, expected), towers = self.towers(lambda: self.forward(inputs, logits_to_keep=keep, **kwargs))
            close(got.logits, expected.logits)
            assert self.kinds == wanted
            assert towers == (0 if features or wanted == ["exact"] * images else 1)


@pytest.fixture
def make_pair(tmp_path: Path) -> Callable[..., Pair]:
    """Makes pairs; models of equal arguments are shared between tests, so tests must leave weights and mode alone."""
    count = 0

    def make(
        architecture: str, settings: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32, **text: Any
    ) -> Pair:
        nonlocal count
        count += 1
        key = (architecture, dtype, repr(text))
        if key not in _MODELS:
            stock = tiny.stock(architecture, dtype=dtype, **text)
            _MODELS[key] = stock, vlcache_hf.attach(copy.deepcopy(stock))
        stock, ours = _MODELS[key]
        for model in (stock, ours):
            assert not model.training
            model.model.rope_deltas = None
            model.zero_grad()
        cache_dir = tmp_path / f"cache{count}"
        vlcache_hf.attach(ours, {"cache_dir": cache_dir, "schedule": 0.5, **(settings or {})})
        return Pair(stock, ours, cache_dir)

    return make


@pytest.fixture(params=tiny.ARCHITECTURES)
def pair(request: pytest.FixtureRequest, make_pair: Callable[..., Pair]) -> Pair:
    """A pair of every architecture."""
    return make_pair(request.param)


@pytest.fixture(params=("qwen2_5_vl", "qwen3_vl"))
def either(request: pytest.FixtureRequest, make_pair: Callable[..., Pair]) -> Pair:
    """A pair of each model family; the MoE differs from Qwen3-VL in its MLP only."""
    return make_pair(request.param)


@pytest.fixture
def qwen3(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair("qwen3_vl")


@pytest.fixture
def chat() -> dict[str, torch.Tensor]:
    """Inputs of one row: text, an image of 16 tokens, text."""
    return tiny.batch(tiny.prompt(tiny.text(0, 5), tiny.image(0), tiny.text(1, 6)))
