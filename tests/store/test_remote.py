from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from servers import answering
from vlcache_hf import VLCacheConfig
from vlcache_hf.runtime import MIN_QUEUE_BYTES, open_store
from vlcache_hf.store import RemoteStore, StoreReadError, Tiered
from vlcache_hf.store.entry import DTYPES, BadEntryError
from vlcache_hf.store.remote_entry import Description, decode_description, pack, sealed
from vlcache_hf.store.remote_keys import PREFIX, hash_key, names_key, parse_key
from vlcache_hf.store.wire import redacted

pytest.importorskip("redis", reason="redis-py is not installed")

G, A, B, C = "a" * 64, "1" * 64, "2" * 64, "3" * 64
PATIENT = 30.0  # no test waits for it: machines that run tests may be slow


def store_at(server, **kwargs):
    return RemoteStore(server.url, **{"timeout_s": PATIENT, **kwargs})


@pytest.fixture
def store(server):
    return store_at(server)


def put(store, name=A, value=1.0, **kwargs):
    return store.put("kv", G, name, {"k": torch.full((5, 2), value), "v": torch.ones(5, 3)}, {"x": "y"}, **kwargs)


def value(store, name=A):
    entry = store.get("kv", G, name)
    return None if entry is None else float(entry.rows("k", 0, 5)[0, 0])


def calls(server, command):
    with server.client() as client:
        return client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_round_trip(store, dtype):
    tensors = {
        "k": (torch.arange(42).reshape(6, 7) % 2).to(dtype),
        "strided": torch.arange(24).reshape(4, 6).t().to(dtype),
        "one": torch.ones(9, 9).to(dtype)[3:4, 4:5],
        "empty": torch.ones(0, 3).to(dtype),
        "big": torch.arange(600_000).remainder(100).reshape(6000, 100).to(dtype),
    }
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert store.put("vit", G, A, tensors, {"grid": "1 2 3", "ä": '"'}) == size
    entry = store.get("vit", G, A)
    assert entry.fields == {"grid": "1 2 3", "ä": '"'} and entry.keys() == sorted(tensors)
    assert entry.nbytes == store.nbytes() == size
    for name, tensor in tensors.items():
        assert entry.shape(name) == tuple(tensor.shape) and entry.dtype(name) == dtype
        assert torch.equal(entry.rows(name, 0, tensor.shape[0]), tensor)
    assert torch.equal(entry.rows("big", 17, 19), tensors["big"][17:19])
    assert entry.bytes_read == size - tensors["empty"].nbytes
    assert store.faults == 0


def test_only_what_is_asked_for_is_fetched_and_only_once(store, server):
    tensors = {f"layer{index}": torch.full((1000, 250), float(index)) for index in range(8)}
    store.put("kv", G, A, tensors, {})
    entry = store.get("kv", G, A)
    with server.client() as client:
        client.config_resetstat()
        assert entry.shape("layer5") == (1000, 250)
        assert calls(server, "hget") == 0
        assert not entry.ready("layer3", 10, 20)
        for _ in range(2):
            assert entry.rows("layer3", 10, 20).eq(3).all()
        assert entry.ready("layer3", 0, 1000) and not entry.ready("layer4", 0, 1)
        assert entry.bytes_read == tensors["layer3"].nbytes
        assert calls(server, "hget") == 1
        sent = client.info("stats")["total_net_output_bytes"]
    assert tensors["layer3"].nbytes <= sent < 2 * tensors["layer3"].nbytes


def test_misses_and_malformed_keys(store):
    assert store.get("kv", G, A) is None and store.names("kv", G) == [] and store.faults == 0
    for key in (("kv", G, "../x"), ("kw", G, A), ("kv", "A" * 64, A), ("kv", G, "new-1")):
        for operation in (store.get, store.discard, store.touch):
            with pytest.raises(ValueError):
                operation(*key)
        with pytest.raises(ValueError):
            store.put(*key, {}, {})
    entry = put(store) and store.get("kv", G, A)
    for rows in ((-1, 2), (0, 6), (3, 2)):
        with pytest.raises(StoreReadError, match="not in tensor"):
            entry.rows("k", *rows)
    with pytest.raises(StoreReadError, match="no tensor 'q'"):
        entry.rows("q", 0, 1)


