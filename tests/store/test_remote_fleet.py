"""The remote tier on servers that are full, demoted, locked or part of a cluster, or that are somebody else's."""

from __future__ import annotations

import logging

import pytest
import torch

from servers import forwarding, scripted
from vlcache_hf.store import RemoteStore, StoreReadError
from vlcache_hf.store.remote_entry import Description, pack
from vlcache_hf.store.remote_keys import PREFIX

pytest.importorskip("redis", reason="redis-py is not installed")

G, A, B = "a" * 64, "1" * 64, "2" * 64
PATIENT = 30.0  # no test waits for it


def put(store, name=A, value=1.0):
    return store.put("kv", G, name, {"k": torch.full((5, 2), value)}, {"x": "y"})


def value(store, name=A):
    entry = store.get("kv", G, name)
    return None if entry is None else float(entry.rows("k", 0, 5)[0, 0])


REFUSALS = {
    "closed": [
        b"-OOM command not allowed when used memory > 'maxmemory'.",
        b"-READONLY You can't write against a read only replica.",
        b"-MOVED 3999 10.0.0.1:6381",
        b"-ASK 3999 10.0.0.1:6381",
        b"-CLUSTERDOWN The cluster is down",
        b"-CROSSSLOT Keys in request don't hash to the same slot",
        b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        b"-NOPERM User default has no permissions to run the 'hget' command",
        b"-MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        b"-BUSY Valkey is busy running a script.",
        b"-NOREPLICAS Not enough good replicas to write.",
        b"-ERR unknown command 'HGET'",
        b"-",
    ],
    "open": [
        b"-LOADING Valkey is loading the dataset in memory",
        b"-NOAUTH Authentication required.",
        b"-WRONGPASS invalid username-password pair or user is disabled.",
        b"-ERR max number of clients reached",
    ],
}


@pytest.mark.parametrize(
    ("reply", "state"),
    [(reply, state) for state, replies in REFUSALS.items() for reply in replies],
    ids=lambda item: item.split()[0].decode() if isinstance(item, bytes) else item,
)
def test_what_a_server_refuses_is_a_miss_and_one_warning(fake, reply, state, caplog):
    seen = []

    def answer(words):
        seen.append(words[0])
        return reply + b"\r\n"

    store = RemoteStore(fake(scripted(answer)).url, PATIENT)
    for _ in range(3):
        assert value(store) is None
    assert caplog.text.count("going on without") == 1
    assert store.state == state and store.faults == (1 if state == "open" else 3)
    assert put(store) == 0 and store.names("kv", G) == [] and store.nbytes() == 0
    store.touch("kv", G, A), store.clear()
    assert b"UNLINK" not in seen or state == "closed"
    messages = [record.getMessage().split(" (")[0] for record in caplog.records]
    assert len(messages) == len(set(messages))  # each kind of trouble once


def test_a_server_that_stops_serving_between_two_reads_keeps_its_entry(fake):
    view, spec = pack(torch.ones(5, 2))
    meta = Description("kv", G, A, {}, {"k": spec}).encode()
    seen = []

    def answer(words):
        seen.append(words[0])
        if words[0] == b"HGET" and words[2] == b"meta":
            return b"$%d\r\n%s\r\n" % (len(meta), meta)
        return b"-LOADING again\r\n" if words[0] == b"HGET" else b":1\r\n"

    store = RemoteStore(fake(scripted(answer)).url, PATIENT)
    entry = store.get("kv", G, A)
    with pytest.raises(StoreReadError, match="LOADING again"):
        entry.rows("k", 0, 5)
    store.discard("kv", G, A)  # as who reads it does
    assert b"UNLINK" not in seen and store.state == "open" and store.faults == 1


def test_a_full_server_still_serves(start_server, caplog):
    server = start_server()
    store = RemoteStore(server.url, PATIENT)
    assert put(store) > 0
    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
    for _ in range(3):
        assert value(store) == 1.0
    assert caplog.text.count("going on without") == 1 and "OutOfMemoryError" in caplog.text
    assert put(store, B) == 0 and value(store, B) is None and store.state == "closed"
    with server.client() as client:
        client.config_set("maxmemory", 0)
    assert put(store, B) > 0 and value(store, B) == 1.0


def test_after_a_failover_the_new_primary_is_found(start_server, fake, caplog):
    old, new = start_server(), start_server()
    serving = [old]
    name = fake(forwarding(lambda: serving[0].port))  # as an address that moves
    store = RemoteStore(name.url, PATIENT)
    assert put(store) > 0 and value(store) == 1.0
    with old.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
    serving[0] = new
    # the first operation notices, on a connection that still leads to the old one
    assert store.get("kv", G, A) is not None and store.faults == 1
    assert value(store) is None
    assert put(store, B) > 0 and value(store, B) == 1.0 and store.faults == 1
    with new.client() as client:
        assert len(client.keys(PREFIX + "*")) == 2
    assert caplog.text.count("going on without") == 1


def test_a_replica_can_be_read(start_server, caplog):
    server = start_server()
    put(RemoteStore(server.url, PATIENT))
    with server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
    store = RemoteStore(server.url, PATIENT, read_only=True)
    assert value(store) == 1.0 and store.faults == 0
    store = RemoteStore(server.url, PATIENT)
    for _ in range(3):
        assert value(store) == 1.0 and put(store, B) == 0
    assert store.state == "closed"
    assert caplog.text.count("going on without") == 2  # not refreshed, not stored


def test_a_cluster_without_slots(start_server, caplog):
    store = RemoteStore(start_server("--cluster-enabled", "yes").url, PATIENT)
    for _ in range(3):
        assert value(store) is None
    assert put(store) == 0 and store.state == "closed"
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "The remote VLCache store could not read an entry",
        "The remote VLCache store could not store an entry",
    ]


def test_what_a_server_says_cannot_bring_out_a_password_or_forge_a_log(fake, caplog):
    caplog.set_level(logging.DEBUG)

    def answer(words):
        if words[0] == b"AUTH":
            return b"-ERR unknown command 'AUTH', with args: " + words[-1] + b" \x1b[2J\r2026 CRITICAL\r\n"
        return b"+OK\r\n"

    server = fake(scripted(answer))
    store = RemoteStore(server.url.replace("//", "//:s3cret@"), PATIENT)
    assert value(store) is None and store.faults == 1
    assert "with args: *** ?[2J?2026 CRITICAL" in caplog.text
    assert "s3cret" not in caplog.text and "\x1b" not in caplog.text

    def echo(words):
        return b"-LOADING s3cret\r\n" if words[0] == b"HGET" else b"+OK\r\n"

    store = RemoteStore(fake(scripted(echo)).url.replace("//", "//:s3cret@"), PATIENT)
    with pytest.raises(StoreReadError) as caught:
        store._fetch("key", "k", pack(torch.ones(1))[1])
    assert "LOADING ***" in str(caught.value) and "s3cret" not in caplog.text


def test_long_texts_of_a_server_are_cut(fake, caplog):
    store = RemoteStore(fake(scripted(lambda words: b"-ERR " + b"x" * 50_000 + b"\r\n")).url, PATIENT)
    assert value(store) is None
    assert max(len(record.getMessage()) for record in caplog.records) < 500
