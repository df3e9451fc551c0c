from __future__ import annotations

import pytest

from vlcache_hf.store.breaker import FIRST_BACKOFF_S, MAX_BACKOFF_S, Breaker, CircuitOpenError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return Breaker(0.25, clock)


def test_a_failure_opens_it_and_one_probe_closes_it(breaker, clock):
    assert breaker.state == "closed" and breaker.enter() == 0.25
    breaker.failed()
    assert breaker.state == "open"
    with pytest.raises(CircuitOpenError):
        breaker.enter()
    clock.now += FIRST_BACKOFF_S
    assert breaker.state == "half-open" and breaker.enter() == 0.25
    with pytest.raises(CircuitOpenError):
        breaker.enter()  # only one
    breaker.succeeded(0.0)
    assert breaker.state == "closed" and breaker.enter() == 0.25


def test_the_backoff_doubles_up_to_its_maximum_and_starts_over_after_a_good_time(breaker, clock):
    pauses = []
    for _ in range(8):
        breaker.enter()
        breaker.failed()
        start = clock.now
        while breaker.state == "open":
            clock.now += 0.5
        pauses.append(clock.now - start)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    breaker.enter()
    breaker.succeeded(0.0)
    breaker.enter()
    breaker.failed()  # soon again: still long
    clock.now += MAX_BACKOFF_S - 1
    assert breaker.state == "open"
    clock.now += 1
    breaker.enter()
    breaker.succeeded(0.0)
    clock.now += MAX_BACKOFF_S
    breaker.enter()
    breaker.failed()
    clock.now += FIRST_BACKOFF_S
    assert breaker.state == "half-open"


def test_many_slow_answers_cost_no_more_than_one_that_never_comes(breaker):
    waited = 0.0
    while breaker.state == "closed":
        allowed = min(0.1, breaker.enter())
        waited += allowed
        breaker.succeeded(allowed)
    assert waited == pytest.approx(0.25)


def test_patience_comes_back(breaker, clock):
    breaker.enter()
    breaker.succeeded(0.2)
    assert breaker.enter() == pytest.approx(0.05)
    breaker.succeeded(0.0)
    clock.now += 1
    assert breaker.enter() == pytest.approx(0.15)
    breaker.succeeded(0.0)
    clock.now += 100
    assert breaker.enter() == 0.25


def test_operations_that_were_under_way_do_not_lengthen_the_backoff(breaker, clock):
    for _ in range(5):
        breaker.enter()
    for _ in range(4):
        breaker.failed()
    breaker.succeeded(0.0)
    assert breaker.state == "open"
    clock.now += FIRST_BACKOFF_S
    assert breaker.state == "half-open"
