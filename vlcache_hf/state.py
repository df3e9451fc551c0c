"""What travels through the decoder layers of one packed prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .attention.segments import SegmentAttention
from .image_use import ImageUse
from .plan import LayerPlan, Runs, complement
from .prompt import Prompt, PromptImage
from .readahead import ReadAhead, Rows
from .rope import rotate_into, signed
from .watch import Watch

# keys before RoPE and values, `(n, kv_heads, head_dim)`, of hidden states `(1, n, hidden)` at a layer
KVProjection = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class RowRope:
    """cos and sin of packed rows, on the devices that ask for them.

    Args:
        cos (`torch.Tensor` of shape `(rows, head_dim)`), sin (`torch.Tensor`): RoPE of the rows, sin `signed`.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._cos, self._sin = cos, sin
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def part(self, runs: Runs) -> RowRope:
        """Those of some of the rows."""
        return RowRope(*(torch.cat([rows[a:b] for a, b in runs]) for rows in (self._cos, self._sin)))

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin as `(rows, 1, head_dim)`."""
        if device not in self._on:
            self._on[device] = (self._cos[:, None].to(device), self._sin[:, None].to(device))
        return self._on[device]


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
        ahead (`ReadAhead`): loads the stored rows of the next layer.
        project (`Callable`, *optional*):
            Keys and values of given hidden states at a layer; without it rows cannot get keys and values only.
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
        ahead: ReadAhead,
        project: KVProjection | None = None,
    ) -> None:
        self.plan = plan
        self.prompt = prompt
        self.uses = uses
        self.backend = backend
        self.watch = watch
        self.ahead = ahead
        page = backend.page_size
        longest = max(row.columns.size for row in prompt.rows)
        self.pool_shape = (len(prompt.rows), (longest + page - 1) // page * page)
        self._cos, self._sin = cos.flatten(0, 1), signed(sin.flatten(0, 1))
        self.aside: torch.Tensor | None = None
        self._project = project
        self._keys_of = self._queries_of = RowRope(self._cos[flat], self._sin[flat])
        self._scratch: dict[int, dict[Any, Any]] = {}
        ahead.begin(self._reads(0))

    def _reads(self, layer: int) -> Iterator[Rows]:
        """The stored rows that a layer reads: to merge them, and to compare them with those computed now."""
        parts = list(self.plan[layer].stored)
        if self.watch.compares_kv(layer):
            visual = self.plan[layer].visual
            parts += [(index, a, b) for _, index, a, b in visual if self.uses[index].kind == "reused"]
        if self.watch.compares_attention(layer):
            parts += [(index, 0, use.image.length) for index, use in enumerate(self.uses) if use.kind == "reused"]
        for index, a, b in parts:
            yield self.uses[index].rows(layer, a, b)

    def replan(self, plan: tuple[LayerPlan, ...], layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Takes a plan that differs in what comes behind a layer.

        Args:
            plan (`tuple[LayerPlan, ...]`): the plan.
            layer (`int`): the layer that has just been computed, with all its rows.
            hidden (`torch.Tensor` of shape `(1, rows, hidden)`): its output.

        Returns:
            `torch.Tensor` of shape `(1, rows of the next layer, hidden)`.
        """
        self.plan = plan
        self._scratch.clear()  # it is found by the identity of parts of the old plan
        self.ahead.begin(self._reads(layer + 1))
        return self._keep(hidden, plan[layer].through)

    def enter(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Lets the next layer's stored rows load, and sets the rows aside that get keys and values only, for
        `PrefillCache`.

        Args:
            layer (`int`): the layer that comes.
            hidden (`torch.Tensor` of shape `(1, rows of the layer, hidden)`): hidden states.

        Returns:
            `torch.Tensor` of shape `(1, rows that go on, hidden)`.
        """
        self.ahead.begin(self._reads(layer + 1))
        self.aside = None
        self._keys_of = self._queries_of
        through = self.plan[layer].through
        if self._project is None or through is None:
            return hidden
        self.aside = torch.cat([hidden[:, a:b] for a, b in complement(through, hidden.shape[1])], dim=1)
        return self._keep(hidden, through)

    def leave(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Drops the rows that the next layer does not need, where they have been computed.

        Args:
            layer (`int`): the layer that has just been computed.
            hidden (`torch.Tensor` of shape `(1, rows, hidden)`): its output.
        """
        return self._keep(hidden, self.plan[layer].through) if self._project is None else hidden

    def _keep(self, hidden: torch.Tensor, through: Runs | None) -> torch.Tensor:
        if through is None:
            return hidden
        self._queries_of = self._queries_of.part(through)
        return torch.cat([hidden[:, a:b] for a, b in through], dim=1)

    def with_aside(self, layer: int, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values of all rows of a layer, in packed order.

        Args:
            layer (`int`): the layer.
            *rows (`torch.Tensor` of shape `(n, kv_heads, head_dim)`): keys, and values, of the rows that go on.
        """
        through = self.plan[layer].through
        if self.aside is None or self._project is None or through is None:
            return rows
        projected = self._project(layer, self.aside.to(rows[0].device))
        self.aside = None
        count = rows[0].shape[0] + projected[0].shape[0]
        rest = complement(through, count)
        return tuple(_interleave(through, part, rest, more) for part, more in zip(rows, projected))

    def key_rope(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the rows of the present layer, `(rows, 1, head_dim)`."""
        return self._keys_of.on(device)

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
        cos, sin = self._queries_of.on(query.device)
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
            for offset, index, a, b in self.plan[layer if self._project is None else layer + 1].visual:
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
        stored_keys, stored_values = use.stored_rows(layer, start, stop, keys[0], values[0], self.ahead)
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


def _interleave(first: Runs, first_rows: torch.Tensor, second: Runs, second_rows: torch.Tensor) -> torch.Tensor:
    """Rows of two sets of places, in the order of the places."""
    merged = first_rows.new_empty((first_rows.shape[0] + second_rows.shape[0], *first_rows.shape[1:]))
    for runs, rows in ((first, first_rows), (second, second_rows)):
        offset = 0
        for a, b in runs:
            merged[a:b] = rows[offset : offset + b - a]
            offset += b - a
    return merged
