from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

import tiny
from vlcache_hf import RecomputeSchedule, VLCacheConfig, attach
from vlcache_hf.records import RequestRecord
from vlcache_hf.runtime import VLCacheRuntime, compute_dtype

INPUTS = tiny.batch(tiny.prompt(tiny.text(1, 4), tiny.image(1), tiny.text(2, 5)))


@pytest.fixture
def runtime(tmp_path):
    return VLCacheRuntime(VLCacheConfig(cache_dir=tmp_path, schedule=0.1))


def test_copies_keep_the_settings_and_start_empty(runtime):
    runtime.finish(RequestRecord())
    for other in (copy.deepcopy(runtime), pickle.loads(pickle.dumps(runtime))):
        assert other.config == runtime.config
        assert other.stats().requests == 0 and other.last_request is None
    assert runtime.stats().requests == 1


def test_the_last_request_belongs_to_its_thread(runtime):
    record = RequestRecord(text_tokens=1)
    runtime.finish(record)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(runtime.last_request))
    thread.start()
    thread.join()
    assert seen == [None] and runtime.last_request is record


def test_stores_are_shared_and_schedules_checked(runtime, tmp_path):
    options = runtime.options(None, "m", 3)
    assert options.store is runtime.store
    assert options.schedule.ratios == (0.1,) * 3
    runtime.config = VLCacheConfig(cache_dir=tmp_path, schedule=RecomputeSchedule((0.5, 0.1)))
    with pytest.raises(ValueError, match="2 ratios but the model has 3"):
        runtime.options(None, "m", 3)


def test_a_schedule_that_does_not_fit_is_an_error_at_load(tmp_path):
    with pytest.raises(ValueError, match="2 ratios but the model has 4"):
        attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "schedule": RecomputeSchedule((0.5, 0.1))})


def test_compute_dtype_tells_autocast():
    model = tiny.stock("qwen3_vl").model.visual
    assert compute_dtype(model) == "torch.float32"
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype(model) == "torch.float32 cpu:torch.bfloat16"


def test_refresh_sees_edits_through_data(tmp_path):
    ours = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "schedule": 0.1})
    tiny.generate(ours, INPUTS)
    ours.model.language_model.layers[1].mlp.up_proj.weight.data.mul_(1.5)
    ours.vlcache.refresh()
    edited = tiny.stock("qwen3_vl")
    edited.model.language_model.layers[1].mlp.up_proj.weight.data.mul_(1.5)
    assert torch.equal(tiny.generate(ours, INPUTS), tiny.generate(edited, INPUTS))
    assert tiny.kinds(ours) == ["miss"]


def test_clear_deletes_the_entries(tmp_path):
    ours = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path, "schedule": 0.1})
    tiny.generate(ours, INPUTS)
    ours.vlcache.clear()
    assert not list(tmp_path.rglob("*.safetensors"))
    tiny.generate(ours, INPUTS)
    assert tiny.kinds(ours) == ["miss"]


def test_warnings_are_raised_once(runtime, caplog):
    for _ in range(3):
        runtime.warn_once("careful")
    assert caplog.text.count("careful") == 1
