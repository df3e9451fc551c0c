"""The error of an answer's logits for any choice of true and mismatched KV rows (paper section 3.2).

Neither the image nor the prompt in front of it is computed again for a choice: with `VLCache`'s prefix policy the
recomputed rows of the only image equal the true ones at every layer, for they attend to nothing that is reused. So a
schedule's result is that of the text behind the image on a cache put together from two others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from .samples import TokenSample
from .workspace import Workspace

Rows = tuple[torch.Tensor, torch.Tensor]

# Points of one forward: as many as keep keys, values and logits below this, or below this share of a GPU's memory. The
# free part of it would differ from run to run, and with the batches the last bits of the errors.
BATCH_BYTES = 2**31
GPU_SHARE = 0.125
MAX_BATCH = 64


class Point(NamedTuple):
    """What one choice gives.

    Args:
        mse (`float`): mean squared error of the answer's logits.
        flipped (`bool`): whether greedy decoding would give another answer.
    """

    mse: float
    flipped: bool


@dataclass
class Prepared:
    """A sample whose auxiliary prompt is stored in the workspace.

    Args:
        inputs (`dict`): the prompt with the answer, without its last token, behind it.
        answer (`tuple[int, ...]`): token ids of the answer.
        start (`int`), tokens (`int`): column of the first image token, and how many there are.
        logits (`torch.Tensor` of shape `(answer, vocabulary)`): true logits, float32.
        rows (`list[tuple[Tensor, Tensor]]`): true keys and values of all columns, `(1, kv_heads, S, head_dim)`.
    """

    inputs: dict[str, torch.Tensor]
    answer: tuple[int, ...]
    start: int
    tokens: int
    logits: torch.Tensor
    rows: list[Rows]

    def compare(self, logits: torch.Tensor) -> Point:
        """The error of logits of shape `(answer, vocabulary)`."""
        flipped = not torch.equal(logits.argmax(-1), self.logits.argmax(-1))
        return Point(float((logits.float() - self.logits).square().mean()), flipped)


@torch.no_grad()
def prepare(model: Any, sample: TokenSample, workspace: Workspace, max_new_tokens: int) -> Prepared:
    """Stores the auxiliary prompt, lets the model answer, and takes its true logits and KV.

    Args:
        model: one of our models.
        sample (`TokenSample`): the sample.
        workspace (`Workspace`): where the auxiliary prompt is stored; what was there is deleted.
        max_new_tokens (`int`): the longest answer, where the sample has none.

    Raises:
        `ValueError`: the sample has not one image, or the image stands in the same context in both prompts.
    """
    start, tokens = _image(model, sample)
    workspace.clear()
    model(**sample.auxiliary, cache=workspace.cache(), logits_to_keep=1)
    _expect(model, "miss", stored=True)
    answer = sample.answer
    if answer is None:
        generated = model.generate(
            **sample.inputs,
            cache=workspace.cache(policy="encoder_only", read_only=True),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            # as part of a prompt they would ask for pixels
            suppress_tokens=[model.config.image_token_id, model.config.video_token_id],
        )
        answer = tuple(generated[0, sample.inputs["input_ids"].shape[1] :].tolist())
    inputs = _with_answer(sample.inputs, answer[:-1])
    output = model(**inputs, cache=workspace.cache(policy="encoder_only", read_only=True), logits_to_keep=len(answer))
    _expect(model, "miss")
    rows = [(layer.keys, layer.values) for layer in output.cache.layers]
    return Prepared(inputs, answer, start, tokens, output.logits[0].float(), rows)


@torch.no_grad()
def reuse(model: Any, prepared: Prepared, workspace: Workspace, **settings: Any) -> tuple[Point, list[Rows]]:
    """A real request that reuses the stored KV: its error, and the keys and values of all its columns.

    Args:
        model: one of our models.
        prepared (`Prepared`): the sample, stored in the workspace.
        workspace (`Workspace`): the store.
        **settings: `schedule`, `policy`.
    """
    cache = workspace.cache(read_only=True, **settings)
    output = model(**prepared.inputs, cache=cache, logits_to_keep=len(prepared.answer))
    _expect(model, "reused")
    return prepared.compare(output.logits[0]), [(layer.keys, layer.values) for layer in output.cache.layers]


class Probe:
    """One sample, ready for any choice of rows.

    Args:
        model: one of our models.
        prepared (`Prepared`): the sample, stored in the workspace.
        workspace (`Workspace`): the store, needed only now.
        max_ratio (`float`): the largest ratio that will be asked for.
    """

    def __init__(
        self,
        model: Any,
        prepared: Prepared,
        workspace: Workspace,
        max_ratio: float,
    ) -> None:
        self._model, self._prepared = model, prepared
        self.tokens = prepared.tokens
        end, most = prepared.start + prepared.tokens, int(max_ratio * prepared.tokens + 1e-9)
        _, mismatched = reuse(model, prepared, workspace, policy="none")
        self._mismatched = [_part(rows, 0, end) for rows in mismatched]
        self._true = [_part(rows, prepared.start, prepared.start + most) for rows in prepared.rows]
        prepared.rows = []
        self._ids = prepared.inputs["input_ids"][:, end:]
        self._positions = _positions(model, prepared.inputs)[:, :, end:]
        total = prepared.inputs["input_ids"].shape[1]
        kv = sum(part.nbytes for rows in self._mismatched for part in rows) * total // end
        # the layers before the last hold a second copy while rows are appended; logits exist in two dtypes
        self._batch = max(1, min(MAX_BATCH, _batch_bytes(model.device) // (2 * kv + 3 * prepared.logits.nbytes)))

    @property
    def num_layers(self) -> int:
        return len(self._mismatched)

    def to(self, device: Any) -> Probe:
        """Moves the rows: those of all samples may not fit beside the model."""
        for rows in (self._mismatched, self._true):
            rows[:] = [(keys.to(device), values.to(device)) for keys, values in rows]
        return self

    def __call__(self, points: Sequence[Sequence[int]]) -> list[Point]:
        """The errors of some choices.

        Args:
            points (sequence of sequences of `int`): for each choice and layer, how many first image tokens are true.
        """
        counts = np.asarray(points, dtype=np.int64).reshape(len(points), self.num_layers)
        return [
            point
            for at in range(0, len(points), self._batch)
            for point in self._forward(torch.from_numpy(counts[at : at + self._batch]))
        ]

    @torch.no_grad()
    def _forward(self, counts: torch.Tensor) -> list[Point]:
        cache, batch = DynamicCache(), len(counts)
        devices = [layer.self_attn.q_proj.weight.device for layer in self._model.model.language_model.layers]
        for index, device in enumerate(devices):
            layer = DynamicLayer()
            keys, values = (self._mix(index, part, counts[:, index], device) for part in (0, 1))
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            cache.layers.append(layer)
        logits = self._model(
            input_ids=self._ids.expand(batch, -1),
            position_ids=self._positions.expand(-1, batch, -1),
            cache=cache,
            use_cache=True,
            logits_to_keep=len(self._prepared.answer),
        ).logits
        return [self._prepared.compare(row) for row in logits]

    def _mix(self, layer: int, part: int, counts: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Keys (0) or values (1) of one layer, `(points, kv_heads, end, head_dim)`."""
        reused = self._mismatched[layer][part].to(device).expand(len(counts), -1, -1, -1)
        most = int(counts.max())
        if most == 0:
            return reused
        start, mixed = self._prepared.start, reused.clone()
        true = self._true[layer][part][:, :, :most].to(device)
        chosen = (torch.arange(most) < counts[:, None]).to(device)[:, None, :, None]
        mixed[:, :, start : start + most] = torch.where(chosen, true, mixed[:, :, start : start + most])
        return mixed


