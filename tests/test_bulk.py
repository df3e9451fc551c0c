from __future__ import annotations

import os
import signal
import threading

import blake3
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlcache_hf import bulk
from vlcache_hf.bulk import bulk_digest

BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(bulk, "BLOCK_BYTES", BLOCK)


def threads(monkeypatch, count):
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)


def content(size):
    return bytes(number * 7 % 256 for number in range(size))


@pytest.mark.parametrize("count", [1, 2, 5, 100])
@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 7 * BLOCK, 20 * BLOCK + 3])
def test_the_digest_of_the_blocks_digests_whatever_the_threads(monkeypatch, size, count):
    threads(monkeypatch, count)
    data = content(size)
    blocks = [blake3.blake3(data[start : start + BLOCK]).digest() for start in range(0, size, BLOCK)]
    assert bulk_digest(memoryview(data)) == blake3.blake3(b"".join(blocks)).digest()


@given(size=st.integers(1, 5 * BLOCK), at=st.integers(0, 5 * BLOCK), bit=st.integers(0, 7), cut=st.integers(1, BLOCK))
@settings(max_examples=60, deadline=None)
def test_every_bit_and_the_length_count(size, at, bit, cut):
    data = bytearray(content(size))
    before = bulk_digest(memoryview(bytes(data)))
    assert bulk_digest(memoryview(bytes(data[: max(0, size - cut)]))) != before
    assert bulk_digest(memoryview(bytes(data) + bytes(cut))) != before
    data[at % size] ^= 1 << bit
    assert bulk_digest(memoryview(bytes(data))) != before


def test_the_order_of_blocks_counts():
    data = content(2 * BLOCK)
    assert bulk_digest(memoryview(data)) != bulk_digest(memoryview(data[BLOCK:] + data[:BLOCK]))


@pytest.mark.parametrize("started", [0, 1])
def test_without_threads_it_takes_longer(monkeypatch, started):
    threads(monkeypatch, 4)
    data = memoryview(content(9 * BLOCK))
    expected = bulk_digest(data)
    start, left = threading.Thread.start, [None] * started

    def limited(thread):
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert bulk_digest(data) == expected and not left


@pytest.mark.parametrize("failures", [1, 3])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_fails_in_a_thread_is_done_by_the_caller(monkeypatch, failures):
    threads(monkeypatch, 4)
    data = memoryview(content(12 * BLOCK))
    expected, right, left = bulk_digest(data), blake3.blake3, [None] * failures

    def failing(data):
        if left and threading.current_thread().name == "vlcache-hash":
            left.pop()
            raise MemoryError
        return right(data)

    monkeypatch.setattr(blake3, "blake3", failing)
    assert bulk_digest(data) == expected and not left


def test_what_fails_in_the_caller_too_is_an_error(monkeypatch):
    def failing(data):
        raise MemoryError

    monkeypatch.setattr(blake3, "blake3", failing)
    with pytest.raises(MemoryError):
        bulk_digest(memoryview(content(BLOCK)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_hashes_too(monkeypatch):
    threads(monkeypatch, 4)
    data = memoryview(content(9 * BLOCK))
    expected = bulk_digest(data)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if bulk_digest(data) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
