from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from streams import LateCopies, on_gpu
from vlcache_hf import features
from vlcache_hf.config import VLCacheConfig
from vlcache_hf.encoder import EncodedImages
from vlcache_hf.features import KIND
from vlcache_hf.keys import ModelKeys
from vlcache_hf.options import Options
from vlcache_hf.schedule import RecomputeSchedule
from vlcache_hf.store import DiskStore

MERGE, HIDDEN = 4, 6
GRIDS = [[1, 2, 4], [1, 4, 4], [1, 2, 4]]


class Tower:
    """Features that tell image and token: the sum of a token's patches."""

    def __init__(self, levels):
        self.levels, self.calls = levels, []

    def __call__(self, pixels, grids, watched=True):
        self.calls.append(grids.tolist())
        tokens = pixels.view(-1, MERGE, pixels.shape[1]).sum((1, 2))[:, None].expand(-1, HIDDEN)
        split = torch.split(tokens, (grids.prod(-1) // MERGE).tolist())
        return SimpleNamespace(
            pooler_output=split,
            deepstack_features=[[part + level + 1 for part in split] for level in range(self.levels)],
        )


@pytest.fixture(params=[0, 2])
def make(request, tmp_path):
    tower = Tower(request.param)
    store = DiskStore(tmp_path, None)
    pixels = torch.randn(8 + 16, 5, generator=torch.Generator().manual_seed(0))
    pixels = torch.cat([pixels, pixels[:8]])  # the third image is the first one again

    def build():
        options = Options(VLCacheConfig(cache_dir=tmp_path), store, RecomputeSchedule.uniform(0.1, 2))
        keys = ModelKeys("v" * 64, "t" * 64)
        return EncodedImages("owner", keys, pixels, torch.tensor(GRIDS), MERGE, tower, options, request.param)

    build.tower, build.store, build.pixels, build.levels = tower, store, pixels, request.param
    return build


def test_nothing_is_computed_before_it_is_needed(make):
    encoded = make()
    assert encoded.lengths == [2, 4, 2]
    assert encoded.images[0] is encoded.images[2] is not encoded.images[1]
    assert [image.source for image in encoded.images] == ["skipped"] * 3
    assert make.tower.calls == []
    assert list(make.store.cache_dir.iterdir()) == []


def test_only_what_is_needed_runs_and_equal_images_run_once(make):
    encoded = make()
    rows = encoded.rows(1, 1, 3)
    assert make.tower.calls == [[GRIDS[1]]]
    assert rows.pooled.shape == (2, HIDDEN) and len(rows.deepstack) == make.levels
    pooled = encoded.pooler_output
    assert make.tower.calls == [[GRIDS[1]], [GRIDS[0]]]
    expected = Tower(make.levels)(make.pixels, torch.tensor(GRIDS))
    assert all(torch.equal(a, b) for a, b in zip(pooled, expected.pooler_output))
    for got, want in zip(encoded.deepstack_features, expected.deepstack_features):
        assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert len(encoded.to_tuple()) == (2 if make.levels else 1)


def test_features_are_stored_and_found_again(make):
    first = make()
    pooled = first.pooler_output
    assert first.write_pending() > 0
    assert first.write_pending() == 0
    again = make()
    assert torch.equal(again.rows(1, 1, 3).pooled, pooled[1][1:3])
    assert all(torch.equal(a, b) for a, b in zip(again.pooler_output, pooled))
    assert make.tower.calls == [[GRIDS[0], GRIDS[1]]]
    assert [image.source for image in again.images] == ["hit"] * 3
    assert again.record.bytes_read > 0


def test_features_of_a_gpu_are_stored_once_they_have_arrived(make, monkeypatch):
    made = []

    class Late(LateCopies):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(features, "HostCopies", Late)
    encoded = make()
    expected = encoded.pooler_output
    for image in encoded.images[:2]:
        image.features.pooled = on_gpu(image.features.pooled)
        image.features.deepstack = [on_gpu(level) for level in image.features.deepstack]
    assert encoded.write_pending() > 0
    assert [copies.waits for copies in made] == [1], "once for all images"
    again = make()
    assert all(torch.equal(a, b) for a, b in zip(again.pooler_output, expected))
    assert [image.source for image in again.images] == ["hit"] * 3


def test_stored_features_cannot_be_changed_by_the_caller(make):
    first = make()
    expected = [part.clone() for part in first.pooler_output]
    first.write_pending()
    make().pooler_output[0].zero_()
    assert all(torch.equal(a, b) for a, b in zip(make().pooler_output, expected))


def test_features_that_do_not_fit_are_discarded(make):
    key = make().images[0].key
    make.store.put(KIND, key, key, {"pooled": torch.zeros(3, HIDDEN)}, {})
    encoded = make()
    assert encoded.rows(0, 0, 2).pooled.shape == (2, HIDDEN)
    assert encoded.images[0].source == "miss"
    assert make.store.get(KIND, key, key) is None


def test_expanded_views_share_features(make):
    encoded = make()
    beams = encoded.expanded([0, 0, 1, 1])
    assert beams.lengths == [2, 2, 4, 4]
    assert len(beams.pooler_output) == 4
    assert encoded.rows(0, 0, 1).pooled.shape == (1, HIDDEN)
    assert len(make.tower.calls) == 1
    assert copy.deepcopy(beams) is beams


def test_materialized_is_the_stock_output(make):
    output = make().materialized(dict)
    assert set(output) == ({"pooler_output", "deepstack_features"} if make.levels else {"pooler_output"})