def test_everything_expires_and_use_puts_it_off(server):
    store = store_at(server, ttl_s=1000)
    put(store)
    keys = (hash_key("kv", G, A), names_key("kv", G))
    with server.client() as client:
        assert sorted(map(bytes.decode, client.keys("*"))) == sorted(keys)
        assert all(990 < client.ttl(key) <= 1000 for key in keys)
        for use in (store.get, store_at(server, ttl_s=1000).touch):
            for key in keys:
                client.expire(key, 50)
            use("kv", G, A)
            assert all(990 < client.ttl(key) <= 1000 for key in keys)
        client.expire(keys[0], 50)
        store_at(server, read_only=True).get("kv", G, A)
        store.touch("kv", G, A)  # not long after the last use
        assert client.ttl(keys[0]) <= 50


def test_an_expired_entry_leaves_the_names_and_a_lost_list_comes_back(store, server):
    put(store, A)
    put(store, B)
    with server.client() as client:
        client.delete(hash_key("kv", G, A))
        assert store.names("kv", G) == [B, A] and store.get("kv", G, A) is None
        assert store.names("kv", G) == [B]
        client.delete(names_key("kv", G))
    assert store.names("kv", G) == [] and value(store, B) == 1.0 and store.names("kv", G) == [B]
    assert store.faults == 0


def test_two_stores_share_and_the_last_used_comes_first(server):
    one, two = store_at(server), store_at(server)
    for number, name in enumerate((A, B, C)):
        put(one, name, float(number))
    assert two.names("kv", G) == [C, B, A] and value(two, A) == 0.0
    assert one.names("kv", G) == [A, C, B]
    two.discard("kv", G, A)
    assert one.get("kv", G, A) is None and one.names("kv", G) == [C, B]
    assert two.names("vit", G) == [] and two.get("vit", G, B) is None
    for name in (A, B):
        put(two, name, max_in_group=2)
    assert one.names("kv", G) == [B, A] and one.get("kv", G, C) is None


def test_what_is_there_is_not_sent_again(server):
    put(store_at(server), A, 1.0)
    before = calls(server, "hset")
    assert put(store_at(server), A, 2.0) > 0
    assert calls(server, "hset") == before and value(store_at(server)) == 1.0
    assert store_at(server).put("kv", G, A, {"k": torch.zeros(9, 2)}, {}) > 0  # another shape: it is replaced
    assert store_at(server).get("kv", G, A).shape("k") == (9, 2)


def test_read_only_changes_nothing(store, server):
    put(store)
    other = store_at(server, read_only=True)
    assert value(other) == 1.0 and put(other, B) == 0 and not other.accepts(1)
    other.discard("kv", G, A)
    other.clear()
    assert value(store) == 1.0 and store.names("kv", G) == [A]


def test_non_finite_and_odd_tensors_are_not_stored(store, server):
    for bad in (float("nan"), float("inf"), -float("inf")):
        tensor = torch.zeros(700_000)
        tensor[-1] = bad
        assert store.put("kv", G, A, {"ok": torch.ones(3), "k": tensor}, {}) == 0
    assert store.faults == 0
    large = torch.full((2, 600_000), torch.finfo(torch.float32).max)  # finite, though no sum of it is in fp32
    assert store.put("kv", G, B, {"k": large}, {}) > 0
    for tensors, fields in (({"k": torch.ones(2, dtype=torch.complex64)}, {}), ({"k": torch.ones(2)}, {"x": 1})):
        assert store.put("kv", G, A, tensors, fields) == 0
    assert store.faults == 2
    with server.client() as client:
        assert len(client.keys("*")) == 2  # nothing half-written stays


def test_clear_spares_what_is_not_ours(store, server):
    put(store, A)
    put(store, B)
    with server.client() as client:
        client.set("mine", 1)
        store.clear()
        assert client.keys("*") == [b"mine"]
    assert store.nbytes() == 0 and store.get("kv", G, A) is None


