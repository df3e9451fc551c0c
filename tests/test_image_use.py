"""What is captured is not read before it has arrived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from streams import LateCopies
from vlcache_hf import attach, decide
from vlcache_hf.image_use import ImageUse
from vlcache_hf.store import DiskStore

A, B = tiny.image(1), tiny.image(2, 8, 12)
INPUTS = tiny.batch(tiny.prompt(tiny.text(1, 4), A, tiny.text(2, 5), B, tiny.text(3, 4)))


def logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**tiny.clone(inputs), logits_to_keep=1).logits


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    """All captures are copied as from a GPU; returns what copies them, one for each image."""
    made: list[LateCopies] = []

    def with_late_copies(*args: Any, **kwargs: Any) -> ImageUse:
        made.append(LateCopies())
        return ImageUse(*args, **kwargs, copies=made[-1])

    monkeypatch.setattr(decide, "ImageUse", with_late_copies)
    return made


@pytest.mark.parametrize("storage", ["auto", "int8", "fp8"])
def test_captures_are_stored_once_they_have_arrived(tmp_path: Path, late: list[LateCopies], storage: str) -> None:
    settings = {"storage_dtype": storage, "schedule": 0.25}
    expected = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path / "at once", **settings})
    ours = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path / "late", **settings})
    answers, errors = [], []
    for model in (expected, ours):
        for kind in ("miss", "exact"):
            answers.append(logits(model, INPUTS))
            assert tiny.kinds(model) == [kind, kind]
            errors.append([image.storage_error for image in model.vlcache.last_request.images])
    assert [copies.waits for copies in late] == [1, 1, 0, 0] * 2, "once for each image that is stored"
    assert torch.equal(answers[0], answers[2]) and torch.equal(answers[1], answers[3])
    assert errors[0] == errors[2] and (storage == "auto") == (errors[0] == [0.0, 0.0])


@pytest.mark.parametrize("late_or_not", [True, False])
def test_what_is_stored_is_what_was_computed(
    tmp_path: Path, late_or_not: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late_or_not:
        request.getfixturevalue("late")
    put, stored = DiskStore.put, []

    def noted(store: DiskStore, kind: str, group: str, name: str, tensors: Any, *args: Any, **kwargs: Any) -> int:
        if kind == decide.KIND:
            stored.append({name: tensor.clone() for name, tensor in tensors.items()})
        return put(store, kind, group, name, tensors, *args, **kwargs)

    monkeypatch.setattr(DiskStore, "put", noted)
    inputs = tiny.batch(tiny.prompt(tiny.text(1, 4), A, tiny.text(2, 5)))
    ours = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path})
    with torch.no_grad():
        cache = ours(**tiny.clone(inputs), logits_to_keep=1, use_cache=True).cache
    (parts,) = stored
    for layer in range(4):
        values = cache.layers[layer].values[0, :, 5:21].transpose(0, 1)
        assert torch.equal(parts[f"v.{layer}"], values)
