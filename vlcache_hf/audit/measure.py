"""One prompt in full, as an exact hit, and reused from another context: what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..attention import NAME
from ..cache import VLCache
from ..config import VLCacheConfig
from ..models.kernels import resolve_base
from ..records import RequestRecord
from ..runtime import open_store
from .report import Measure
from .samples import Messages

# What a call of the audit has in any case: a store of its own, whatever the model's settings or the environment say.
_OWN_STORE: dict[str, Any] = {
    "remote": None,
    "max_ram_bytes": 0,
    "write_behind": False,
    "namespace": "",
    "min_tokens": 1,
    "second_sight_bytes": None,
    "storage_dtype": "auto",
    "policy": "prefix",
    "guard": "off",
    "reuse": "lossy",
    "contexts_per_image": 4,
    "max_disk_bytes": None,
    "schedule": 0.0,
    "read_only": False,
}


class NotMeasured(Exception):
    """A prompt was not computed in the way that was to be measured; the message says how it was."""


class Bench:
    """Runs prompts through a model with settings per call, and knows what became of their images.

    Args:
        model: one of our models, in `eval()`.
        processor: its processor.
        folder (`str`): of the store; nothing else may use it.
        max_new_tokens (`int`): tokens of an answer.
        lossy_multi_image (`bool`, *optional*, defaults to `False`): the setting; without it nothing of other contexts
            is reused in a prompt with several images.
    """

    def __init__(
        self, model: Any, processor: Any, folder: str, max_new_tokens: int, lossy_multi_image: bool = False
    ) -> None:
        self.model = model
        self.processor = processor
        self.folder = folder
        self.max_new_tokens = max_new_tokens
        self.lossy_multi_image = lossy_multi_image

    def inputs(self, messages: Messages) -> dict[str, Any]:
        """Model inputs of a chat."""
        chat = [{**message, "content": [_opened(part) for part in message["content"]]} for message in messages]
        return self.processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        ).to(self.model.device)

    def clear(self) -> None:
        """Empties the store."""
        open_store(replace(VLCacheConfig(), **_OWN_STORE, cache_dir=self.folder)).clear()

    @contextmanager
    def stock(self) -> Iterator[None]:
        """The model without its cache."""
        kernel = resolve_base(self.model.vlcache.config.base_attn_implementation, self.model)
        self.model.set_attn_implementation(kernel)
        try:
            yield
        finally:
            self.model.set_attn_implementation(NAME)

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The greedy answer of the model as it stands, `(n,)` token ids.

        Nothing but the logits decides (checkpoints bring a repetition penalty along): then a prompt reused from
        another context answers the same exactly when, along this answer, its most likely tokens are the same.
        """
        output = self.model.generate(
            **inputs, max_new_tokens=self.max_new_tokens, do_sample=False, num_beams=1, repetition_penalty=1.0
        )
        answer = output[0, inputs["input_ids"].shape[1] :]
        config = self.model.config
        special = torch.tensor([config.image_token_id, config.video_token_id], device=answer.device)
        stops = torch.isin(answer, special).nonzero()
        # behind such a token, which means a picture to the model, nothing can be appended to a prompt
        return answer[: int(stops[0]) + 1] if len(stops) else answer

    @torch.no_grad()
    def logits(self, inputs: Mapping[str, Any], answer: torch.Tensor, cache: VLCache | None = None) -> torch.Tensor:
        """Logits that predict each token of an answer given those before it, `(n, vocabulary)`.

        They belong to the last `n` positions, all text behind the images: asking for no others is what lets the cache
        serve the request.
        """
        more = answer[None, :-1]
        extended = dict(inputs)
        extended["input_ids"] = torch.cat([inputs["input_ids"], more], 1)
        for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
            if name in inputs:
                extended[name] = torch.cat([inputs[name], torch.full_like(more, value, dtype=inputs[name].dtype)], 1)
        logits: torch.Tensor = self.model(**extended, logits_to_keep=len(answer), cache=cache).logits
        return logits[0].float()

    def cached(
        self, inputs: Mapping[str, Any], answer: torch.Tensor, **settings: Any
    ) -> tuple[torch.Tensor, RequestRecord]:
        """`logits` by way of the cache, and what became of the images.

        Raises:
            `NotMeasured`: the cache had no part in it.
        """
        before = self.model.vlcache.last_request
        # the settings of a call are those of the model but for these
        own = {**_OWN_STORE, "cache_dir": self.folder, "lossy_multi_image": self.lossy_multi_image}
        logits = self.logits(inputs, answer, VLCache(**{**own, **settings}))
        record = self.model.vlcache.last_request
        if record is None or record is before:
            raise NotMeasured("the model did not use its cache")
        if record.in_full is not None:
            raise NotMeasured(f"computed in full: {record.in_full}")
        return logits, record

    def seen(self, inputs: Mapping[str, Any], **settings: Any) -> str:
        """What a prompt is to the cache, `"exact"`, `"reused"` or `"miss"`: of several images the worst."""
        one = inputs["input_ids"][0, -1:]
        return worst(self.cached(inputs, one, **settings)[1])


