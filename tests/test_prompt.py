from __future__ import annotations

import numpy as np
import pytest
import torch

from tiny import IMAGE
from vlcache_hf.plan import Segment
from vlcache_hf.prompt import NotServable, read_prompt


def _read(ids, mask=None, lengths=(), keep=1, positions=None):
    ids = torch.tensor(ids)
    if positions is None:
        positions = torch.arange(ids.shape[1]).expand(3, *ids.shape)
    return read_prompt(ids, None if mask is None else torch.tensor(mask), positions, IMAGE, list(lengths), keep)


def test_images_are_found_row_by_row():
    prompt = _read([[1, IMAGE, IMAGE, 2, IMAGE], [IMAGE, 3, 4, 5, 6]], lengths=[2, 1, 1])
    assert [(i.row, i.start, i.column, i.length) for i in prompt.images] == [(0, 1, 1, 2), (0, 4, 4, 1), (1, 0, 0, 1)]
    assert [i.asked for i in prompt.images] == [False, True, False]
    assert not prompt.padded and prompt.first_kept == 4


def test_positions_count_visible_tokens():
    prompt = _read([[0, 0, 1, IMAGE, 2]], [[0, 0, 1, 1, 1]], [1])
    image = prompt.images[0]
    assert (image.start, image.column) == (1, 3)
    assert prompt.rows[0].columns.tolist() == [2, 3, 4]
    assert prompt.padded and prompt.rows[0].contiguous


def test_padding_whose_output_is_asked_for_becomes_ghosts():
    prompt = _read([[1, 2, 0, 0]], [[1, 1, 0, 0]], keep=1)
    assert prompt.ghosts == [Segment(0, 1, 2)] and prompt.ghost_columns == [3]
    everything = _read([[0, 1, 0, 2]], [[0, 1, 0, 1]], keep=0)
    assert everything.ghosts == [Segment(0, 1, 0), Segment(0, 1, 1)] and everything.ghost_columns == [0, 2]
    assert not everything.rows[0].contiguous


@pytest.mark.parametrize(
    "ids, mask, lengths, reason",
    [
        ([[1, IMAGE, 2]], None, [2], "do not match"),
        ([[IMAGE, 1, IMAGE]], None, [2], "not contiguous"),
        ([[IMAGE], [IMAGE]], None, [2], "not contiguous"),
        ([[IMAGE, IMAGE, 1]], [[0, 1, 1]], [2], "masked"),
        ([[1, 2, 3]], [[1, 1]], [], "another shape"),
    ],
)
def test_what_cannot_be_planned_is_refused(ids, mask, lengths, reason):
    with pytest.raises(NotServable, match=reason):
        _read(ids, mask, lengths)


def _context(ids, mask=None, positions=None, keys=("a",), lengths=(1,), which=-1):
    return _read(ids, mask, lengths, positions=positions).contexts(keys)[which]


def test_context_depends_on_all_that_is_visible_before_the_image_and_on_nothing_else():
    base = _context([[1, 2, IMAGE, 3]])
    assert _context([[1, 2, IMAGE, 9]]) == base  # what comes after
    assert _context([[1, 2, IMAGE, 3]], keys=("b",)) == base  # its own content has a key of its own
    assert _context([[1, 5, IMAGE, 3]]) != base
    assert _context([[2, 1, IMAGE, 3]]) != base
    assert _context([[1, IMAGE, 3]]) != base
    moved = torch.arange(4).expand(3, 1, 4) + torch.tensor([0, 1, 0]).view(3, 1, 1)
    assert _context([[1, 2, IMAGE, 3]], positions=moved) != base
    padded = torch.tensor([0, 0, 1, 2, 3]).expand(3, 1, 5)
    assert _context([[0, 1, 2, IMAGE, 3]], [[0, 1, 1, 1, 1]], padded) == base  # padding is invisible
    assert _context([[1, 2, IMAGE, 3]], [[1, 0, 1, 1]]) != base


def test_context_depends_on_earlier_images():
    first = _context([[IMAGE, 1, IMAGE, 3]], keys=("a", "b"), lengths=(1, 1))
    assert _context([[IMAGE, 1, IMAGE, 3]], keys=("c", "b"), lengths=(1, 1)) != first
    assert _context([[IMAGE, 1, IMAGE, 3]], keys=("a", "c"), lengths=(1, 1)) == first


def test_token_boundaries_cannot_be_shifted():
    assert _context([[1, IMAGE, IMAGE, 2]], keys=("a", "b"), lengths=(1, 1), which=1) != _context(
        [[1, IMAGE, IMAGE, 2]], keys=("a",), lengths=(2,), which=0
    )


def test_layout_is_relative_to_the_first_token():
    positions = torch.tensor([[[5, 7, 7, 9]], [[5, 7, 7, 9]], [[5, 7, 8, 9]]])
    prompt = _read([[1, IMAGE, IMAGE, 2]], lengths=[2], positions=positions)
    assert np.array_equal(prompt.layout(prompt.images[0]), [[0, 0], [0, 0], [0, 1]])
