"""Whole calibrations of a tiny random model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from tests.calibration.conftest import sample
from vlcache_hf import RecomputeSchedule, attach
from vlcache_hf.calibration import calibrate, plot
from vlcache_hf.calibration import run as run_module
from vlcache_hf.calibration.check import Outcomes, wilson
from vlcache_hf.calibration.journal import JOURNAL_NAME
from vlcache_hf.calibration.refine import first_layers, moves, search, uniform

BUDGETS = (0.05, 0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path_factory.mktemp("own")})


def run(model: Any, out: Path | None = None, budgets: Any = BUDGETS, count: int = 4, **settings: Any) -> Any:
    samples = [sample(index) for index in range(count)]
    return calibrate(model, None, samples, budgets, out=out, max_new_tokens=5, progress=False, **settings)


def written(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.json"))}


def test_what_a_calibration_gives(model: Any, tmp_path: Path) -> None:
    result = run(model, tmp_path, held_out=[sample(index) for index in range(50, 56)])
    assert list(result.schedules) == [0.05, 0.1]
    base = result.curves.base
    assert base > 1e-3 and np.all(result.curves.mean[:, 0] == pytest.approx(base))
    assert np.all(result.curves.mean[0] == base)
    for part in result.budgets:
        assert list(part.candidates) == ["uniform", "greedy", "optimal", "refined"]
        assert part.schedule is part.candidates["refined"] and part.schedule.calibrated
        assert all(schedule.mean <= part.budget + 1e-9 for schedule in part.candidates.values())
        sums = {name: row["sum_of_sensitivities"] for name, row in part.report["schedules"].items()}
        assert sums["optimal"] <= min(sums.values()) and sums["greedy"] <= sums["uniform"]
        found = part.report["search"]
        assert found["error"] <= min(found["starts"].values())
        assert found["starts"]["uniform"] < base
        # the error of the search is that of real requests, on other samples
        tested = result.held_out[f"{part.budget:g}"]
        assert set(tested) == set(part.candidates)
        assert tested["uniform"]["of_baseline"] == 1.0 and tested["uniform"]["samples"] == 6
        assert tested["refined"]["mse_interval"][0] < tested["refined"]["mse"] < tested["refined"]["mse_interval"][1]
        loaded = RecomputeSchedule.from_pretrained(tmp_path / part.folder_name)
        assert loaded == part.schedule
        assert loaded.method["num_samples"] == 4 and loaded.method["seed"] == 0
    assert {*written(tmp_path)} == {
        "curves.json",
        "report.json",
        "mean-0.05/vlcache_schedule.json",
        "mean-0.1/vlcache_schedule.json",
    }
    curves = json.loads((tmp_path / "curves.json").read_text())
    assert len(curves["mean"]) == 4 and len(curves["mean"][0]) == len(curves["ratios"]) == 151
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(result.report()))


def test_errors_of_the_search_are_those_of_real_requests(model: Any) -> None:
    result = run(model, budgets=(0.1,))
    again = run(model, budgets=(0.1,), method="optimal", held_out=[sample(index) for index in range(4)])
    starts = result.budgets[0].report["search"]["starts"]
    for name in ("uniform", "greedy", "optimal"):
        assert again.held_out["0.1"][name]["mse"] == pytest.approx(starts[name], rel=1e-3)


@pytest.mark.parametrize("killed_at", [1, 3, 4])
def test_a_run_that_was_killed_goes_on_and_ends_with_the_same_bytes(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    run(model, tmp_path / "whole")
    prepared = []

    def counted(*args: Any) -> Any:
        prepared.append(1)
        if len(prepared) > killed_at:
            raise KeyboardInterrupt
        return real(*args)

    real = run_module.prepare
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "prepare", counted)
        if killed_at == 4:  # all samples are done: in the middle of the search
            patch.setattr(run_module.refine, "search", lambda *args: counted())
        with pytest.raises(KeyboardInterrupt):
            run(model, tmp_path / "cut")
    file = tmp_path / "cut" / JOURNAL_NAME
    assert len(file.read_text().splitlines()) == 1 + killed_at
    with file.open("a") as stream:
        stream.write('{"part": "sample 3", "result": {"tok')  # the write that was cut off
    measured = []
    monkeypatch.setattr(run_module, "measure", lambda *args: measured.append(1) or real_measure(*args))
    run(model, tmp_path / "cut")
    assert len(measured) == 4 - killed_at
    assert written(tmp_path / "cut") == written(tmp_path / "whole")
    assert file.read_bytes() == (tmp_path / "whole" / JOURNAL_NAME).read_bytes()
    run(model, tmp_path / "cut")
    assert len(measured) == 4 - killed_at and written(tmp_path / "cut") == written(tmp_path / "whole")


real_measure = run_module.measure


def test_another_budget_costs_no_new_measurements_of_layers(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, tmp_path, method="greedy")
    monkeypatch.setattr(run_module, "measure", None)
    monkeypatch.setattr(run_module, "prepare", None)
    result = run(model, tmp_path, budgets=(0.2,), method="optimal")
    assert result.schedules[0.2].mean <= 0.2 and "refined" not in result.budgets[0].candidates


@pytest.mark.parametrize(
    ("change", "named"), [({"seed": 1}, "seed"), ({"count": 3}, "num_samples, samples"), ({"tolerance": 0.5}, "toler")]
)
def test_other_settings_are_not_mixed_with_what_is_done(
    model: Any, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    run(model, tmp_path, budgets=(0.05,), method="greedy")
    with pytest.raises(ValueError, match=f"another {named}"):
        run(model, tmp_path, budgets=(0.05,), method="greedy", **change)


def test_other_weights_are_other_settings(model: Any, tmp_path: Path) -> None:
    run(model, tmp_path, budgets=(0.05,), method="greedy", count=1)
    other = attach(tiny.stock("qwen3_vl", seed=1), {"cache_dir": tmp_path / "c"})
    with pytest.raises(ValueError, match="another model"):
        run(other, tmp_path, budgets=(0.05,), method="greedy", count=1)


def test_misuse_is_an_error_with_the_value(model: Any) -> None:
    with pytest.raises(ValueError, match="no image cache"):
        run(tiny.stock("qwen3_vl"))
    with pytest.raises(ValueError, match="training mode"):
        run(attach(tiny.stock("qwen3_vl").train()))
    with pytest.raises(ValueError, match="`samples` is empty"):
        run(model, count=0)
    for budgets in ((), (0.1, 0.1)):
        with pytest.raises(ValueError, match="`budgets` must be"):
            run(model, budgets=budgets)
    with pytest.raises(ValueError, match=r"mean ratio in \[0, 1\], got 1.5"):
        run(model, budgets=(1.5,))
    with pytest.raises(ValueError, match="'paper'"):
        run(model, method="paper")


def test_plots(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(model, budgets=(0.05,), method="greedy", count=1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="vlcache-hf.plots."):
        plot(result, tmp_path)
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert [path.name for path in plot(result, tmp_path)] == ["curves.png", "schedules.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.glob("*.png"))


def test_moves_keep_order_budget_and_range() -> None:
    for levels in ((9, 9, 3, 0), (5, 5, 5, 5), (20, 0, 0, 0), (0, 0, 0, 0)):
        found = moves(levels, 21, 20)
        assert levels not in found
        assert found, levels
        for move in found:
            assert list(move) == sorted(move, reverse=True)
            assert sum(move) <= 21 and 0 <= move[-1] and move[0] <= 20


def test_the_search_finds_a_minimum_that_is_no_start() -> None:
    target = np.array([12, 12, 4, 2])

    def errors(schedules: Any) -> Any:
        distance = np.abs(np.array(schedules) - target).sum(axis=1)[:, None] / 30
        return distance + np.array([[1.0, 1.1, 0.9]])

    starts = {"uniform": uniform(4, 30), **first_layers(4, 30, 20)}
    assert starts == {
        "uniform": (8, 8, 7, 7),
        "first 1": (20, 0, 0, 0),
        "first 2": (15, 15, 0, 0),
        "first 3": (10, 10, 10, 0),
        "first 4": (7, 7, 7, 7),
    }
    found = search(errors, starts, 30, 20, seed=0)
    assert found.levels == tuple(target) and found.error == pytest.approx(1.0)
    assert found == search(errors, starts, 30, 20, seed=0)


def test_the_search_does_not_follow_chance() -> None:
    rng = np.random.default_rng(0)
    starts = {"uniform": uniform(4, 30)}
    found = search(lambda schedules: 1 + 0.1 * rng.random((len(schedules), 4)) * [[1, -1, 1, -1]], starts, 30, 20, 0)
    assert found.measured < 48 * 25 and found.start == "uniform"


def test_intervals() -> None:
    rng = np.random.default_rng(0)
    base = rng.random(40) + 0.5
    outcomes = Outcomes(("uniform", "half"), np.stack([base, base / 2]), np.zeros((2, 40)))
    report = outcomes.against("uniform")
    assert report["half"]["of_baseline"] == pytest.approx(0.5)
    assert report["half"]["of_baseline_interval"] == pytest.approx([0.5, 0.5])
    low, high = report["uniform"]["mse_interval"]
    assert low < base.mean() < high and high - low == pytest.approx(4 * base.std() / 40**0.5, rel=0.15)
    assert report["half"]["flipped"] == 0 and report["half"]["flipped_interval"][1] == pytest.approx(0.088, abs=1e-3)
    assert wilson(40, 40)[0] == pytest.approx(0.912, abs=1e-3)
