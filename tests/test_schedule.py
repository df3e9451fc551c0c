from __future__ import annotations

import json
import logging
import re
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlcache_hf import RecomputeSchedule
from vlcache_hf.schedule import shipped_schedules

SCHEDULES = Path(__file__).parent.parent / "schedules"


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


@pytest.mark.parametrize(
    "change, message",
    [
        ({"calibrated": "false"}, "`calibrated` in .* must be a bool, got 'false'"),
        ({"hidden_size": True}, "`hidden_size` in .* must be a int, got True"),
        ({"budget": "0.1"}, "`budget` in .* must be a float, got '0.1'"),
        ({"method": []}, "`method` in .* must be a dict"),
        ({"model_id": 7}, "`model_id` in .* must be a str, got 7"),
    ],
)
def test_values_of_a_wrong_type_are_named(tmp_path, change, message):
    path = RecomputeSchedule.uniform(0.1, 2).save_pretrained(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        RecomputeSchedule.from_pretrained(path)


def test_schedules_are_hashable():
    one, other = (RecomputeSchedule((0.5, 0.1), method={"seed": seed}) for seed in (0, 1))
    assert hash(one) == hash(other) and one != other


def test_a_file_may_say_less():
    assert RecomputeSchedule.from_dict({"version": 1, "ratios": [0.5, 0.1]}) == RecomputeSchedule((0.5, 0.1))


# --- the shipped files


def priors():
    return runpy.run_path(str(SCHEDULES / "make_priors.py"))


def test_the_files_are_what_the_script_makes():
    made = priors()["files"]()
    assert made
    for name, content in made.items():
        assert (SCHEDULES / name).read_text() == content, f"{name}: run python schedules/make_priors.py"


@pytest.mark.parametrize("file", sorted(SCHEDULES.glob("*.json")), ids=lambda file: file.name)
def test_every_shipped_file_serves_its_model(file):
    schedule = RecomputeSchedule.from_pretrained(file)
    assert schedule.model_id is not None
    budget = re.search(r"\.b([\d.]+)$", file.stem)
    assert file.stem.removesuffix(budget[0] if budget else "") == schedule.model_id.split("/")[-1]
    if budget:
        assert schedule.budget == float(budget[1])
    assert schedule.budget is None or schedule.mean <= schedule.budget + 1e-9
    assert schedule == RecomputeSchedule.from_pretrained(file.stem)


@pytest.mark.parametrize("file", sorted(priors()["files"]()))
def test_priors_spend_the_budget_on_the_first_layers(file):
    schedule = RecomputeSchedule.from_pretrained(SCHEDULES / file)
    ratios, third = schedule.ratios, -(-schedule.num_layers // 3)
    assert not schedule.calibrated and schedule.method["name"] == "prior"
    assert 0.97 * schedule.budget < schedule.mean <= schedule.budget + 1e-9
    # layer 0 gains nothing by itself: what it recomputes is what layer 1 needs
    assert ratios[0] == ratios[1] <= 0.3 and ratios[-1] == pytest.approx(schedule.budget / 5, abs=0.002)
    assert sum(ratios[: third + 1]) > 0.6 * sum(ratios)
    assert all(round(ratio * 500, 6) % 1 == 0 for ratio in ratios)


def test_no_two_shipped_models_have_the_same_architecture():
    models = priors()["MODELS"].values()
    assert len({model[:3] for model in models}) == len(models)


def test_the_shipped_folder_is_the_one_of_the_checkout():
    assert shipped_schedules() == SCHEDULES


def test_the_threshold_of_the_guard_travels_with_the_schedule(tmp_path):
    schedule = RecomputeSchedule((0.5, 0.1), guard_threshold=0.8)
    schedule.save_pretrained(tmp_path)
    assert RecomputeSchedule.from_pretrained(tmp_path) == schedule
    assert "guard_threshold" not in RecomputeSchedule((0.5, 0.1)).to_dict()
    with pytest.raises(ValueError, match="`guard_threshold` must be a deviation of at least 0, got -1"):
        RecomputeSchedule((0.5,), guard_threshold=-1)
    for wrong in ("high", True, float("nan")):
        with pytest.raises(ValueError, match="`guard_threshold` must be a deviation"):
            RecomputeSchedule((0.5,), guard_threshold=wrong)
    with pytest.raises(ValueError, match="`guard_threshold` in the schedule must be a float, got 'high'"):
        RecomputeSchedule.from_dict({"version": 1, "ratios": [0.5], "guard_threshold": "high"})
