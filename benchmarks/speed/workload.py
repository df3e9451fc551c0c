"""Models, prompts and schedules of the speed benchmarks: random weights at CPU-sized shapes, since time does not
depend on weights."""

from __future__ import annotations

import copy
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "schedules")]

import make_priors  # noqa: E402

import offline as offline  # noqa: E402
import vlcache_hf  # noqa: E402
from vlcache_hf import RecomputeSchedule, VLCache  # noqa: E402

TEXT_TOKENS = 20
MEAN_RATIO = 0.035  # the paper's dynamic schedule for Qwen3-VL


@dataclass(frozen=True)
class Workload:
    """What one request asks.

    Args:
        tokens (`int`): tokens of each image, a square number.
        images (`int`, *optional*, defaults to 1): images in the prompt; they are different ones.
        text (`int`, *optional*, defaults to 20): text tokens, half of them in front of the images.
    """

    tokens: int
    images: int = 1
    text: int = TEXT_TOKENS

    def __post_init__(self) -> None:
        if math.isqrt(self.tokens) ** 2 != self.tokens:
            raise ValueError(f"{self.tokens} image tokens are no square.")

    @property
    def before(self) -> int:
        """Text tokens in front of the images."""
        return self.text // 2

    def pixels(self, config: Any) -> torch.Tensor:
        """Random patches of all images.

        Args:
            config (`PreTrainedConfig`): the model's.
        """
        vision = config.vision_config
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        return torch.randn(4 * self.tokens * self.images, width, generator=torch.Generator().manual_seed(0))

    def prompt(self, seed: int, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs of a request; another seed is another text, hence another context.

        Args:
            seed (`int`): of the text.
            pixels (`torch.Tensor`): from `pixels`.
        """
        text = text_ids(self.text, seed)
        image = [offline.VISION_START, *[offline.IMAGE_PAD] * self.tokens, offline.VISION_END]
        ids = torch.tensor([text[: self.before] + image * self.images + text[self.before :]])
        side = 2 * math.isqrt(self.tokens)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == offline.IMAGE_PAD).int(),
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, side, side]] * self.images),
        }


def text_ids(count: int, seed: int) -> list[int]:
    """Random text tokens."""
    return torch.randint(1000, 100_000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def model_pair(architecture: Any, size: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    """A stock model, and one of ours that shares its weights.

    Args:
        architecture (`str`), size (`str`): as for `offline.build_model`.
        settings (`dict`): of ours.
    """
    stock = offline.build_model(architecture, size)
    shared = {id(parameter): parameter for parameter in stock.parameters()}
    return stock, vlcache_hf.attach(copy.deepcopy(stock, shared), settings)


def front_loaded(num_layers: int, mean: float = MEAN_RATIO) -> RecomputeSchedule:
    """A dynamic schedule by the rule of the shipped ones.

    Args:
        num_layers (`int`): decoder layers.
        mean (`float`, *optional*, defaults to 0.035): mean ratio.
    """
    known = dict(make_priors.MODELS)
    make_priors.MODELS["benchmark"] = ("benchmark", num_layers, 0, (mean,))
    try:
        return RecomputeSchedule(make_priors.prior("benchmark", mean).ratios)
    finally:
        make_priors.MODELS.clear()
        make_priors.MODELS.update(known)


def seconds(model: Any, inputs: dict[str, Any], cache: Any = None) -> float:
    """Time from the call of `generate()` to the first token.

    Args:
        model (`PreTrainedModel`): stock or ours.
        inputs (`dict`): of the request.
        cache (`Cache`, *optional*): a `VLCache` with settings, or a filled `DynamicCache`.
    """
    extra = {} if cache is None else {"cache": cache}
    start = time.perf_counter()
    model.generate(**inputs, max_new_tokens=1, do_sample=False, **extra)
    return time.perf_counter() - start


def per_call(settings: dict[str, Any]) -> VLCache:
    """The cache that carries settings into one request."""
    return VLCache(**settings)
