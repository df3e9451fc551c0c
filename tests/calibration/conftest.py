"""A tiny random model whose image KV depends on the context, and samples for it without a processor."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from vlcache_hf import attach
from vlcache_hf.calibration import TokenSample

SIDE = 16  # patches; 64 image tokens


def sample(seed: int, before: int = 7, side: int = SIDE, answer: tuple[int, ...] | None = None) -> TokenSample:
    """An image behind a question of its own, and behind the neutral prompt that all samples share."""
    image = tiny.image(seed, side, side)
    asked = tiny.prompt(tiny.text(100 + seed, before), image, tiny.text(2, 5))
    neutral = tiny.prompt(tiny.text(3, 4), image, tiny.text(4, 5))
    return TokenSample(tiny.batch(asked), tiny.batch(neutral), answer)


@pytest.fixture(params=tiny.ARCHITECTURES, scope="module")
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def stock(architecture: str) -> Any:
    return tiny.stock(architecture)


@pytest.fixture(scope="module")
def ours(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    # settings that a calibration must not follow
    settings = {"cache_dir": tmp_path_factory.mktemp("own") / "cache", "reuse": "exact", "guard": "warn"}
    return attach(tiny.stock(architecture), {**settings, "storage_dtype": "int8", "min_tokens": 1000})
