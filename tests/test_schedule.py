from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlcache_hf import RecomputeSchedule
from vlcache_hf.schedule import find_shipped, resolve_schedule, shipped_schedules


def test_uniform():
    schedule = RecomputeSchedule.uniform(0.1, 3)
    assert schedule.ratios == (0.1, 0.1, 0.1)
    assert schedule.mean == pytest.approx(0.1)
    assert schedule.tokens(1000) == (100, 100, 100)


def test_token_counts_are_the_floor_of_the_written_ratio():
    assert RecomputeSchedule((0.29,)).tokens(100) == (29,)  # 0.29 * 100 is 28.999... in binary
    assert RecomputeSchedule((0.1,)).tokens(9) == (0,)
    assert RecomputeSchedule((1.0,)).tokens(7) == (7,)


@given(st.integers(0, 10_000), st.integers(0, 1000))
def test_token_counts_match_integer_arithmetic(tokens, thousandths):
    assert RecomputeSchedule((thousandths / 1000,)).tokens(tokens) == (tokens * thousandths // 1000,)


@pytest.mark.parametrize(
    "ratios, message",
    [
        ((0.1, 0.2), "layer 1 has 0.2 after 0.1"),
        ((1.1,), "layer 0 must be a number in \\[0, 1\\], got 1.1"),
        ((-0.1,), "got -0.1"),
        ((float("nan"),), "got nan"),
        (("0.1",), "got '0.1'"),
        ((True,), "got True"),
        ((), "empty"),
        (0.1, "sequence"),
        ("0.1", "sequence"),
    ],
)
def test_bad_ratios_are_named(ratios, message):
    with pytest.raises(ValueError, match=message):
        RecomputeSchedule(ratios)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_save_and_load(tmp_path_factory, ratios):
    folder = tmp_path_factory.mktemp("schedule")
    schedule = RecomputeSchedule(tuple(sorted(ratios, reverse=True)), model_id="a/b", method={"seed": 1})
    path = schedule.save_pretrained(folder)
    assert path.name == "vlcache_schedule.json"
    assert RecomputeSchedule.from_pretrained(folder) == RecomputeSchedule.from_pretrained(path) == schedule


def test_unknown_keys_warn_and_missing_ones_raise(tmp_path, caplog):
    path = RecomputeSchedule.uniform(0.1, 2).save_pretrained(tmp_path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "colour": "red"}))
    with caplog.at_level(logging.WARNING):
        assert RecomputeSchedule.from_pretrained(path).ratios == (0.1, 0.1)
    assert "colour" in caplog.text
    del data["ratios"]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="lacks the required key.*ratios"):
        RecomputeSchedule.from_pretrained(path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 99}, "version 99"),
        ({"num_layers": 5}, "num_layers=5 but lists 2"),
        ({"ratios": "0.1"}, "must be a list"),
        ({"ratios": [0.1, 0.5]}, "layer 1 has 0.5"),
    ],
)
def test_broken_files(tmp_path, change, message):
    path = RecomputeSchedule.uniform(0.1, 2).save_pretrained(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        RecomputeSchedule.from_pretrained(path)


def test_not_json_and_not_there(tmp_path):
    path = tmp_path / "vlcache_schedule.json"
    with pytest.raises(FileNotFoundError, match="vlcache_schedule.json"):
        RecomputeSchedule.from_pretrained(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        RecomputeSchedule.from_pretrained(path)


def test_resolve(tmp_path, caplog):
    assert resolve_schedule(0.3, "m", 2).ratios == (0.3, 0.3)
    RecomputeSchedule((0.5, 0.25)).save_pretrained(tmp_path)
    assert resolve_schedule(str(tmp_path), "m", 2).ratios == (0.5, 0.25)
    with pytest.raises(ValueError, match="2 ratios but the model has 3"):
        resolve_schedule(tmp_path, "m", 3)
    with pytest.raises(ValueError, match="2 ratios but the model has 4"):
        resolve_schedule(RecomputeSchedule((0.5, 0.25)), "m", 4)
    with caplog.at_level(logging.WARNING):
        assert resolve_schedule("auto", "someone/unknown", 2).ratios == (0.1, 0.1)
    assert "someone/unknown" in caplog.text


def test_auto_takes_the_shipped_file(tmp_path, monkeypatch):
    shipped = RecomputeSchedule((0.4, 0.2), model_id="org/Model-X")
    (tmp_path / "Model-X.json").write_text(json.dumps(shipped.to_dict()))
    monkeypatch.setattr("vlcache_hf.schedule.shipped_schedules", lambda: tmp_path)
    assert find_shipped("other/Model-X") == shipped
    assert resolve_schedule("auto", "org/Model-X", 2) == shipped
    assert resolve_schedule("auto", "org/Model-X", 5).ratios == (0.1,) * 5


def test_the_shipped_folder_exists_and_its_files_are_valid():
    folder = shipped_schedules()
    assert folder is not None
    for file in folder.glob("*.json"):
        assert RecomputeSchedule.from_pretrained(file).num_layers > 0