def test_keys():
    assert parse_key(hash_key("kv", G, A).encode()) == ("kv", G, A)
    for key in (names_key("kv", G), PREFIX, f"{PREFIX}kv:{{x}}:y", f"{PREFIX}kv:{{{G}}}:new-{A}"):
        assert parse_key(key.encode()) is None


# --- bad values


def tampered(server, change):
    with server.client() as client:
        key = hash_key("kv", G, A)
        change(client, key)


def _meta(**changes):
    def edit(text):
        meta = json.loads(text)
        for name, item in changes.items():
            if name in meta or name == "more":
                meta[name] = item
            else:
                meta["tensors"]["k"][name] = item
        return json.dumps(meta, separators=(",", ":")).encode()

    return _text(edit)


def _text(edit):
    """A description that someone has edited, with the checksum that it then must have."""

    def change(client, key):
        client.hset(key, "meta", sealed(edit(client.hget(key, "meta")[16:])))

    return change


BAD_META = {
    "format": _meta(format="1"),
    "kind": _meta(kind="vit"),
    "name": _meta(name=B),
    "group": _meta(group=B),
    "fields": _meta(fields={"x": 1}),
    "no tensors": _meta(tensors=[]),
    "tensor": _meta(tensors={"k": None}),
    "dtype": _meta(dtype="F8"),
    "dtype list": _meta(dtype=["F32"]),
    "negative": _meta(shape=[-5, -2]),
    "huge": _meta(shape=[1 << 29, 1 << 29, 1 << 29]),
    "huge and empty": _meta(shape=[0] + [1 << 29] * 7, nbytes=0, sums=""),
    "bool": _meta(shape=[True, 10]),
    "float": _meta(shape=[5.0, 2]),
    "float that is equal": _meta(nbytes=40.0),
    "no shape": _meta(shape=None),
    "shape": _meta(shape={"5": 2}),
    "deep": _meta(shape=[1] * 100),
    "size": _meta(nbytes=39),
    "size type": _meta(nbytes="40"),
    "not a number": _meta(nbytes=float("nan")),
    "infinite": _meta(shape=[float("inf"), 2]),
    "sums": _meta(sums="0"),
    "sums type": _meta(sums=7),
    "more": _meta(more=1),
    "many": _meta(tensors={str(number): None for number in range(5000)}),
    "spaces": _text(lambda text: text.replace(b",", b", ")),
    "twice": _text(lambda text: text.replace(b'"tensors":{', b'"tensors":{"k":{},')),
    "field twice": _text(lambda text: text.replace(b'"fields":{', b'"fields":{"x":"z",')),
    "array": _text(lambda text: b"[]"),
    "null": _text(lambda text: b"null"),
    "NaN": _text(lambda text: b"NaN"),
    "empty": _text(lambda text: b""),
    "not json": _text(lambda text: b"\xff{"),
    "nested": _text(lambda text: b"[" * 100_000),
    "nested objects": _text(lambda text: b'{"a":' * 100_000),
    "number": _text(lambda text: b"1" * 100_000),
    "no checksum": lambda client, key: client.hset(key, "meta", client.hget(key, "meta")[16:]),
    "nothing": lambda client, key: client.hset(key, "meta", b""),
    "long": lambda client, key: client.hset(key, "meta", b" " * (5 << 20)),
    "pickle": lambda client, key: client.hset(key, "meta", pickle.dumps(Boom())),
}


class Boom:
    def __reduce__(self):
        return os._exit, (42,)


@pytest.mark.parametrize("change", BAD_META.values(), ids=list(BAD_META))
def test_a_bad_description_is_a_miss_and_goes(store, server, change, caplog):
    put(store)
    tampered(server, change)
    assert store.get("kv", G, A) is None and store.faults == 1
    assert caplog.text.count("going on without") == 1
    with server.client() as client:
        assert not client.exists(hash_key("kv", G, A))
    assert put(store) > 0
    tampered(server, change)
    assert put(store) > 0 and value(store) == 1.0 and store.state == "closed"


