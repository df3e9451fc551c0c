"""One image of a prompt: what is read and kept of its KV during a prefill."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .plan import Runs
from .precision import KVShape, StorageError, dequantise
from .prompt import PromptImage
from .readahead import ReadAhead, Rows
from .records import ImageRecord
from .store import StoredEntry, StoreReadError
from .transfer import HostCopies


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
        copies (`HostCopies`): makes what is captured; to be waited for before that is read.
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
    copies: HostCopies = field(default_factory=HostCopies)

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
            self.captured.update({name: self.copies.copy(part) for name, part in parts.items()})
            self.error.add(error)

    def rows(self, layer: int, start: int, stop: int) -> Rows:
        """What `stored_rows` reads."""
        assert self.entry is not None
        return Rows(self.entry, self.shape.names(layer), start, stop)

    def stored_rows(
        self, layer: int, start: int, stop: int, keys: torch.Tensor, values: torch.Tensor, ahead: ReadAhead
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored keys before RoPE and values of the tokens `[start, stop)` at one layer.

        Args:
            layer (`int`), start (`int`), stop (`int`): which.
            keys (`torch.Tensor` of shape `(n, kv_heads, head_dim)`), values (`torch.Tensor`):
                rows computed now, whose device, dtype and shape the stored ones must have.
            ahead (`ReadAhead`): has loaded them, or loads them now.

        Raises:
            `StoreReadError`: they cannot be read or do not fit.
        """
        self.failed = True
        parts = ahead.take(self.rows(layer, start, stop), keys.device)
        self.record.bytes_read += sum(part.nbytes for part in parts)
        if not self.shape.exact:
            parts = [dequantise(*pair, like.dtype) for pair, like in zip(zip(parts[:2], parts[2:]), (keys, values))]
        for name, part, like in zip(self.shape.names(layer), parts, (keys, values)):
            if part.shape[1:] != like.shape[1:] or part.dtype != like.dtype or part.shape[0] != stop - start:
                raise StoreReadError(f"{name} has shape {tuple(part.shape)} and dtype {part.dtype}")
        self.failed = False
        return parts[0], parts[1]
