"""Reading a prompt: which tokens are visible, where its images are, which outputs are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .keys import ContextChain
from .plan import Segment


class NotServable(Exception):
    """The language model must compute this request in full, exactly as stock; the message says why."""


@dataclass(frozen=True)
class PromptRow:
    """One batch row.

    Args:
        columns (`np.ndarray` of shape `(n,)`): columns of the visible tokens.
        ids (`np.ndarray` of shape `(n,)`): their token ids.
        positions (`np.ndarray` of shape `(3, n)`): their temporal, height and width positions.
    """

    columns: np.ndarray
    ids: np.ndarray
    positions: np.ndarray

    @property
    def contiguous(self) -> bool:
        return not self.columns.size or int(self.columns[-1] - self.columns[0]) == self.columns.size - 1


@dataclass(frozen=True)
class PromptImage:
    """One image in the prompt.

    Args:
        row (`int`): batch row.
        start (`int`): position of its first token among the visible tokens of the row.
        column (`int`): column of its first token.
        length (`int`): number of its tokens.
        asked (`bool`): whether an output of one of its tokens is asked for.
    """

    row: int
    start: int
    column: int
    length: int
    asked: bool


@dataclass(frozen=True)
class Prompt:
    """A batch of prompts.

    Args:
        rows (`list[PromptRow]`): the batch rows.
        images (`list[PromptImage]`): their images, row by row, in prompt order.
        num_columns (`int`): padded length S.
        ghosts (`list[Segment]`), ghost_columns (`list[int]`):
            Padding tokens whose output is asked for, and the columns they stand in.
        first_kept (`int`): outputs are asked for the columns `[first_kept, S)` of every row.
    """

    rows: list[PromptRow]
    images: list[PromptImage]
    num_columns: int
    ghosts: list[Segment]
    ghost_columns: list[int]
    first_kept: int

    @property
    def padded(self) -> bool:
        return any(row.columns.size != self.num_columns for row in self.rows)

    def contexts(self, image_keys: Sequence[str]) -> list[str]:
        """Digest of the context of every image.

        Args:
            image_keys (sequence of `str`): what the images show, in prompt order.
        """
        contexts = []
        chain, end, index = ContextChain(), 0, 0
        for image, key in zip(self.images, image_keys):  # row by row
            if image.row != index:
                chain, end, index = ContextChain(), 0, image.row
            row, stop = self.rows[index], image.start + image.length
            chain.text(row.ids[end : image.start], row.positions[:, end : image.start])
            contexts.append(chain.image(key, row.positions[:, image.start : stop]))
            end = stop
        return contexts

    def layout(self, image: PromptImage) -> np.ndarray:
        """Positions of an image's tokens relative to its first one, `(3, T)`."""
        positions = self.rows[image.row].positions[:, image.start : image.start + image.length]
        return positions - positions[:, :1]


def read_prompt(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor,
    image_token_id: int,
    image_lengths: Sequence[int],
    logits_to_keep: int,
) -> Prompt:
    """Reads a batch of prompts.

    Args:
        input_ids (`torch.Tensor` of shape `(B, S)`): token ids.
        attention_mask (`torch.Tensor` of shape `(B, S)`, *optional*): 1 for visible tokens.
        position_ids (`torch.Tensor` of shape `(3, B, S)`): M-RoPE positions.
        image_token_id (`int`): the placeholder of image tokens.
        image_lengths (sequence of `int`): number of tokens of each image, in prompt order.
        logits_to_keep (`int`): outputs are asked for the last so many columns; 0 for all.

    Raises:
        `NotServable`: images and placeholders do not fit together in a way that can be planned for.
    """
    batch, columns = input_ids.shape
    ids = input_ids.detach().cpu().numpy()
    positions = position_ids.detach().cpu().numpy().astype(np.int64)
    visible = (
        np.ones((batch, columns), bool)
        if attention_mask is None
        else attention_mask.detach().to(torch.bool).cpu().numpy()
    )
    if visible.shape != ids.shape:
        raise NotServable("the attention mask has another shape than the prompt")
    first_kept = max(columns - logits_to_keep, 0) if logits_to_keep else 0
    is_image = ids == image_token_id
    if int(is_image.sum()) != sum(image_lengths):
        raise NotServable("image tokens and images do not match")
    if (is_image & ~visible).any():
        raise NotServable("an image token is masked")

    rows, images, ghosts, ghost_columns = [], [], [], []
    lengths = iter(image_lengths)
    for row in range(batch):
        shown = np.flatnonzero(visible[row])
        rows.append(PromptRow(shown, ids[row, shown].astype(np.int64), positions[:, row, shown]))
        placeholders = np.flatnonzero(is_image[row])
        at = 0
        while at < placeholders.size:
            length = next(lengths)
            column = int(placeholders[at])
            last = at + length - 1
            if last >= placeholders.size or int(placeholders[last]) != column + length - 1:
                raise NotServable("the tokens of an image are not contiguous")
            start = int(np.searchsorted(shown, column))
            images.append(PromptImage(row, start, column, length, asked=column + length > first_kept))
            at += length
        for column in range(first_kept, columns):
            if not visible[row, column]:
                ghosts.append(Segment(row, 1, int(np.searchsorted(shown, column))))
                ghost_columns.append(column)
    return Prompt(rows, images, columns, ghosts, ghost_columns, first_kept)
