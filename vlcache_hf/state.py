"""What travels through the decoder layers of one packed prefill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .attention.segments import SegmentAttention
from .plan import LayerPlan, Runs
from .precision import KVShape, StorageError, dequantise
from .prompt import Prompt, PromptImage
from .records import ImageRecord
from .rope import rotate_into
from .store import StoredEntry, StoreReadError
from .watch import Watch


@dataclass
class ImageUse:
    """What is done with one image of the prompt.

    Args:
        image (`PromptImage`): where it stands.
        group (`str`): key of its KV, whatever the context.
        context (`str`): digest of its context.
        grid (`tuple[int, ...]`): its `image_grid_thw` row.
        kind (`str`): `"exact"`, `"reused"` or `"miss"`.
        recompute (`tuple[Runs, ...]`): the tokens computed at each layer.
        entry (`StoredEntry`, *optional*): the stored KV of a hit.
        entry_name (`str`, *optional*): the context that `entry` belongs to.
        capture (`bool`): whether its KV is kept for the store.
        failed (`bool`): whether reading `entry` broke off.
        record (`ImageRecord`): its line in the request's record.
        shape (`KVShape`): how its KV is stored.
        captured (`dict[str, torch.Tensor]`): what is to be stored, so far.
        error (`StorageError`): what storing it so loses, so far.
    """

    image: PromptImage
    group: str
    context: str
    grid: tuple[int, ...]
    kind: str
    recompute: tuple[Runs, ...]
    record: ImageRecord
    shape: KVShape
    entry: StoredEntry | None = None
    entry_name: str = ""
    capture: bool = False
    failed: bool = False
    captured: dict[str, torch.Tensor] = field(default_factory=dict)
    error: StorageError = field(default_factory=StorageError)

    @property
    def lossy(self) -> bool:
        """Whether what is computed behind this image carries a loss: of another context, or of 8 bits."""
        return self.kind == "reused" or (self.kind == "exact" and not self.shape.exact)

    def count_recomputed(self) -> None:
        """Notes how many tokens, times layers, are computed."""
        self.record.recomputed = sum(b - a for runs in self.recompute for a, b in runs)

    def capture_rows(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keeps one layer's keys before RoPE and values, `(T, kv_heads, head_dim)`, if the image is to be stored."""
        if self.capture:
            parts, error = self.shape.encode(layer, keys, values)
            self.captured.update(parts)
            self.error.add(error)

    def stored_rows(
        self, layer: int, start: int, stop: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored keys before RoPE and values of the tokens `[start, stop)` at one layer.

        Args:
            layer (`int`), start (`int`), stop (`int`): which.
            keys (`torch.Tensor` of shape `(n, kv_heads, head_dim)`), values (`torch.Tensor`):
                rows computed now, whose device, dtype and shape the stored ones must have.

        Raises:
            `StoreReadError`: they cannot be read or do not fit.
        """
        assert self.entry is not None
        self.failed = True
        parts = []
        for name, like in zip(self.shape.names(layer), 2 * (keys, values)):
            part = self.entry.rows(name, start, stop)
            self.record.bytes_read += part.nbytes
            parts.append(part.to(like.device, non_blocking=True))
        if not self.shape.exact:
            parts = [dequantise(*pair, like.dtype) for pair, like in zip(zip(parts[:2], parts[2:]), (keys, values))]
        for name, part, like in zip(self.shape.names(layer), parts, (keys, values)):
            if part.shape[1:] != like.shape[1:] or part.dtype != like.dtype or part.shape[0] != stop - start:
                raise StoreReadError(f"{name} has shape {tuple(part.shape)} and dtype {part.dtype}")
        self.failed = False
        return parts[0], parts[1]


class PrefillState:
    """Plan and tensors of one packed prefill. Opaque on purpose: hooks that walk mappings and sequences pass it by.

    The decoder layers get cos = 1 and sin = 0; the real ones are here, for `PrefillCache` (keys) and `attend`
    (queries). So the cache sees keys before RoPE, and un-rotating, which loses bits in bf16, is never needed.

    Args:
        plan (`tuple[LayerPlan, ...]`): one per layer.
        prompt (`Prompt`): the batch.
        uses (`list[ImageUse]`): its images.
        cos (`torch.Tensor` of shape `(B, S, head_dim)`), sin (`torch.Tensor`): RoPE of every column.
        flat (`torch.Tensor` of shape `(n,)`): flat columns `b * S + s` of the packed rows of layer 0.
        backend (`SegmentAttention`): the attention kernel.
        watch (`Watch`): what is learned about reuse on the way.
    """

    def __init__(
        self,
        plan: tuple[LayerPlan, ...],
        prompt: Prompt,
        uses: list[ImageUse],
        cos: torch.Tensor,
        sin: torch.Tensor,
        flat: torch.Tensor,
        backend: SegmentAttention,
        watch: Watch,
    ) -> None:
        self.plan = plan
        self.prompt = prompt
        self.uses = uses
        self.backend = backend
        self.watch = watch
        page = backend.page_size
        longest = max(row.columns.size for row in prompt.rows)
        self.pool_shape = (len(prompt.rows), (longest + page - 1) // page * page)
        self._cos, self._sin = cos.flatten(0, 1), sin.flatten(0, 1)
        self._row_cos, self._row_sin = self._cos[flat], self._sin[flat]
        self._on: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scratch: dict[int, dict[Any, Any]] = {}

    def replan(self, plan: tuple[LayerPlan, ...]) -> None:
        """Takes a plan that differs in the layers to come."""
        self.plan = plan
        self._scratch.clear()  # it is found by the identity of parts of the old plan

    def enter(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Drops the rows that the next layer does not compute.

        Args:
            layer (`int`): the layer that comes.
            hidden (`torch.Tensor` of shape `(1, rows of the layer below, hidden)`): hidden states.

        Returns:
            `torch.Tensor` of shape `(1, rows of the layer, hidden)`.
        """
        narrow = self.plan[layer].narrow
        if narrow is None:
            return hidden
        self._on.clear()
        self._row_cos, self._row_sin = (
            torch.cat([rows[a:b] for a, b in narrow]) for rows in (self._row_cos, self._row_sin)
        )
        return torch.cat([hidden[:, a:b] for a, b in narrow], dim=1)

    def rows(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the packed rows of the current layer, `(rows, 1, head_dim)`."""
        if device not in self._on:
            self._on[device] = (self._row_cos[:, None].to(device), self._row_sin[:, None].to(device))
        return self._on[device]

    def image_rope(
        self, image: PromptImage, start: int, stop: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the tokens `[start, stop)` of an image, `(tokens, 1, head_dim)`."""
        first = image.row * self.prompt.num_columns + image.column
        part = slice(first + start, first + stop)
        return self._cos[part, None].to(device), self._sin[part, None].to(device)

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attention of the active tokens of one layer.

        Args:
            layer (`int`): the layer.
            query (`torch.Tensor` of shape `(1, heads, rows, head_dim)`): queries before RoPE.
            keys (`torch.Tensor` of shape `(B, P, kv_heads, head_dim)`), values (`torch.Tensor`):
                what `PrefillCache.update` returned.
            scaling (`float`): factor of the scores.

        Returns:
            `torch.Tensor` of shape `(1, rows, heads, head_dim)`.
        """
        cos, sin = self.rows(query.device)
        rotated = rotate_into(torch.empty_like(query), query, cos.transpose(0, 1), sin.transpose(0, 1))
        segments = self.plan[layer].segments
        scratch = self._scratch.setdefault(id(segments), {})
        output = self.backend(rotated, keys, values, segments, scaling, scratch)
        if self.watch.compares_attention(layer):
            keys, values = keys.clone(), values.clone()
            for use in self.uses:
                if use.kind == "reused":
                    self.put_stored(use, layer, 0, use.image.length, keys, values)
            stored = self.backend(rotated, keys, values, segments, scaling, {})
            for offset, index, a, b in self.plan[layer].visual:
                if self.uses[index].kind == "reused":
                    part = slice(offset, offset + b - a)
                    self.watch.add_attention(index, output[0, part], stored[0, part])
        return output

    def put_stored(
        self, use: ImageUse, layer: int, start: int, stop: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Writes stored rows of an image, rotated to their positions, into the pools of a layer.

        Args:
            use (`ImageUse`): the image.
            layer (`int`): the layer.
            start (`int`), stop (`int`): which of its tokens.
            keys (`torch.Tensor` of shape `(B, P, kv_heads, head_dim)`), values (`torch.Tensor`): the pools.

        Raises:
            `StoreReadError`: they cannot be read or do not fit.
        """
        stored_keys, stored_values = use.stored_rows(layer, start, stop, keys[0], values[0])
        row, part = use.image.row, slice(use.image.start + start, use.image.start + stop)
        rotate_into(keys[row, part], stored_keys, *self.image_rope(use.image, start, stop, keys.device))
        values[row, part] = stored_values

    def to_columns(self, pool: torch.Tensor) -> torch.Tensor:
        """A pool as the padded columns of the batch: `(B, P, kv_heads, head_dim)` to `(B, S, kv_heads, head_dim)`."""
        if not self.prompt.padded:
            return pool[:, : self.prompt.num_columns]
        columns = pool.new_zeros(pool.shape[0], self.prompt.num_columns, *pool.shape[2:])
        for index, row in enumerate(self.prompt.rows):
            count = row.columns.size
            if row.contiguous and count:
                first = int(row.columns[0])
                columns[index, first : first + count] = pool[index, :count]
            else:
                columns[index, torch.from_numpy(row.columns).to(pool.device)] = pool[index, :count]
        return columns