def test_every_byte_of_a_description_counts():
    meta = bytearray(Description("kv", G, A, {"x": "y"}, {"k": pack(torch.ones(5, 2))[1]}).encode())
    assert decode_description(bytes(meta), "kv", G, A).tensors["k"].shape == (5, 2)
    for at in range(len(meta)):
        for bit in (1, 32, 128):  # a neighbour, the other case, no ASCII
            meta[at] ^= bit
            with pytest.raises(BadEntryError, match="checksum does not fit"):
                decode_description(bytes(meta), "kv", G, A)
            meta[at] ^= bit
    for cut in range(len(meta)):
        with pytest.raises(BadEntryError):
            decode_description(bytes(meta[:cut]), "kv", G, A)


def test_a_flipped_byte_in_a_description_is_a_miss(store, server):
    put(store)
    key = hash_key("kv", G, A)
    with server.client() as client:
        meta = client.hget(key, "meta")
        flipped = meta.replace(b'"F32"', b'"I32"', 1)  # would be read without a complaint, as other values
        assert flipped != meta
        client.hset(key, "meta", flipped)
    assert value(store) is None and store.faults == 1


BAD_VALUES = {
    "missing": lambda client, key: client.hdel(key, "t:k"),
    "short": lambda client, key: client.hset(key, "t:k", b"\0" * 39),
    "long": lambda client, key: client.hset(key, "t:k", b"\0" * 41),
    "very long": lambda client, key: client.hset(key, "t:k", b"\0" * (5 << 20)),
    "flipped": lambda client, key: client.hset(key, "t:k", b"\1" + client.hget(key, "t:k")[1:]),
    "pickle": lambda client, key: client.hset(key, "t:k", pickle.dumps(Boom()).ljust(40, b".")),
    "gone": lambda client, key: client.delete(key),
    "string": lambda client, key: (client.delete(key), client.set(key, b"x")),
}


@pytest.mark.parametrize("change", BAD_VALUES.values(), ids=list(BAD_VALUES))
def test_a_bad_tensor_cannot_be_read(store, server, change, caplog):
    put(store)
    entry = store.get("kv", G, A)
    tampered(server, change)
    with pytest.raises(StoreReadError):
        entry.rows("k", 0, 1)
    assert store.faults == 1 and caplog.text.count("going on without") == 1
    store.discard("kv", G, A)
    assert put(store) > 0 and value(store) == 1.0


def test_a_planted_string_or_name_harms_nobody(store, server):
    with server.client() as client:
        client.set(hash_key("kv", G, A), b"x")
        client.zadd(names_key("kv", G), {b"\xff": 1, "../x": 2, B: 3})
    assert store.names("kv", G) == [B] and value(store, A) is None
    assert put(store, A) > 0 and value(store, A) == 1.0


# --- servers that are gone, hang, or lie


def test_a_killed_server_is_a_miss_and_a_restarted_one_is_used_again(start_server, caplog):
    server = start_server()
    now = [0.0]
    store = store_at(server, clock=lambda: now[0])
    put(store)
    entry = store.get("kv", G, A)
    assert entry.rows("v", 0, 5).eq(1).all()
    server.kill()
    with pytest.raises(StoreReadError):
        entry.rows("k", 0, 5)
    assert entry.rows("v", 0, 5).eq(1).all()  # has been fetched
    assert store.state == "open" and store.faults == 1
    assert value(store) is None and store.names("kv", G) == [] and put(store) == 0 and not store.accepts(1)
    store.touch("kv", G, B), store.discard("kv", G, A), store.clear(), store.flush(), store.close()
    assert store.nbytes() == 0 and store.faults == 1  # nothing was tried
    now[0] += 1
    assert value(store) is None and store.faults == 2
    server.start()
    assert value(store) is None and store.state == "open"
    now[0] += 2
    assert store.state == "half-open" and value(store) is None and store.state == "closed"
    assert put(store) > 0 and value(store) == 1.0
    assert caplog.text.count("going on without") <= 2


