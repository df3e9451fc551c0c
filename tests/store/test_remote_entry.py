from __future__ import annotations

import threading

import pytest
import torch

from vlcache_hf.store import StoreReadError
from vlcache_hf.store.remote_entry import Description, RemoteEntry, TensorSpec

DIGEST = "a" * 64


def test_a_tensor_is_fetched_once_however_many_threads_ask():
    fetched, complete, ready = [], [], threading.Barrier(4)

    def fetch(name, spec):
        fetched.append(name)
        return torch.full(spec.shape, float(len(name)))

    specs = {name: TensorSpec(torch.float32, (5, 2), "") for name in ("k", "vv")}
    entry = RemoteEntry(Description("kv", DIGEST, DIGEST, {}, specs), fetch)
    entry.when_complete = complete.append

    def read():
        ready.wait(60)
        for _ in range(50):
            assert [float(entry.rows(name, 0, 5).sum()) for name in specs] == [10.0, 20.0]

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fetched) == ["k", "vv"] and [sorted(tensors) for tensors in complete] == [["k", "vv"]]
    assert entry.bytes_read == entry.nbytes == 80


def test_what_failed_is_fetched_again():
    answers = [StoreReadError("gone"), torch.ones(5, 2)]

    def fetch(name, spec):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    specs = {"k": TensorSpec(torch.float32, (5, 2), "")}
    entry = RemoteEntry(Description("kv", DIGEST, DIGEST, {}, specs), fetch)
    with pytest.raises(StoreReadError, match="gone"):
        entry.rows("k", 0, 5)
    assert float(entry.rows("k", 1, 3).sum()) == 4.0 and not answers
