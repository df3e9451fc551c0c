"""What cannot be avoided, and what people do by hand."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from transformers import DynamicCache

from .workload import Workload, seconds, text_ids


class Floor:
    """A stock forward of the rows that have to be computed, over KV that is there already, and one copy of its bytes.

    The forward appends its rows to a plain `DynamicCache`, which copies that KV once (`torch.cat`), as any cache of
    contiguous tensors must to hold both. The other copy stands for reading what is stored. Making the cache is not
    part of the time.

    Args:
        model (`PreTrainedModel`): the stock model.
        workload (`Workload`): the request.
        ratio (`float`): image tokens that are recomputed; with a schedule of its own for each layer, the mean.
    """

    def __init__(self, model: Any, workload: Workload, ratio: float = 0.0) -> None:
        config = model.config.text_config
        recomputed = round(ratio * workload.tokens) * workload.images
        rows = workload.text + 2 * workload.images + recomputed  # with the tokens around each image
        self.resident = workload.tokens * workload.images - recomputed
        self._model = model
        self._ids = torch.tensor([text_ids(rows, 0)])
        self._positions = torch.arange(self.resident, self.resident + rows).view(1, 1, -1).expand(3, 1, -1)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (1, config.num_key_value_heads, self.resident, head_dim)
        dtype = model.dtype
        self._kv = [tuple(torch.randn(shape, dtype=dtype) for _ in range(2)) for _ in range(config.num_hidden_layers)]
        self._room = [tuple(torch.empty_like(part) for part in pair) for pair in self._kv]

    @property
    def nbytes(self) -> int:
        """Bytes of the resident KV."""
        return sum(part.nbytes for pair in self._kv for part in pair)

    def forward(self) -> float:
        """Seconds of the forward."""
        cache = DynamicCache(config=self._model.config.text_config)
        for layer, (keys, values) in enumerate(self._kv):
            cache.update(keys, values, layer)
        with torch.no_grad():
            start = time.perf_counter()
            self._model(
                input_ids=self._ids, position_ids=self._positions, cache=cache, use_cache=True, logits_to_keep=1
            )
            return time.perf_counter() - start

    def copy(self) -> float:
        """Seconds of a copy of the resident KV into memory that is there already."""
        start = time.perf_counter()
        for pair, room in zip(self._kv, self._room):
            for part, place in zip(pair, room):
                place.copy_(part)
        return time.perf_counter() - start


class ByHand:
    """A prefix that a user computed once and deep-copies for every question about the same image.

    Args:
        model (`PreTrainedModel`): the stock model.
        inputs (`dict`): the request.
        workload (`Workload`): what it asks.
    """

    def __init__(self, model: Any, inputs: dict[str, torch.Tensor], workload: Workload) -> None:
        end = workload.before + workload.images * (workload.tokens + 2)
        whole = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
        columns = {name: inputs[name][:, :end] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
        self._model = model
        with torch.no_grad():
            self._prefix = model(**columns, **whole, use_cache=True, logits_to_keep=1).cache
        self.inputs = {name: value for name, value in inputs.items() if name != "pixel_values"}

    def cache(self) -> Any:
        """A copy of the prefix, to be continued."""
        return copy.deepcopy(self._prefix)

    def seconds(self) -> float:
        """Seconds of the copy and the first token."""
        start = time.perf_counter()
        seconds(self._model, self.inputs, self.cache())
        return time.perf_counter() - start