def test_connections_that_the_server_has_closed_do_not_count(store, server):
    put(store)
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    assert value(store) == 1.0 and store.faults == 0


def test_a_wrong_password_is_a_miss_and_is_not_logged(start_server, caplog):
    caplog.set_level(logging.DEBUG)
    server = start_server("--requirepass", "s3cret/wörd")
    base = server.url.removeprefix("redis://")
    right = RemoteStore(f"valkey://:s3cret%2Fw%C3%B6rd@{base}", PATIENT)
    assert put(right) > 0 and value(right) == 1.0
    for user in ("", ":wrong-pass@", "someone:wrong-pass@"):
        store = RemoteStore(f"redis://{user}{base}", PATIENT)
        assert value(store) is None and put(store) == 0 and store.faults == 1
        assert "wrong-pass" not in repr(store)
    assert "wrong-pass" not in caplog.text and "s3cret" not in caplog.text


def test_the_database_of_the_url(server):
    other = RemoteStore(server.url.removesuffix("/0") + "/3", PATIENT)
    put(other)
    assert value(other) == 1.0 and value(store_at(server)) is None


def test_a_full_or_read_only_server_is_a_fault_and_no_entry(start_server):
    server = start_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    store = store_at(server)
    assert store.put("kv", G, A, {"k": torch.ones(2_000_000)}, {}) == 0 and store.faults == 1
    assert put(store, B) == 0 or value(store, B) == 1.0
    assert store.state == "closed"


def test_unix_socket(start_server, tmp_path):
    path = tmp_path / "s"
    start_server("--unixsocket", str(path), "--unixsocketperm", "700")
    store = RemoteStore(f"unix://{path}?db=2", PATIENT)
    assert put(store) > 0 and value(store) == 1.0
    gone = RemoteStore(f"unix://{tmp_path}/none", PATIENT)
    assert value(gone) is None and gone.faults == 1


def silent(fake, connection):
    fake.done.wait()


def trickling(fake, connection):
    while not fake.done.wait(0.01):
        connection.sendall(b"$")


def flooding(fake, connection):
    connection.sendall(b"$100000000000\r\n")
    while True:
        connection.sendall(b"x" * 65536)


@pytest.mark.parametrize("behave", [silent, trickling, flooding])
def test_a_server_that_never_comes_to_an_end_costs_the_timeout_once(fake, behave):
    server = fake(behave)
    now = [0.0]  # stands still: what is not counted by it is counted by the sockets
    store = RemoteStore(server.url, 0.2, clock=time.monotonic if behave is not silent else lambda: now[0])
    start = time.monotonic()
    assert store.get("kv", G, A) is None
    assert store.faults >= 1
    if behave is not flooding:
        assert store.faults == 1 and store.state == "open"
        for _ in range(1000):
            assert store.get("kv", G, A) is None and store.names("kv", G) == []
        assert store.faults == 1 and len(server.connections) == 1
    assert time.monotonic() - start < 20  # 0.2, on a machine that has nothing else to do


@pytest.mark.parametrize(
    "reply",
    [
        b"hello\r\n",
        b":1\r\n",
        b"+OK\r\n",
        b"$-7\r\n",
        b"$x\r\n",
        b"*1\r\n" * 100_000,
        b"*-1\r\n",
        b"*1000000000\r\n",
        b"-ERR no\r\n",
        b"-LOADING no\r\n",
        b"-MOVED 1 1.2.3.4:5\r\n",
        b"$3\r\n{}}\r\n",
        b"\xff\xfe\r\n\r\n",
    ],
)
def test_answers_that_make_no_sense(fake, reply):
    server = fake(answering(reply * 8))
    store = RemoteStore(server.url, 0.5)
    for _ in range(3):
        assert store.get("kv", G, A) is None
        assert store.names("kv", G) == []
        assert put(store) == 0
    assert store.nbytes() == 0
    store.touch("kv", G, A), store.discard("kv", G, A), store.clear()
    assert store.faults >= 1


