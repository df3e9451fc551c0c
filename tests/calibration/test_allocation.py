"""Greedy and exact allocation, against each other and against every schedule there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlcache_hf.calibration.allocation import Allocation, greedy, grid, objective, optimal, rows_count, units


@st.composite
def instances(draw, max_layers=4, max_levels=5):
    layers, levels = draw(st.integers(1, max_layers)), draw(st.integers(1, max_levels))
    # whole numbers: sums are exact, so that equal means equal; no order is assumed, real curves have bumps
    values = draw(st.lists(st.integers(0, 20), min_size=layers * levels, max_size=layers * levels))
    return np.array(values, dtype=float).reshape(layers, levels), draw(st.integers(0, layers * levels))


def check(table, budget, found):
    assert len(found.levels) == len(table)
    assert list(found.levels) == sorted(found.levels, reverse=True)
    assert sum(found.levels) <= budget
    assert found.objective == objective(table, found.levels)


def brute_force(table, budget):
    layers, heights = table.shape
    return min(
        objective(table, levels)
        for levels in itertools.product(range(heights), repeat=layers)
        if sum(levels) <= budget and all(a >= b for a, b in itertools.pairwise(levels))
    )


@given(instances())
@settings(max_examples=300, deadline=None)
def test_the_dynamic_programme_is_exact_and_the_greedy_no_better(instance):
    table, budget = instance
    exact, approximate = optimal(table, budget), greedy(table, budget)
    check(table, budget, exact)
    check(table, budget, approximate)
    assert exact.objective == brute_force(table, budget)
    assert exact.objective <= approximate.objective <= objective(table, [0] * len(table))


@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_larger_instances(seed, layers, budget):
    rng = np.random.default_rng(seed)
    table = rng.random((layers, 1)) - np.sort(rng.random((layers, 31)), axis=1) * rng.random((layers, 1))
    exact, approximate = optimal(table, budget), greedy(table, budget)
    check(table, budget, exact)
    check(table, budget, approximate)
    assert exact.objective <= approximate.objective + 1e-12
    assert optimal(table, budget + 1).objective <= exact.objective


def test_a_case_by_hand():
    # layer 0 gains nothing, layer 1 much, layer 2 a little: layer 0 must come along
    table = np.array([[4.0, 4.0, 4.0], [4.0, 2.0, 1.5], [4.0, 3.0, 2.9]])
    assert optimal(table, 2) == Allocation((1, 1, 0), 10.0)
    assert optimal(table, 3) == Allocation((1, 1, 1), 9.0)
    assert optimal(table, 5) == Allocation((2, 2, 1), 8.5)
    assert greedy(table, 3) == Allocation((1, 1, 1), 9.0)
    assert optimal(table, 1) == greedy(table, 1) == Allocation((0, 0, 0), 12.0)
    assert optimal(table, 5).ratios(0.002) == (0.004, 0.004, 0.002)


def test_the_greedy_can_be_wrong():
    # the best first move for its price leaves no budget for the second
    table = np.array([[10.0, 7.0, 3.0, 3.0]])
    assert greedy(table, 2).objective == 3.0
    table = np.array([[9.0, 4.0, 4.0, 4.0], [9.0, 9.0, 1.0, 1.0]])
    assert greedy(table, 4).objective == 5.0 == optimal(table, 4).objective
    table = np.array([[9.0, 4.0, 4.0], [9.0, 8.0, 2.0], [9.0, 9.0, 9.0]])
    assert optimal(table, 3).objective < 22 and greedy(table, 3).objective >= optimal(table, 3).objective


def test_grid_and_budget():
    assert grid()[:3] == (0.0, 0.002, 0.004) and grid()[-1] == 0.3 and len(grid()) == 151
    assert [units(b, 36) for b in (0.0, 0.025, 0.035, 0.3)] == [0, 450, 630, 5400]
    for wrong in (-0.1, 1.1, "0.1", True):
        with pytest.raises(ValueError, match="mean ratio"):
            units(wrong, 36)


def test_the_size_of_a_real_model_takes_seconds():
    table = np.linspace(1, 0, 151)[None] ** np.linspace(1, 5, 36)[:, None]
    found = optimal(table, units(0.1, 36))
    check(table, 1800, found)
    assert sum(found.levels) == 1800


def test_cost_where_rows_without_a_next_layer_get_keys_and_values_only():
    assert rows_count((0.3, 0.2, 0.1)) == pytest.approx(0.1)
    assert rows_count((0.3, 0.0, 0.0)) == 0.0
