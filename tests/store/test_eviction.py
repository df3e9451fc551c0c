"""Eviction with the index as a whole: what was used again is protected."""

import os
import time

import pytest

from vlcache_hf.store.index import Index
from vlcache_hf.store.paths import entry_key
from vlcache_hf.store.temporary import temporary_file

KEYS = [entry_key("kv", f"{number:064x}", "f" * 64) for number in range(20)]
DAY = 24 * 3600


class Clock:
    def __init__(self):
        self.now = 1_000_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


@pytest.fixture
def store(tmp_path, clock):
    return Small(tmp_path, clock)


class Small:
    """An index with a cap of 10 entries of 10 bytes, whose clock moves a second with each use."""

    def __init__(self, root, clock):
        self.root, self.clock = root, clock
        self.index = Index(root, 100, lambda exc: None)

    def put(self, number, size=10):
        self.clock.now += 1
        assert self.index.make_room(size)
        with temporary_file(self.root) as temporary:
            with temporary.open() as file:
                file.write(b"x" * size)
            os.utime(temporary.path, (self.clock.now, self.clock.now))
            assert self.index.publish(temporary.path, KEYS[number])

    def use(self, number):
        self.clock.now += 1
        os.utime(self.root / KEYS[number], (self.clock.now, self.clock.now))

    def present(self):
        return [number for number, key in enumerate(KEYS) if (self.root / key).exists()]


def test_what_was_never_used_again_goes_first_however_new(store):
    for number in range(10):
        store.put(number)
    for number in (0, 1, 2):
        store.use(number)
    for number in range(10, 20):
        store.put(number)
    assert store.present() == [0, 1, 2, *range(13, 20)]


def test_protected_ones_go_in_the_order_of_their_last_use(store):
    for number in range(10):
        store.put(number)
    for number in (3, 0, 1, 2, 4, 5, 6, 7, 8, 9):
        store.use(number)
    store.put(10)  # nothing is on probation
    assert store.present() == [0, 1, 2, *range(4, 11)]
    store.use(0)
    store.put(11)  # a tenth of the cap is: another protected one goes
    assert store.present() == [0, 2, *range(4, 12)]
    store.put(12)
    store.put(13)  # more than a tenth now
    assert store.present() == [0, 2, 4, 5, 6, 7, 8, 9, 12, 13]


def test_protection_lapses_a_day_after_the_last_use(store):
    for number in range(10):
        store.put(number)
        store.use(number)
    for number in range(10, 14):
        store.put(number)
    assert store.present() == [*range(2, 10), 12, 13]
    store.clock.now += DAY - 100
    store.use(9)
    store.clock.now += 200
    for number in range(14, 20):
        store.put(number)
    # those on probation are older than a day, too, but younger than what lapsed
    assert store.present() == [8, 9, 12, 13, *range(14, 20)]


def test_a_large_new_entry_gets_in_whatever_is_protected(store):
    for number in range(10):
        store.put(number)
        store.use(number)
    store.put(10, size=95)
    assert store.present() == [10]


def test_a_new_entry_of_an_old_key_is_on_probation(store):
    for number in range(10):
        store.put(number)
        store.use(number)
    for number in (10, 11):
        store.put(number)
    store.put(5)
    for number in (12, 13, 14):
        store.put(number)
    assert store.present() == [2, 3, 4, 6, 7, 8, 9, 12, 13, 14]


def test_a_rebuilt_index_has_no_protected_ones_until_they_are_used(store):
    for number in range(10):
        store.put(number)
        store.use(number)
    store.put(10)
    assert store.present() == list(range(1, 11))
    store.index.close()
    (store.root / "index" / "cache.db").write_bytes(b"garbage" * 1000)
    store.use(1)  # before it is rebuilt: it keeps its place in the order, and that is all
    store.put(11)
    assert store.present() == [1, *range(3, 12)]
    store.use(3)
    for number in range(12, 20):
        store.put(number)
    assert store.present() == [3, *range(11, 20)]


def test_a_time_that_a_wrong_clock_has_set_is_no_use(store):
    for number in range(10):
        store.put(number)
    os.utime(store.root / KEYS[0], (store.clock.now + 100 * DAY,) * 2)
    os.utime(store.root / KEYS[1], (store.clock.now + 100,) * 2)
    store.put(10)
    assert store.present() == list(range(1, 11))
    store.put(11)
    assert store.present() == [1, *range(3, 12)]


def test_marks_and_files_that_are_gone_do_not_stop_it(store):
    for number in range(10):
        store.index.mark(str(number))
        store.put(number)
    for number in range(9):
        os.unlink(store.root / KEYS[number])
    store.put(10, size=90)
    assert store.present() == [9, 10]
    assert store.index.nbytes() == 100