def test_many_slow_answers_cost_no_more_than_the_timeout(store, server):
    """Each answer comes in time, but all of them together do not: the time between them is counted."""
    tensors = {f"layer{index}": torch.ones(10, 10) for index in range(100)}
    store.put("kv", G, A, tensors, {})
    now = [0.0]
    slow = store_at(server, timeout_s=10.0, clock=lambda: now[0])
    entry = slow.get("kv", G, A)
    link = slow._links.get()
    talk = link._with

    def delayed(*args):
        now[0] += 1.0
        return talk(*args)

    link._with = delayed
    fetched = 0
    with pytest.raises(StoreReadError):
        for name in entry.keys():
            entry.rows(name, 0, 1)
            fetched += 1
    assert slow.state == "open" and 10 <= fetched <= 20 and now[0] <= 20


def test_a_value_that_trickles_or_stops_cannot_be_read(fake):
    """The timeout that a connection was opened with is not the one that counts."""
    trickles = []

    def behave(server, connection):
        while data := connection.recv(65536):
            if b"HGET" not in data:
                connection.sendall(b"+OK\r\n" * (data.count(b"\r\n*") + 1))
                continue
            connection.sendall(b"$4000000\r\n")
            while not server.done.wait(0.01):
                connection.sendall(b"x" * len(trickles))

    server = fake(behave)
    for _ in range(2):
        store = RemoteStore(server.url, 600.0)
        link = store._links.get()
        link.call([("PING",)])
        link._grace, link.breaker._patience = 0.0, 0.2
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            link.fetch(("HGET", "x", "y"), memoryview(bytearray(4_000_000)))
        assert store.state == "open" and time.monotonic() - start < 60
        trickles.append(1)


def test_resolving_a_name_cannot_block(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: release.wait(60) and [])
    start = time.monotonic()
    store = RemoteStore("redis://cache.example", 0.2)
    assert value(store) is None and store.faults == 1
    assert time.monotonic() - start < 30
    release.set()


# --- settings


def test_urls(tmp_path):
    from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection

    for url, base, expected in (
        ("redis://h", Connection, {"host": "h"}),
        ("valkey://h:1/2", Connection, {"host": "h", "port": 1, "db": 2}),
        ("rediss://u:p%40@h", SSLConnection, {"host": "h", "username": "u", "password": "p@"}),
        ("valkeys://h?ssl_cert_reqs=none", SSLConnection, {"host": "h", "ssl_cert_reqs": "none"}),
        ("unix://:p@/run/s?db=1", UnixDomainSocketConnection, {"path": "/run/s", "db": 1, "password": "p"}),
        ("redis://h?socket_timeout=99&decode_responses=1&protocol=3", Connection, {"host": "h", "protocol": 2}),
    ):
        link = RemoteStore(url)._links.get()
        assert issubclass(link._connection_class, base)
        assert expected.items() <= link._settings.items()
        assert "socket_timeout" not in link._settings and "decode_responses" not in link._settings
        link._connection_class(**link._settings)


def test_urls_that_are_refused_and_redacted():
    for url in ("http://u:hush@h", "redis:/h", "redis://:hu/sh@h", ""):
        with pytest.raises(ValueError) as caught:
            RemoteStore(url)
        assert "hu" not in str(caught.value).replace("http", "")
    for numbers in ({"timeout_s": 0}, {"ttl_s": 0}, {"timeout_s": float("nan")}):
        with pytest.raises(ValueError, match="above 0"):
            RemoteStore("redis://h", **numbers)
    assert redacted("rediss://u:p@h:1/2?ssl_password=x") == "rediss://h:1/2"
    assert redacted("redis://:p@[::1]:1/2") == "redis://[::1]:1/2"
    assert redacted("redis://:a/b@h:1") == "redis://..."


def test_tls_talks_tls(fake):
    hello = []

    def behave(server, connection):
        hello.append(connection.recv(3))
        connection.close()

    server = fake(behave)
    store = RemoteStore(server.url.replace("redis://", "rediss://"), PATIENT)
    assert value(store) is None and store.faults == 1
    assert hello[0][:2] == b"\x16\x03"


