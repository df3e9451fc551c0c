"""lmms-eval's own Qwen models, with an image cache that an auxiliary prompt has filled (paper, section 5.2)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from lmms_eval.api.model import lmms
from lmms_eval.models.chat.qwen2_5_vl import Qwen2_5_VL
from lmms_eval.models.chat.qwen3_vl import Qwen3_VL
from lmms_eval.utils import simple_parse_args_string
from loguru import logger
from transformers import AutoConfig

from ... import VLCache, VLCacheConfig, attach
from ...records import RequestRecord

# Before the image: behind it, it would change nothing of the image's KV, and all hits would be exact.
AUXILIARY_PROMPT = "Describe this image."


@dataclass
class Counts:
    """What became of the images of the formal prompts, and of the auxiliary ones.

    Args:
        requests (`int`), in_full (`int`): batches of formal prompts, and those that the cache had no part in.
        exact (`int`), reused (`int`), missed (`int`): images of formal prompts.
        escalated (`int`): of the missed, those that the guard had computed in full.
        tokens (`int`), recomputed (`float`): tokens of these images, and how many were computed (mean over layers).
        auxiliary (`int`), present (`int`): images of auxiliary prompts, and those that were stored already.
    """

    requests: int = 0
    in_full: int = 0
    exact: int = 0
    reused: int = 0
    missed: int = 0
    escalated: int = 0
    tokens: int = 0
    recomputed: float = 0.0
    auxiliary: int = 0
    present: int = 0

    def add(self, record: RequestRecord) -> None:
        """Counts the images of a formal prompt."""
        self.requests += 1
        self.in_full += record.in_full is not None
        for image in record.images:
            kind = image.kv if record.in_full is None else "miss"
            self.exact += kind == "exact"
            self.reused += kind == "reused"
            self.missed += kind == "miss"
            self.escalated += image.guarded == "escalated"
            self.tokens += image.tokens
            self.recomputed += image.tokens * (image.ratio if record.in_full is None else 1.0)

    def __str__(self) -> str:
        share = 100 * self.recomputed / self.tokens if self.tokens else 0.0
        return (
            f"images of formal prompts: {self.exact} exact, {self.reused} reused, {self.missed} in full "
            f"({self.escalated} by the guard), {share:.1f} % of their tokens computed; {self.auxiliary} auxiliary "
            f"prompts ({self.present} stored before)"
        )


# What `_Cached` is mixed into: for a type checker a class of any attributes.
_MixedInto: Any = object


class _Cached(_MixedInto):
    """Goes before one of lmms-eval's classes: attaches the cache to the model that it loads.

    Args:
        pretrained (`str`): a folder or an id on the Hub.
        auxiliary (`str` or `bool`, *optional*, defaults to `"on"`):
            Fill the cache before each batch by a prompt that has the image in another context, and store nothing else:
            then every formal prompt is reused from there. Where nothing may be reused from another context, at a
            schedule of 1 and `reuse="exact"`, every one is computed in full. `"off"` is the cache in operation.
        stats (`str`, *optional*): a JSON file of what was hit.
        **kwargs: fields of `VLCacheConfig`, as `schedule`, `policy`, `reuse`, `guard`, `cache_dir` (without one a
            temporary folder), and what lmms-eval's class takes.
    """

    def __init__(self, pretrained: str, auxiliary: Any = "on", stats: str | None = None, **kwargs: Any) -> None:
        if str(auxiliary).lower() not in ("on", "true", "off", "false"):
            raise ValueError(f"`auxiliary` must be on or off, got {auxiliary!r}.")
        given = {field.name: kwargs.pop(field.name) for field in fields(VLCacheConfig) if field.name in kwargs}
        if "cache_dir" not in given:
            self._folder = tempfile.TemporaryDirectory(prefix="vlcache-lmms-eval-")  # removed with the process
            given["cache_dir"] = self._folder.name
        fills = str(auxiliary).lower() in ("on", "true")
        # the paper's protocol reuses every image, whatever its size and its company
        every: dict[str, Any] = {"min_tokens": 1, "lossy_multi_image": True} if fills else {}
        config = VLCacheConfig(**{"remote": None, "write_behind": False, "max_ram_bytes": 0, **every, **given})
        super().__init__(pretrained=pretrained, **kwargs)
        attach(self.model, config)
        self._fills = fills
        self._stats = None if stats is None else Path(stats)
        self._counts = Counts()
        self._stock_generate = self.model.generate
        # the one place where lmms-eval's classes, whatever they do before, meet the model
        self.model.generate = self._generate

    def generate_until(self, requests: Any) -> Any:
        answers = super().generate_until(requests)
        print(f"vlcache: {self._counts}")
        stored = self._fills and self._lossy and self.model.vlcache.config.policy != "encoder_only"
        if stored and self._counts.missed > self._counts.escalated:
            logger.warning("Some images were computed in full although an auxiliary prompt stored them: a full disk?")
        if self._stats is not None:
            path = self._stats.with_suffix(f".{self.rank}{self._stats.suffix}") if self.rank else self._stats
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**asdict(self._counts), **self._settings()}, indent=2) + "\n")
        return answers

    @property
    def _lossy(self) -> bool:
        return self.model.vlcache.config.reuse == "lossy" and self.model.vlcache.config.schedule != 1.0

    def _settings(self) -> dict[str, Any]:
        config = self.model.vlcache.config
        names = ("schedule", "policy", "reuse", "guard", "guard_threshold", "min_tokens", "lossy_multi_image")
        return {"settings": {**{name: str(getattr(config, name)) for name in names}, "auxiliary": self._fills}}

    def _generate(self, **kwargs: Any) -> Any:
        """The model's `generate` for a formal prompt."""
        if kwargs.get("pixel_values") is None:
            return self._stock_generate(**kwargs)
        if self._fills:
            if self._lossy:
                self._fill(kwargs)
            # a formal prompt that were stored would make the next one with its image another kind of hit
            kwargs["cache"] = VLCache(read_only=True)
        output = self._stock_generate(**kwargs)
        self._counts.add(self.model.vlcache.last_request)
        return output

    @torch.no_grad()
    def _fill(self, formal: Mapping[str, Any]) -> None:
        """Sees to it that every image of a batch is stored, each behind the auxiliary prompt."""
        merge = self.model.model.visual.spatial_merge_size**2
        grids = formal["image_grid_thw"]
        sizes = grids.prod(-1).tolist()
        for pixels, grid, patches in zip(formal["pixel_values"].split(sizes), grids, sizes):
            inputs = self._auxiliary_inputs(patches // merge).to(self.model.device)
            if "mm_token_type_ids" in formal:
                inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.model.config.image_token_id).int()
            cache = VLCache(reuse="exact", guard="off")
            self.model(**inputs, pixel_values=pixels, image_grid_thw=grid[None], logits_to_keep=1, cache=cache)
            self._counts.auxiliary += 1
            self._counts.present += self.model.vlcache.last_request.images[0].kv == "exact"

    def _auxiliary_inputs(self, tokens: int) -> Any:
        """Ids and mask of the auxiliary prompt for an image of so many tokens."""
        chat = [
            {"role": "system", "content": [{"type": "text", "text": self.system_prompt}]},
            {"role": "user", "content": [{"type": "text", "text": AUXILIARY_PROMPT}, {"type": "image"}]},
        ]
        text = self.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        image = self.processor.image_token
        return self.processor.tokenizer(text.replace(image, image * tokens), return_tensors="pt")


class VLCacheQwen3VLModel(_Cached, Qwen3_VL):
    """Qwen3-VL and Qwen3-VL-MoE."""


class VLCacheQwen2_5_VLModel(_Cached, Qwen2_5_VL):
    """Qwen2.5-VL."""


_CLASSES: dict[str, Any] = {
    "qwen2_5_vl": VLCacheQwen2_5_VLModel,
    "qwen3_vl": VLCacheQwen3VLModel,
    "qwen3_vl_moe": VLCacheQwen3VLModel,
}


class VLCacheModel(lmms):
    """What `--model vlcache` names: makes the class that fits the checkpoint."""

    is_simple = False

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
        pretrained = simple_parse_args_string(arg_string).get("pretrained")
        if pretrained is None:
            raise ValueError("--model_args must name a checkpoint: pretrained=Qwen/Qwen3-VL-8B-Instruct")
        model_type = AutoConfig.from_pretrained(pretrained).model_type
        if model_type not in _CLASSES:
            raise ValueError(f"{pretrained!r} is of the type {model_type!r}. Supported: {', '.join(_CLASSES)}.")
        return _CLASSES[model_type].create_from_arg_string(arg_string, additional_config)