def worst(record: RequestRecord) -> str:
    """What a request was to the cache: of several images the worst."""
    kinds = {image.kv for image in record.images}
    return next(kind for kind in ("miss", "reused", "exact") if kind in kinds)


def compare(full: torch.Tensor, other: torch.Tensor, record: RequestRecord) -> Measure:
    """How far a prompt is from its full computation.

    Args:
        full (`torch.Tensor` of shape `(n, vocabulary)`), other (`torch.Tensor`): logits along the same answer.
        record (`RequestRecord`): how `other` was computed.
    """
    true, seen = full.log_softmax(-1), other.log_softmax(-1)
    divergence = (true.exp() * (true - seen)).sum(-1).clamp_min(0.0)
    flips = full.argmax(-1) != other.argmax(-1)
    return Measure(
        first_kl=float(divergence[0]),
        answer_kl=float(divergence.mean()),
        first_flip=bool(flips[0]),
        flip=bool(flips.any()),
        recomputed=_recomputed(record),
        escalated=any(image.guarded == "escalated" for image in record.images),
    )


def _recomputed(record: RequestRecord) -> float:
    tokens = sum(image.tokens for image in record.images)
    return sum(image.ratio * image.tokens for image in record.images) / tokens


def measure(
    bench: Bench, messages: Messages, earlier: Sequence[Messages], cases: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """One prompt in full, as an exact hit, and reused from other contexts.

    Args:
        bench (`Bench`): the model. Its store is emptied.
        messages (`Messages`): the prompt.
        earlier (sequence of `Messages`): prompts that have its images in other contexts.
        cases (`Mapping[str, Mapping]`): settings of each way to reuse, by label.

    Returns:
        `dict`: `answer_tokens`, `exact` (`Measure`), `several`, and where an image was reused `cases`
        (`dict[str, Measure]`) and `deviation`, what the guard sees.

    Raises:
        `NotMeasured`: a request was not the hit that it was to be.
    """
    bench.clear()
    inputs = bench.inputs(messages)
    with bench.stock():
        answer = bench.answer(inputs)
        full = bench.logits(inputs, answer)
    bench.cached(inputs, answer, reuse="exact", namespace="own")
    logits, record = bench.cached(inputs, answer, reuse="exact", namespace="own", read_only=True)
    if worst(record) != "exact":
        raise NotMeasured(f"no exact hit after it was stored, is the disk full? {record}")
    row: dict[str, Any] = {"answer_tokens": len(answer), "exact": compare(full, logits, record)}
    row["several"] = len(inputs["image_grid_thw"]) > 1 and not bench.lossy_multi_image
    if row["several"]:
        return row
    for chat in earlier:
        # the forward of `seen` stores: with reuse="exact" all that is no exact hit is computed in full
        bench.seen(bench.inputs(chat), reuse="exact", namespace="other")
    # a sample of the recomputed rows tells the deviation; nothing exceeds the threshold, so nobody is warned
    watched = {"guard": "warn", "guard_threshold": 1e30}
    record = bench.cached(inputs, answer[:1], namespace="other", read_only=True, **watched)[1]
    if worst(record) == "miss":
        raise NotMeasured(f"computed in full although stored in another context: {record}")
    if worst(record) == "exact":
        return row
    row["deviation"] = max(image.deviation or 0.0 for image in record.images)
    row["cases"] = {}
    for label, settings in cases.items():
        logits, record = bench.cached(inputs, answer, namespace="other", read_only=True, **settings)
        result = compare(full, logits, record)
        if worst(record) != ("miss" if result.escalated else "reused"):
            raise NotMeasured(f"{label}: not reused: {record}")
        row["cases"][label] = result
    return row


def _opened(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image" or not isinstance(part["image"], str):
        return part
    from PIL import Image

    image = Image.open(part["image"])
    image.load()  # a truncated file shows only here
    return {**part, "image": image}