def test_copies_and_pickles_are_stores_at_the_same_server(store):
    put(store)
    for other in (copy.deepcopy(store), pickle.loads(pickle.dumps(RemoteStore(store._args[0], PATIENT)))):
        assert value(other) == 1.0


def test_a_forked_child_opens_connections_of_its_own(store, server):
    script = """
import os, sys, torch
from vlcache_hf.store import RemoteStore
store = RemoteStore(sys.argv[1], 30.0)
assert store.put("kv", "a" * 64, "1" * 64, {"k": torch.ones(5, 2)}, {})
child = os.fork()
for _ in range(50):
    entry = store.get("kv", "a" * 64, "1" * 64)
    assert entry.rows("k", 0, 5).eq(1).all()
os._exit(0) if child == 0 else None
print(os.waitpid(child, 0)[1])
"""
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, server.url], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.split() == ["0"], done.stderr


def test_threads_share_a_store(store):
    wrong = []

    def work(number):
        for turn in range(20):
            name = f"{(number + turn) % 4:064x}"
            entry = store.get("kv", G, name)
            if entry is None:
                put(store, name, float((number + turn) % 4))
            elif float(entry.rows("k", 0, 1)[0, 0]) != (number + turn) % 4:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and store.faults == 0


def test_config(tmp_path, monkeypatch):
    for name in ("VLCACHE_REMOTE", "VLCACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert VLCacheConfig().remote is None and VLCacheConfig(remote="").remote is None
    config = VLCacheConfig(cache_dir="redis://:hush@h/1")
    assert (config.remote, config.cache_dir) == ("redis://:hush@h/1", str(tmp_path / "vlcache"))
    assert "hush" not in repr(config)
    monkeypatch.setenv("VLCACHE_DIR", "valkeys://h")
    assert VLCacheConfig().remote == "valkeys://h" and VLCacheConfig().cache_dir == str(tmp_path / "vlcache")
    monkeypatch.setenv("VLCACHE_REMOTE", "unix:///run/s")
    monkeypatch.setenv("VLCACHE_DIR", str(tmp_path))
    assert VLCacheConfig().remote == "unix:///run/s" and VLCacheConfig().cache_dir == str(tmp_path)
    for url in ("http://u:hush@h", "redis://:hush/x@h", 3):
        with pytest.raises(ValueError, match="`remote`") as caught:
            VLCacheConfig(remote=url)
        assert "hush" not in str(caught.value)
    for bad in ({"remote_timeout_s": 0}, {"remote_timeout_s": "1"}, {"remote_ttl_s": 0}, {"remote_ttl_s": 1.5}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            VLCacheConfig(**bad)


def test_the_store_of_a_config(tmp_path):
    config = VLCacheConfig(cache_dir=tmp_path / "c", remote="redis://127.0.0.1:1", write_behind=True)
    store = open_store(config)
    assert isinstance(store.below, Tiered) and store.below.queue_bytes == max(config.max_ram_bytes, MIN_QUEUE_BYTES)
    assert store.below.remote.ttl_s == 7 * 24 * 3600
    assert open_store(VLCacheConfig(cache_dir=tmp_path, remote="redis://h", read_only=True)).remote.read_only
    assert not (tmp_path / "c").exists()


def test_without_redis_py_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name == "redis" or name.startswith("redis.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r"vlcache-hf\[remote\]"):
        RemoteStore("redis://h")


def test_redis_py_is_imported_when_a_model_with_a_server_is_made(tmp_path):
    code = f"""
import sys, vlcache_hf.runtime
from vlcache_hf import VLCacheConfig
vlcache_hf.runtime.VLCacheRuntime(VLCacheConfig(cache_dir={str(tmp_path / "c")!r})).store
assert "redis" not in sys.modules
vlcache_hf.runtime.VLCacheRuntime(VLCacheConfig(cache_dir={str(tmp_path / "c")!r}, remote="redis://127.0.0.1:1"))
assert "redis.connection" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert not (tmp_path / "c").exists()
