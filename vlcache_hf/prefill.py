"""The packed prefill: the stock decoder layers over the active tokens only (paper section 4.1, Figure 4)."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from .attention.segments import resolve
from .cache import REQUEST, TAINT, PrefillCache
from .decide import KIND, decide, guarded, remember, store_captured
from .encoder import EncodedImages
from .image_use import ImageUse
from .options import Options
from .plan import ImageSpan, LayerPlan, plan_prefill
from .policies import LargestDeviation
from .precision import KVShape
from .prompt import NotServable, Prompt
from .readahead import ReadAhead
from .state import KVProjection, PrefillState
from .store import StoreReadError
from .watch import ContextMismatch, Watch, probe_layer


@dataclass
class PrefillRequest:
    """A prefill that can be served.

    Args:
        prompt (`Prompt`): the batch.
        encoded (`EncodedImages`): its images.
        input_ids (`torch.Tensor` of shape `(B, S)`): token ids.
        position_ids (`torch.Tensor` of shape `(3, B, S)`): M-RoPE positions.
        shape (`KVShape`): what entries look like.
        uses (`list[ImageUse]`): what is done with each image.
    """

    prompt: Prompt
    encoded: EncodedImages
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    shape: KVShape
    uses: list[ImageUse]

    @property
    def active(self) -> int:
        """Number of rows that the first layer computes, the most of all layers."""
        skipped = sum(
            use.image.length - sum(b - a for a, b in use.recompute[0]) for use in self.uses if use.kind != "miss"
        )
        return sum(row.columns.size for row in self.prompt.rows) + len(self.prompt.ghosts) - skipped


def run(
    text_model: Any, request: PrefillRequest, target: Cache | None, project: KVProjection | None = None
) -> torch.Tensor:
    """Computes a prefill and stores what it captured.

    Args:
        text_model (`PreTrainedModel`): the stock text model, whose layers are called one by one.
        request (`PrefillRequest`): what to compute.
        target (`Cache`, *optional*): the caller's cache; filled to the full length of the prompt.
        project (`Callable`, *optional*):
            Keys and values alone of some rows of a layer; without it rows are computed in full that no layer above
            needs.

    Raises:
        `NotServable`: a forward hook changes the image features; nothing has been written to the caller's cache.

    Returns:
        `torch.Tensor` of shape `(B, K, hidden)`: the final hidden states of the kept columns.
    """
    encoded, avoid = request.encoded, set[tuple[str, str]]()
    record, options = encoded.record, encoded.options
    escalated: dict[int, float] = {}
    while True:
        try:
            with record.timed("prefill"), closing(ReadAhead(request.input_ids.device)) as ahead:
                hidden = _forward(text_model, request, target, ahead, project)
            break
        except StoreReadError:
            for use in request.uses:
                if use.failed:
                    options.store.discard(KIND, use.group, use.entry_name)
                    avoid.add((use.group, use.entry_name))
        except ContextMismatch as mismatch:
            escalated |= mismatch.images
            record.abandoned += mismatch.rows
        # some layers may already stand in the caller's cache, which was empty before
        if target is not None:
            target.reset()
        refused = frozenset((use.group, use.context) for i, use in enumerate(request.uses) if i in escalated)
        request.uses = decide(request.prompt, encoded, options, request.shape, avoid, refused)
    if target is not None:
        setattr(target, TAINT, any(use.lossy for use in request.uses))
        setattr(target, REQUEST, record)
    remember(request.uses, encoded, options)
    with record.timed("storing"):
        # features first: the store is asked whether it takes them, and this request's KV may fill its queue
        record.bytes_written += encoded.write_pending()
        record.bytes_written += store_captured(request.uses, options)
    for index, deviation in escalated.items():
        request.uses[index].record.deviation, request.uses[index].record.guarded = deviation, "escalated"
    record.images = [use.record for use in request.uses]
    for index, use in enumerate(request.uses):
        use.record.encoder = encoded.images[index].source
        record.bytes_read += use.record.bytes_read
    record.text_tokens = sum(row.columns.size for row in request.prompt.rows) - sum(encoded.lengths)
    return hidden


def _forward(
    text_model: Any, request: PrefillRequest, target: Cache | None, ahead: ReadAhead, project: KVProjection | None
) -> torch.Tensor:
    prompt, uses, encoded = request.prompt, request.uses, request.encoded
    plan = _plan(request, project)
    needed = sorted({index for _, index, _, _ in plan[0].visual})
    encoded.look_up(needed)
    if encoded.altered:
        raise NotServable("a forward hook changes the image features")

    flat = _flat_columns(prompt, plan[0].runs).to(request.input_ids.device)
    hidden = text_model.embed_tokens(request.input_ids.flatten()[flat])[None]
    dtype, device = hidden.dtype, hidden.device
    cos, sin = text_model.rotary_emb(hidden, request.position_ids.to(device))
    options = encoded.options
    backend = resolve(options.config.attention, device, dtype, request.shape.head_dim)
    watch = _watch(options, uses, request.shape.layers)
    state = PrefillState(plan, prompt, uses, cos, sin, flat.to(device), backend, watch, ahead, project)

    features = [(index, a, b, encoded.rows(index, a, b)) for _, index, a, b in plan[0].visual]
    for (offset, _, a, b), (_, _, _, rows) in zip(plan[0].visual, features):
        hidden[0, offset : offset + b - a] = rows.pooled.to(device, dtype)
    deepstack_levels = max((len(rows.deepstack) for *_, rows in features), default=0)

    cache = PrefillCache(state, target)
    one = torch.ones(1, 1, request.shape.head_dim, dtype=dtype, device=device)
    zero = torch.zeros_like(one)
    for layer, block in enumerate(text_model.layers):
        hidden = state.enter(layer, hidden)
        shape = (1, hidden.shape[1], -1)
        hidden = block(
            hidden,
            attention_mask=None,
            position_ids=None,
            cache=cache,
            use_cache=True,
            position_embeddings=(one.expand(shape), zero.expand(shape)),
            vlcache_state=state,
        )
        hidden = state.leave(layer, hidden)
        if layer < deepstack_levels:
            _add_deepstack(hidden, state.plan[layer + 1].visual, features, layer)
        if layer == watch.guard_layer:
            _judge(request, watch.deviations(), sum(done.num_rows for done in state.plan[: layer + 1]))
        if watch.selects(layer):
            _select(watch, uses, options)
            hidden = state.replan(_plan(request, project), layer, hidden)
    kept = _kept_rows(prompt, state.plan[-1]).to(hidden.device)
    return text_model.norm(hidden[0, kept].view(len(prompt.rows), -1, hidden.shape[-1]))


def _plan(request: PrefillRequest, project: KVProjection | None) -> tuple[LayerPlan, ...]:
    prompt = request.prompt
    spans = [ImageSpan(use.image.row, use.image.start, use.image.length, use.recompute) for use in request.uses]
    lengths = [row.columns.size for row in prompt.rows]
    kept = [int(np.searchsorted(row.columns, prompt.first_kept)) for row in prompt.rows]
    return plan_prefill(lengths, spans, request.shape.layers, prompt.ghosts, kept, kv_only=project is not None)


def _watch(options: Options, uses: list[ImageUse], layers: int) -> Watch:
    """What is to be learned: nothing where no image of another context is reused."""
    if not any(use.kind == "reused" for use in uses):
        return Watch(None, None)
    guard_layer = probe_layer(layers) if options.config.guard != "off" else None
    policy = options.policy
    # what is chosen behind the last layer comes too late
    selection = policy if isinstance(policy, LargestDeviation) and policy.layer < layers - 1 else None
    return Watch(guard_layer, selection)


def _judge(request: PrefillRequest, deviations: dict[int, float], rows: int) -> None:
    """What the guard makes of the deviations of reused images.

    Raises:
        `ContextMismatch`: the prefill must start again.
    """
    config, limit = request.encoded.options.config, request.encoded.options.guard_threshold
    for index, deviation in deviations.items():
        request.uses[index].record.deviation = deviation
    over = {index: deviation for index, deviation in deviations.items() if not deviation <= limit}
    if over and config.guard == "escalate":
        raise ContextMismatch(over, rows)
    for index in over:
        request.uses[index].record.guarded = "warned"
        request.encoded.owner.warn_once(
            f"A reused image differs from what its context gives by more than guard_threshold={limit}: answers may be "
            'worse. `guard="escalate"` computes such images in full, `reuse="exact"` reuses in the same context only. '
            "How far it differs is in `model.vlcache.last_request`, how often in `model.vlcache.stats()`."
        )


def _select(watch: Watch, uses: list[ImageUse], options: Options) -> None:
    """Gives reused images the tokens that a selective policy chooses, now that it has seen their values."""
    assert watch.selection is not None
    for index, use in enumerate(uses):
        if use.kind == "reused":
            counts = options.schedule.tokens(use.image.length)
            chosen = watch.selection.chosen(watch.scores(index), counts)
            use.recompute = guarded(options, chosen, use.image.length)
            use.count_recomputed()


def _add_deepstack(hidden: torch.Tensor, visual: Any, features: Any, level: int) -> None:
    """Adds the features of one DeepStack level to the image rows that are still active: parts of those of the first
    layer, in the same order."""
    at = 0
    for offset, index, a, b in visual:
        while features[at][0] != index or features[at][2] < b:
            at += 1
        _, start, _, rows = features[at]
        level_rows = rows.deepstack[level][a - start : b - start]
        hidden[0, offset : offset + b - a] += level_rows.to(hidden.device, hidden.dtype)


def _flat_columns(prompt: Prompt, runs: Any) -> torch.Tensor:
    """Flat column `b * S + s` of every packed row of the first layer."""
    parts = [torch.from_numpy(prompt.rows[row].columns[a:b]) + row * prompt.num_columns for row, a, b in runs]
    ghosts = [ghost.row * prompt.num_columns + column for ghost, column in zip(prompt.ghosts, prompt.ghost_columns)]
    return torch.cat([*parts, torch.tensor(ghosts, dtype=torch.long, device="cpu")])


def _kept_rows(prompt: Prompt, plan: LayerPlan) -> torch.Tensor:
    """Packed index, among the outputs, of every column whose output is asked for, row by row."""
    table = np.full((len(prompt.rows), prompt.num_columns), -1)
    offset = 0
    for row, a, b in plan.runs:
        table[row, prompt.rows[row].columns[a:b]] = np.arange(offset, offset + b - a)
        offset += b - a
    for ghost, column in zip(prompt.ghosts, prompt.ghost_columns):
        table[ghost.row, column] = offset
        offset += 1
    return torch.from_numpy(table[:, prompt.first_kept :].reshape(-1))
