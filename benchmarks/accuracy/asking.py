"""One model that answers batches of prompts: as stock, or through the cache with settings of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Iterator

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlcache_hf import VLCache
from vlcache_hf.records import ImageRecord

from .questions import Message, Question

# reuse is measured wherever it can be asked for
ANY_IMAGE: dict[str, Any] = {"min_tokens": 1, "lossy_multi_image": True}


class ColdRequest(RuntimeError):
    """Pictures were not reused as they should have been: the measurement would be of something else."""


@dataclass
class Answers:
    """What came of a batch.

    Args:
        texts (`list[str]`): greedy answers.
        tokens (`np.ndarray` of shape `(n, new)`): their tokens.
        logits (`np.ndarray` of shape `(n, vocabulary)`): at the first answer token.
        images (`list[ImageRecord]`): records of all pictures; empty for stock.
        abandoned (`int`): rows times layers that the guard threw away.
    """

    texts: list[str]
    tokens: np.ndarray
    logits: np.ndarray
    images: list[ImageRecord]
    abandoned: int = 0

    def shares(self) -> list[float]:
        """Share of its image tokens, times layers, that each row of the batch computed; without the abandoned."""
        totals: dict[int, list[int]] = {}
        for image in self.images:
            sums = totals.setdefault(image.row, [0, 0])
            sums[0] += image.recomputed
            sums[1] += image.tokens * image.layers
        return [totals[row][0] / totals[row][1] for row in sorted(totals)]


class Asker:
    """A model and its processor.

    Args:
        model (`PreTrainedModel`): loaded with `attn_implementation="vlcache"`; its entries go to its `cache_dir`.
        processor (`ProcessorMixin`): its processor.
        max_new_tokens (`int`, *optional*, defaults to 8): of an answer.
    """

    def __init__(self, model: Any, processor: Any, max_new_tokens: int = 8) -> None:
        self.model, self.processor, self.max_new_tokens = model.eval(), processor, max_new_tokens
        processor.tokenizer.padding_side = "left"

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    def inputs(self, prompts: Sequence[list[Message]]) -> Any:
        """Left-padded model inputs of prompts."""
        return self.processor.apply_chat_template(
            list(prompts),
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        ).to(self.model.device)

    @torch.no_grad()
    def generate(self, inputs: Any, new_tokens: int | None = None, **settings: Any) -> Answers:
        """Greedy answers.

        Args:
            inputs (`BatchFeature`): of `inputs`.
            new_tokens (`int`, *optional*): other than `max_new_tokens`.
            **settings: of the `VLCache` of this call; without any the model runs as it is set.
        """
        extra = {"cache": VLCache(**settings)} if settings else {}
        output = self.model.generate(
            **inputs,
            **extra,
            max_new_tokens=new_tokens or self.max_new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[:, inputs["input_ids"].shape[1] :]
        texts = [text.strip() for text in self.processor.batch_decode(tokens, skip_special_tokens=True)]
        record = self.model.vlcache.last_request if settings else None
        images = list(record.images) if record else []
        abandoned = record.abandoned if record else 0
        return Answers(texts, tokens.cpu().numpy(), output.logits[0].float().cpu().numpy(), images, abandoned)

    def stock(self, inputs: Any) -> Answers:
        """Answers of the stock model: its own code and kernel, nothing of ours."""
        self.model.set_attn_implementation("sdpa")
        try:
            return self.generate(inputs)
        finally:
            self.model.set_attn_implementation("vlcache")

    def store(self, prompts: Sequence[list[Message]], namespace: str) -> None:
        """Computes prompts and stores their pictures.

        Raises:
            `ColdRequest`: a picture was not stored.
        """
        found = self.generate(self.inputs(prompts), new_tokens=1, namespace=namespace)
        self.model.vlcache.flush()
        if not all(image.stored for image in found.images):
            raise ColdRequest(f"Not every picture of {namespace!r} was stored: {kinds(found)}.")

    def store_earlier(self, questions: Sequence[Question], context: str) -> None:
        """Stores the earlier prompts of one context, in as many batches as a question has prompts."""
        for prompts in zip(*(question.earlier[context] for question in questions), strict=True):
            self.store(prompts, context)

    def reuse(self, inputs: Any, namespace: str, kind: str, **settings: Any) -> Answers:
        """Answers behind what is stored, which stays as it is.

        Args:
            inputs (`BatchFeature`): of `inputs`.
            namespace (`str`): where it is stored.
            kind (`str`): what every picture must be; `"escalated"` is `"reused"` or computed in full by the guard.
            **settings: further settings of the `VLCache`.

        Raises:
            `ColdRequest`: a picture is something else, or its features were computed again.
        """
        found = self.generate(inputs, namespace=namespace, read_only=True, **settings)
        allowed = {"reused", "miss"} if kind == "escalated" else {kind}
        if not found.images or {image.kv for image in found.images} - allowed:
            raise ColdRequest(f"Expected {kind} pictures from {namespace!r} with {settings}, got {kinds(found)}.")
        if any(image.encoder == "miss" or (image.kv == "miss" and image.encoder != "hit") for image in found.images):
            raise ColdRequest(f"The vision tower ran again behind {namespace!r} with {settings}.")
        return found


def kinds(answers: Answers) -> dict[str, int]:
    """How many pictures were exact, reused or missed."""
    found: dict[str, int] = {}
    for image in answers.images:
        found[image.kv] = found.get(image.kv, 0) + 1
    return found


@contextmanager
def asker(
    folder: str, dtype: str = "auto", device: str = "cpu", max_new_tokens: int = 8, **settings: Any
) -> Iterator[Asker]:
    """A checkpoint with a cache folder of its own, which is deleted at the end.

    Args:
        folder (`str`): checkpoint folder or Hub id.
        dtype (`str`, *optional*, defaults to `"auto"`): `"float32"`, `"bfloat16"`, or as saved.
        device (`str`, *optional*, defaults to `"cpu"`): where it runs; `"auto"` for accelerate's choice.
        max_new_tokens (`int`, *optional*, defaults to 8): of an answer.
        **settings: of its `VLCacheConfig`.
    """
    with TemporaryDirectory(prefix="vlcache-accuracy-") as cache:
        options: dict[str, Any] = {"device_map": "auto"} if device == "auto" else {}
        model: Any = AutoModelForImageTextToText.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="vlcache",
            vlcache_config={"cache_dir": str(Path(cache) / "store"), "schedule": 0.1, **ANY_IMAGE, **settings},
            **options,
        )
        model = model if options else model.to(device)
        yield Asker(model, AutoProcessor.from_pretrained(folder), max_new_tokens)
        model.vlcache.flush()
