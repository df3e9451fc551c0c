"""What is looked up and stored: images large enough, and large entries at second sight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tiny
from vlcache_hf import RecomputeSchedule, VLCache, attach
from vlcache_hf.admission import Admission
from vlcache_hf.options import Options

SMALL, LARGE = tiny.image(1, 4, 4), tiny.image(2, 8, 12)


def attached(path: Path, **settings: Any) -> Any:
    return attach(tiny.stock("qwen3_vl"), {"cache_dir": path, "schedule": 0.25, **settings})


def ask(model: Any, *parts: Any, **settings: Any) -> tuple[torch.Tensor, list[tuple[str, bool]]]:
    with torch.no_grad():
        output = model(**tiny.batch(tiny.prompt(*parts)), logits_to_keep=1, cache=VLCache(**settings))
    return output.logits, [(image.kv, image.stored) for image in model.vlcache.last_request.images]


def files(path: Path) -> list[str]:
    return sorted(file.relative_to(path).parts[0] for file in path.rglob("*.safetensors"))


def test_small_images_are_neither_stored_nor_looked_up(tmp_path: Path) -> None:
    ours = attached(tmp_path, min_tokens=5)
    parts = (tiny.text(1, 4), SMALL, tiny.text(2, 3), LARGE, tiny.text(3, 2))
    expected, _ = ask(ours, *parts)
    assert [image.stored for image in ours.vlcache.last_request.images] == [False, True]
    assert files(tmp_path) == ["kv", "vit"]
    got, kinds = ask(ours, *parts)
    assert kinds == [("miss", False), ("exact", False)]
    assert (got - expected).abs().max() < 1e-5
    # an entry of someone with another limit is there, and is not used
    assert ask(ours, *parts, min_tokens=1)[1] == [("miss", True), ("exact", False)]
    assert ask(ours, *parts)[1] == [("miss", False), ("exact", False)]
    assert ask(ours, *parts, min_tokens=4)[1] == [("exact", False), ("exact", False)]


def test_large_entries_are_stored_at_second_sight(tmp_path: Path) -> None:
    ours = attached(tmp_path, second_sight_bytes=0)
    parts = (tiny.text(1, 4), LARGE, tiny.text(3, 2))
    assert ask(ours, *parts)[1] == [("miss", False)] and files(tmp_path) == []
    again = attached(tmp_path, second_sight_bytes=0)  # also in another process
    assert ask(again, *parts)[1] == [("miss", True)] and files(tmp_path) == ["kv", "vit"]
    assert ask(again, *parts)[1] == [("exact", False)]


def test_second_sight_is_of_the_image_in_any_context(tmp_path: Path) -> None:
    ours = attached(tmp_path, second_sight_bytes=0)
    assert ask(ours, tiny.text(1, 4), LARGE, tiny.text(3, 2))[1] == [("miss", False)]
    assert ask(ours, tiny.text(2, 6), LARGE, tiny.text(3, 2))[1] == [("miss", True)]


def test_one_request_is_one_sight(tmp_path: Path) -> None:
    ours = attached(tmp_path, second_sight_bytes=0)
    row = tiny.prompt(tiny.text(1, 4), LARGE, tiny.text(3, 2), LARGE, tiny.text(4, 2))
    with torch.no_grad():
        ours(**tiny.batch(row, row), logits_to_keep=1)
    assert files(tmp_path) == []


def test_smaller_entries_are_stored_at_first_sight(tmp_path: Path) -> None:
    layers, heads, head_dim, tokens = 4, 2, 16, 24
    kv_bytes = 2 * layers * heads * head_dim * tokens * 4
    parts = (tiny.text(1, 4), LARGE, tiny.text(3, 2))
    at, below = (
        attached(tmp_path / "at", second_sight_bytes=kv_bytes),
        attached(tmp_path / "below", second_sight_bytes=kv_bytes - 1),
    )
    assert ask(at, *parts)[1] == [("miss", True)]
    assert ask(below, *parts)[1] == [("miss", False)]


class Full:
    """A store that takes nothing now, and counts the questions."""

    def __init__(self, store: Any) -> None:
        self.store, self.asked = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def accepts(self, nbytes: int) -> bool:
        self.asked += 1
        return False


def test_a_full_store_is_asked_once_for_an_entry_and_the_sight_counts(tmp_path: Path) -> None:
    ours = attached(tmp_path, second_sight_bytes=0)
    full = Full(ours.vlcache.store)
    options = Options(ours.vlcache.config, full, RecomputeSchedule([0.0] * 4))
    assert not Admission(options).stores("a", 24, 1000) and full.asked == 0  # at first sight
    second = Admission(options)
    assert [second.stores("a", 24, 1000) for _ in range(3)] == [False] * 3  # beams, a second pass
    assert full.asked == 1
