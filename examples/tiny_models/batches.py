"""From conversations and pictures to the tensors that the model trains on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .checkpoint import PATCH
from .grammar import Message, tokens, vocabulary
from .pictures import CELL, Picture

# Layers and heads that the guiding loss turns to something: first to the numbers of a question, then to the cell.
GATHER, GATHER_HEADS = 2, {"row": 0, "column": 1, "picture": 2}
FIND, FIND_HEADS = 4, (0, 1)
_IDS = vocabulary()
_IGNORE = -100


def patches(pictures: Sequence[Picture]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the image processor makes of pictures that keep their size, without its detours.

    Returns:
        `tuple`: pixel values of shape `(patches, 3 * 2 * 16 * 16)` and `image_grid_thw` of shape `(pictures, 3)`.
    """
    rows, grids = [], []
    for picture in pictures:
        height, width = (side // CELL for side in picture.pixels.shape[:2])
        pixels = torch.from_numpy(picture.pixels).float().div(127.5).sub(1)
        cut = pixels.view(height, 2, PATCH, width, 2, PATCH, 3).permute(0, 3, 1, 4, 6, 2, 5)
        rows.append(cut.unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(height * width * 4, -1))
        grids.append([1, 2 * height, 2 * width])
    return torch.cat(rows), torch.tensor(grids)


@dataclass
class Row:
    """One tokenised conversation.

    Args:
        ids (`list[int]`): token ids.
        labels (`list[int]`): the ids that are to be learned, -100 elsewhere.
        pictures (`list[Picture]`): in the order of their tokens.
        first (`int`), last (`int`): index of the first `<|vision_start|>` and of the last `<|vision_end|>`.
        first_question (`bool`): whether the user's text stands in front of the pictures.
        looks (`list[tuple[int, int, int, int]]`): layer, head, place that should look and place to look at.
    """

    ids: list[int]
    labels: list[int]
    pictures: list[Picture]
    first: int
    last: int
    first_question: bool
    looks: list[tuple[int, int, int, int]]


def encode(messages: list[Message], routed: bool = False) -> Row:
    """Tokenise a conversation whose pictures are `Picture` objects, exactly as the processor does with images.

    Args:
        messages (`list[Message]`): as made by `grammar.conversation`.
        routed (`bool`, *optional*): guide the tokens of the picture, not those of the answer, to a question in front.
    """
    ids: list[int] = []
    labels: list[int] = []
    pictures: list[Picture] = []
    begins: list[int] = []
    looks: list[tuple[int, int, int, int]] = []
    asked: dict[str, int] = {}
    carried = False
    first, last, first_question = -1, -1, False
    for message in messages:
        ids += [_IDS["<|im_start|>"], _IDS[message["role"]]]
        start = len(ids)
        for part in message["content"]:
            if part["type"] == "text":
                text = [_IDS.get(token, _IDS["<unk>"]) for token in tokens(part["text"])]
                if message["role"] == "user" and "?" in part["text"]:
                    asked, carried = _places(part["text"], len(ids)), False
                    first_question |= not pictures
                if message["role"] == "assistant" and "row" in asked:
                    cell = _cell(ids, asked, begins, pictures)
                    for place in range(len(ids) - 1, len(ids) + len(text) - 1):
                        looks += [(FIND, head, place, cell) for head in FIND_HEADS]
                        looks += (
                            [] if carried else [(GATHER, GATHER_HEADS[name], place, asked[name]) for name in asked]
                        )
                ids += text
                continue
            picture = part["image"]
            pictures.append(picture)
            first = len(ids) if first < 0 else first
            begins.append(len(ids) + 1)
            ids += [_IDS["<|vision_start|>"], *[_IDS["<|image_pad|>"]] * picture.size**2, _IDS["<|vision_end|>"]]
            last = len(ids) - 1
            if routed and "row" in asked:
                carried = True
                for place in range(begins[-1], last):
                    looks += [(GATHER, GATHER_HEADS[name], place, asked[name]) for name in asked]
        ids.append(_IDS["<|im_end|>"])
        labels += [_IGNORE] * (start - len(labels))
        labels += ids[start:] if message["role"] == "assistant" else [_IGNORE] * (len(ids) - start)
    return Row(ids, labels, pictures, first, last, first_question, looks)


def _places(text: str, begin: int) -> dict[str, int]:
    """Places of the numbers of row, column and picture in a question that begins at place `begin`."""
    words = tokens(text)
    names = ("row", "column", "picture")
    numbers = (index for index in range(1, len(words)) if words[index].isdigit() and words[index - 1] in names)
    return {words[index - 1]: begin + index for index in numbers}


def _cell(ids: list[int], asked: dict[str, int], begins: list[int], pictures: list[Picture]) -> int:
    """Place of the image token of the cell that a question is about."""
    numbers = {name: ids[place] - _IDS["0"] for name, place in asked.items()}
    number = numbers.get("picture", 1) - 1
    return begins[number] + (numbers["row"] - 1) * pictures[number].size + numbers["column"] - 1


@dataclass
class Batch:
    """Rows padded on the right.

    Args:
        ids (`torch.Tensor` of shape `(rows, length)`): token ids.
        labels (`torch.Tensor` of shape `(rows, length)`): targets, -100 where nothing is to be learned.
        lengths (`torch.Tensor` of shape `(rows,)`): number of tokens of each row.
        hide (`torch.Tensor` of shape `(rows, 2)`): text before the first number is hidden from tokens behind the
            second; `(0, 0)` hides nothing.
        grids (`torch.Tensor` of shape `(images, 3)`): `image_grid_thw` of all pictures, in token order.
        pictures (`list[Picture]`): distinct pictures.
        index (`list[int]`): which of `pictures` each image of the rows is.
        looks (`torch.Tensor` of shape `(looks, 5)`): row, and what `Row.looks` says.
        name (`str`): for the log.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    lengths: torch.Tensor
    hide: torch.Tensor
    grids: torch.Tensor
    pictures: list[Picture]
    index: list[int]
    looks: torch.Tensor
    name: str = ""

    def mask(self) -> torch.Tensor:
        """Attention mask, additive, of shape `(rows, 1, length, length)`."""
        length = self.ids.shape[1]
        place = torch.arange(length)
        seen = (place[None, :] <= place[:, None])[None] & (place[None, None] < self.lengths[:, None, None])
        hidden = (place[None, None] < self.hide[:, 0, None, None]) & (
            place[None, :, None] > self.hide[:, 1, None, None]
        )
        seen = (seen & ~hidden) | torch.eye(length, dtype=torch.bool)[None]
        return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]


def collate(rows: list[Row], hide: np.ndarray | None = None) -> Batch:
    """Pad rows.

    Args:
        rows (`list[Row]`): tokenised conversations.
        hide (`np.ndarray` of shape `(rows,)`, *optional*): True where the text before the pictures is hidden from the
            text behind them.
    """
    length = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), length), _IDS["<|endoftext|>"])
    labels = torch.full((len(rows), length), _IGNORE)
    hidden = torch.zeros(len(rows), 2, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        labels[index, : len(row.labels)] = torch.tensor(row.labels)
        if hide is not None and hide[index]:
            hidden[index] = torch.tensor([row.first, row.last])
    shown = [picture for row in rows for picture in row.pictures]
    distinct = list({id(picture): picture for picture in shown}.values())
    number = {id(picture): index for index, picture in enumerate(distinct)}
    grids = torch.tensor([[1, 2 * picture.size, 2 * picture.size] for picture in shown])
    lengths = torch.tensor([len(row.ids) for row in rows])
    looks = torch.tensor([(index, *look) for index, row in enumerate(rows) for look in row.looks]).view(-1, 5)
    return Batch(ids, labels, lengths, hidden, grids, distinct, [number[id(picture)] for picture in shown], looks)


def loss(model: Any, batch: Batch, guide: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of the language model over a batch; the vision tower is frozen.

    Args:
        model (`Qwen3VLForConditionalGeneration`): with eager attention if it is to be guided.
        batch (`Batch`): what to learn.
        guide (`float`, *optional*): weight of a loss that turns some heads of two layers to the numbers of the
            question and to the cell that is asked for. Without it, finding this circuit takes most of the training.

    Returns:
        `tuple`: mean loss, number of right tokens, number of tokens to be learned.
    """
    base = model.model
    with torch.no_grad():
        seen = base.get_image_features(*patches(batch.pictures))
        # one tensor for each image of the rows, as `get_image_features` gives them
        encoded: Any = copy.copy(seen)
        encoded.pooler_output = tuple(seen.pooler_output[index] for index in batch.index)
        encoded.deepstack_features = [
            tuple(level[index] for index in batch.index) for level in seen.deepstack_features
        ]
    is_image = (batch.ids == _IDS["<|image_pad|>"]).int()
    visible = (torch.arange(batch.ids.shape[1])[None] < batch.lengths[:, None]).long()
    positions, _ = base.get_rope_index(batch.ids, is_image, batch.grids, attention_mask=visible)
    output = base(
        input_ids=batch.ids,
        attention_mask=batch.mask(),
        position_ids=positions,
        image_grid_thw=batch.grids,
        mm_encoder_outputs={"image": encoded},
        use_cache=False,
        output_attentions=guide > 0,
    )
    hidden = output.last_hidden_state
    learned = batch.labels[:, 1:] != _IGNORE
    logits = model.lm_head(hidden[:, :-1][learned]).float()
    targets = batch.labels[:, 1:][learned]
    right = (logits.argmax(-1) == targets).sum()
    value = torch.nn.functional.cross_entropy(logits, targets)
    if guide > 0 and len(batch.looks):
        for layer in (GATHER, FIND):
            row, _, head, place, target = batch.looks[batch.looks[:, 1] == layer].T
            share = output.attentions[layer][row, head, place, target].float()
            value = value - guide * share.clamp_min(1e-6).log().mean()
    return value, right, torch.tensor(len(targets))