def _batch_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return BATCH_BYTES
    return int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)


def _part(rows: Rows, start: int, stop: int) -> Rows:
    return rows[0][:, :, start:stop].clone(), rows[1][:, :, start:stop].clone()


def _image(model: Any, sample: TokenSample) -> tuple[int, int]:
    """Column of the first image token, and how many there are."""
    for name, inputs in (("messages", sample.inputs), ("auxiliary", sample.auxiliary)):
        grids = inputs.get("image_grid_thw")
        count = 0 if grids is None else len(grids)
        if count != 1 or inputs["input_ids"].shape[0] != 1:
            raise ValueError(
                f"A calibration sample has one prompt with one image, but `{name}` has "
                f"{inputs['input_ids'].shape[0]} prompt(s) with {count} image(s)."
            )
    at = (sample.inputs["input_ids"][0] == model.config.image_token_id).nonzero().flatten()
    return int(at[0]), len(at)


def _expect(model: Any, kind: str, stored: bool = False) -> None:
    """Makes sure that a request did what is measured: a prompt that is secretly cold has no error to find."""
    record = model.vlcache.last_request
    images = [] if record is None else record.images
    if record is not None and record.in_full is None and [image.kv for image in images] == [kind]:
        if not stored or images[0].stored:
            return
    if kind == "reused" and [image.kv for image in images] == ["exact"]:
        raise ValueError(
            "The image stands in the same context in `messages` and `auxiliary`, so that nothing of it is mismatched. "
            "Put the question in front of the image, or change the system turn."
        )
    raise RuntimeError(f"The image should have been {'stored' if stored else kind}, but: {record}")


def _with_answer(inputs: dict[str, torch.Tensor], answer: Sequence[int]) -> dict[str, torch.Tensor]:
    """The prompt with the tokens of an answer behind it."""
    ids = inputs["input_ids"]
    more = torch.tensor([answer], dtype=ids.dtype, device=ids.device).reshape(1, len(answer))
    values = {"input_ids": more, "attention_mask": torch.ones_like(more), "mm_token_type_ids": torch.zeros_like(more)}
    return {
        name: torch.cat([value, values[name].to(value.dtype)], dim=1) if name in values else value
        for name, value in inputs.items()
    }


def _positions(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """M-RoPE positions `(3, 1, S)`."""
    return model.model.get_rope_index(
        inputs["input_ids"],
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs.get("attention_mask"),
        mm_token_type_ids=inputs["mm_token_type_ids"],
    )[0]
