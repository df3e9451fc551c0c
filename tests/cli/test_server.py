"""The commands on a server that machines share."""

from __future__ import annotations

import json
import socket

import pytest
import torch
from click.testing import CliRunner

from servers import scripted
from vlcache_hf.cli import main
from vlcache_hf.store import RemoteStore
from vlcache_hf.store.remote_entry import sealed
from vlcache_hf.store.remote_keys import PREFIX, hash_key

pytest.importorskip("redis", reason="redis-py is not installed")

HOUR = 3600


def key(group, name):
    return f"{group:064x}", f"{name:064x}"


class Shared:
    """A server with entries of two models beside keys of others, and the command."""

    def __init__(self, server, cache, monkeypatch):
        self.server, self.cache = server, cache
        self.address = server.url
        monkeypatch.setenv("VLCACHE_REMOTE", server.url)
        self.put("kv", 1, 1, ttl_s=HOUR, model="org/big@aaaaaaaaaaaa", tokens="100", stored_by="vlcache_hf 9")
        self.put("kv", 1, 2, ttl_s=2 * HOUR, model="org/big@aaaaaaaaaaaa", tokens="100")
        self.put("vit", 11, 11, ttl_s=30 * HOUR + HOUR // 2, rows=300, model="small@bbbbbbbbbbbb")
        with server.client() as client:
            client.mset({"other": 1, "vlcache": 2, "vlcache:x": 3})

    def put(self, kind, group, name, ttl_s=HOUR, rows=100, **fields):
        store = RemoteStore(self.server.url, 30.0, ttl_s)
        tensors = {"k.0": torch.rand(rows, 1024), "v.0": torch.rand(rows, 1024)}
        assert store.put(kind, *key(group, name), tensors, {"grid": "1x2x2", **fields})
        store.close()

    def run(self, *arguments, status=0, **kwargs):
        return self.cache.run(*arguments, status=status, **kwargs)

    def json(self, *arguments, status=0):
        return self.cache.json(*arguments, status=status)["remote"]

    def keys(self):
        with self.server.client() as client:
            return sorted(client.keys("*"))


OTHERS = [b"other", b"vlcache", b"vlcache:x"]


@pytest.fixture
def shared(server, cache, monkeypatch):
    return Shared(server, cache, monkeypatch)


def test_info(shared):
    document = shared.json("info")
    assert (document["address"], document["problem"], document["unreadable_entries"]) == (shared.address, None, 0)
    assert (document["entries"], document["bytes"]) == (3, (2 * 100 + 300) * 8192)
    assert {name: (kind["entries"], kind["images"]) for name, kind in document["kinds"].items()} == {
        "kv": (2, 1),
        "vit": (1, 1),
        "src": (0, 0),
    }
    assert HOUR - 60 < document["next_expiry_s"] <= HOUR and 30 * HOUR < document["last_expiry_s"] < 31 * HOUR
    assert document["oldest_use"] <= document["newest_use"]
    assert [(row["model"], row["entries"], row["bytes"]) for row in document["models"]] == [
        ("small@bbbbbbbbbbbb", 1, 300 * 8192),
        ("org/big@aaaaaaaaaaaa", 2, 200 * 8192),
    ]
    shared.cache.put("kv", 5, 5)
    text = shared.run("info").stdout
    folder, server = text.split("\nserver ")
    assert "1 kv entry of 1 image" in folder and str(shared.cache.root) in folder
    assert server.startswith(f"     {shared.address}\n")
    assert "2 kv entries of 1 image (1.6 MiB), 1 vit entry of 1 image (2.3 MiB)" in server
    assert "(last), unless they are used before" in server and "org/big@aaaaaaaaaaaa" in server


def test_ls(shared):
    document = shared.json("ls")
    rows = document["entries"]
    assert document["total"] == 3 and document["address"] == shared.address
    assert [(row["kind"], row["tokens"], row["model"]) for row in rows] == [
        ("vit", 300, "small@bbbbbbbbbbbb"),
        ("kv", 100, "org/big@aaaaaaaaaaaa"),
        ("kv", 100, "org/big@aaaaaaaaaaaa"),
    ]
    first = rows[2]
    assert (first["group"], first["name"]) == key(1, 1) and first["key"] == hash_key("kv", *key(1, 1))
    assert (first["stored_by"], first["grid"], first["problem"]) == ("vlcache_hf 9", "1x2x2", None)
    assert HOUR - 60 < first["expires_in_s"] <= HOUR and first["last_use"] is not None
    shared.put("kv", 3, 3, rows=10)
    for sort, rows_of_it in (("used", 10), ("size", 300)):
        (row,) = shared.json("ls", "--sort", sort, "--limit", "1")["entries"]
        assert row["tokens"] == rows_of_it
    RemoteStore(shared.server.url, 30.0).discard("kv", *key(3, 3))
    with shared.server.client() as client:
        client.persist(first["key"])
    assert shared.json("ls")["entries"][2]["expires_in_s"] is None
    lines = shared.run("ls", "--limit", "2").stdout.splitlines()
    assert lines[:3] == ["0 of 0 entries", "", shared.address]
    assert lines[3].split() == ["KIND", "GROUP/NAME", "TOKENS", "BYTES", "LAST", "USE", "EXPIRES", "MODEL"]
    assert lines[4].endswith(" small@bbbbbbbbbbbb") and " 1d 6h " in lines[4]
    assert lines[-1] == "2 of 3 entries" and max(map(len, lines)) <= 100
    assert "never" in shared.run("ls").stdout


def test_looking_is_no_use_and_changes_nothing(shared):
    def state():
        with shared.server.client() as client:
            ours = [name for name in client.keys(PREFIX + "*")]
            for name in ours:
                client.expire(name, 500)
            return {name: client.dump(name) for name in ours if client.type(name) == b"zset"}, len(ours)

    before = state()
    for command in ("info", "ls", "verify"):
        shared.json(command)
    with shared.server.client() as client:
        assert all(client.ttl(name) <= 500 for name in client.keys(PREFIX + "*"))
    assert state() == before


def test_verify(shared):
    report = shared.json("verify")
    assert (report["checked"], report["good"], report["bad"], report["problem"]) == (3, 3, [], None)
    assert report["checked_bytes"] == 500 * 8192
    one, two, three = hash_key("kv", *key(1, 1)), hash_key("kv", *key(1, 2)), hash_key("vit", *key(11, 11))
    shared.put("kv", 7, 7, rows=1000)
    with shared.server.client() as client:
        client.hset(one, "meta", b"x" + client.hget(one, "meta")[1:])
        client.hset(two, "t:v.0", client.hget(two, "t:v.0")[:-1] + b"\xff")
        client.delete(three)
        client.set(three, "a string")
        client.config_resetstat()
    report = shared.json("verify", status=1)
    with shared.server.client() as client:  # KEYS would stop a server that others use
        assert "cmdstat_scan" in (stats := client.info("commandstats")) and "cmdstat_keys" not in stats
    assert {row["key"]: row["problem"] for row in report["bad"]} == {
        one: "its description is bad: its checksum does not fit",
        two: "tensor 'v.0': the checksum of block 0 does not fit",
        three: "its key holds something else",
    }
    assert (report["good"], report["deleted"]) == (1, 0) and len(shared.keys()) == 7 + len(OTHERS)
    text = shared.run("verify", status=1).stdout
    assert text.count("bad: vlcache:") == 3 and "1 good entry, 3 bad, 7.8 MiB" in text
    assert shared.json("info")["unreadable_entries"] == 2
    assert shared.json("verify", "--delete", status=1)["deleted"] == 3
    assert shared.json("verify", "--delete") == {**report, "bad": [], "checked": 1}
    assert [name for name in shared.keys() if name in OTHERS] == OTHERS


def test_verify_finds_a_description_that_contradicts_itself(shared):
    name = hash_key("kv", *key(1, 1))
    with shared.server.client() as client:
        meta = client.hget(name, "meta")
        client.hset(name, "meta", sealed(meta[16:].replace(b"100", b"101")))
    problems = [row["problem"] for row in shared.json("verify", status=1)["bad"]]
    assert problems == ["its description is bad: a size is wrong"]


def test_clear_leaves_the_server_alone_unless_told_otherwise(shared):
    shared.cache.put("kv", 1, 1)
    before = shared.keys()
    result = shared.run("clear", "--yes")
    assert result.stdout.startswith("removed 1 entry, 80")
    assert f"The server {shared.address} still serves its entries; --server removes them" in result.stderr
    assert shared.keys() == before
    shared.run("prune", "--max-bytes", "0")
    assert shared.keys() == before


def test_clear_asks_before_it_empties_the_server(shared):
    shared.cache.put("kv", 1, 1)
    before = shared.keys()
    result = shared.run("clear", "--server", input="n\n", status=1)
    assert "from the server " + shared.address + " and so for all machines?" in result.stderr
    assert "Remove 1 entry, " in result.stderr and " and 3 entries, 3.9 MiB, " in result.stderr
    assert shared.keys() == before and list(shared.cache.root.rglob("*.safetensors"))
    assert "--json never asks" in shared.run("clear", "--server", "--json", status=2).stderr
    result = shared.run("clear", "--server", input="y\n")
    assert f"removed 3 entries from {shared.address}" in result.stdout
    assert shared.keys() == OTHERS and not list(shared.cache.root.rglob("*.safetensors"))
    document = shared.json("clear", "--server", "--yes")
    assert document == {"address": shared.address, "removed_entries": 0, "problem": None}


def test_clear_one_kind(shared):
    assert shared.json("clear", "--server", "--kind", "vit", "--yes")["removed_entries"] == 1
    assert all(name.startswith((PREFIX + "kv:").encode()) for name in shared.keys() if name not in OTHERS)
    assert shared.json("info")["entries"] == 2


def test_clear_takes_what_is_unfinished_too(shared):
    with shared.server.client() as client:
        client.hset(PREFIX + "kv:{" + "a" * 64 + "}:new-1", "t:k", "x")
    assert shared.json("clear", "--server", "--yes")["removed_entries"] == 3
    assert shared.keys() == OTHERS


@pytest.fixture
def nobody():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, and listens to nobody
        yield f"redis://user:hush@127.0.0.1:{sock.getsockname()[1]}/0"


@pytest.mark.parametrize("command", ["info", "ls", "verify"])
def test_a_dead_server_does_not_hide_the_folder(filled, nobody, monkeypatch, command):
    monkeypatch.setenv("VLCACHE_REMOTE", nobody)
    alone = filled.run(command, "--remote", "")
    result = filled.run(command, status=1)
    assert result.stdout.startswith(alone.stdout)
    address = nobody.replace("user:hush@", "")
    assert f"Error: The server {address} did not answer as it should: ConnectionError" in result.stderr
    assert result.stderr.count("\n") == 1
    document = filled.json(command, status=1)
    assert document["remote"]["address"] == address and "ConnectionError" in document["remote"]["problem"]
    changing = {"remote": None, "free_bytes": 0}  # other processes use the disk too
    assert {**document, **changing} == {**filled.json(command, "--remote", ""), **changing}
    assert "hush" not in result.output + json.dumps(document)


def test_clear_with_a_dead_server(filled, nobody):
    result = filled.run("clear", "--server", "--remote", nobody, input="y\n", status=1)
    assert "all entries, from the server" in result.stderr and "did not answer as it should" in result.stderr
    assert "removed 5 entries" in result.stdout and "hush" not in result.output
    assert filled.json("clear", "--server", "--remote", nobody, "--yes", status=1)["remote"]["removed_entries"] == 0


@pytest.mark.parametrize(
    "reply",
    [b"-LOADING hush", b"-NOPERM no", b":1", b"$-1", b"*-1", b"*2\r\n:1\r\n:2", b"+OK", b"*1\r\n" * 9999, b"\xff"],
)
@pytest.mark.parametrize("command", [("info",), ("verify",), ("clear", "--server", "--yes")])
def test_a_server_that_talks_nonsense(cache, fake, command, reply):
    server = fake(scripted(lambda words: b"+OK\r\n" if words[0] == b"AUTH" else reply + b"\r\n"))
    url = server.url.replace("//", "//:hush@")
    problem = cache.json(*command, "--remote", url, status=1)["remote"]["problem"]
    assert "did not answer as it should" in problem and "hush" not in problem


def test_a_server_that_tells_stories_about_entries(cache, fake):
    name = hash_key("kv", *key(1, 1)).encode()
    scan = b"*2\r\n$1\r\n0\r\n*3\r\n$%d\r\n%s\r\n$5\r\nother\r\n$%d\r\n%s\r\n" % (len(name), name, len(name), name)
    seen = []

    def answer(words):
        seen.append(words)
        odd = {b"SCAN": scan, b"TTL": b":-9\r\n", b"ZSCORE": b"$5\r\n1e300\r\n", b"HGET": b"$2\r\n{}\r\n"}
        return odd.get(words[0], b":1\r\n")

    url = fake(scripted(answer)).url
    (row,) = cache.json("ls", "--remote", url)["remote"]["entries"]
    assert (row["expires_in_s"], row["last_use"], row["bytes"]) == (None, None, 0)
    assert row["problem"] == "its description is bad: its checksum does not fit"
    assert "unreadable: vlcache verify" in cache.run("ls", "--remote", url).stdout
    cache.json("verify", "--delete", "--remote", url, status=1)
    cache.json("clear", "--server", "--yes", "--remote", url)
    assert {word for words in seen if words[0] == b"UNLINK" for word in words[1:]} == {name}


def test_a_server_that_dies_meanwhile(shared, monkeypatch):
    from vlcache_hf.store.remote_admin import RemoteAdmin

    def look_then_kill(self, *entry, look=RemoteAdmin.look):
        if len(looked) == 2:
            self._link._settings["port"] = 1
            self.close()
        looked.append(entry)
        return look(self, *entry)

    looked = []
    monkeypatch.setattr(RemoteAdmin, "look", look_then_kill)
    document = shared.json("info", status=1)
    assert set(document) == {"address", "problem"}  # no part of the entries that could be taken for all


def test_an_entry_that_expires_meanwhile(shared, monkeypatch):
    from vlcache_hf.store.remote_admin import RemoteAdmin

    def gone_then_check(self, entry, progress, check=RemoteAdmin.check):
        with shared.server.client() as client:
            client.delete(entry.key)
        return check(self, entry, progress)

    monkeypatch.setattr(RemoteAdmin, "check", gone_then_check)
    report = shared.json("verify")
    assert (report["checked"], report["bad"]) == (0, [])


def test_which_server(shared, tmp_path, monkeypatch):
    def address(*arguments):
        result = CliRunner().invoke(main, ["ls", "--json", *arguments])
        assert result.exit_code == 0, result.output
        remote = json.loads(result.stdout)["remote"]
        return None if remote is None else remote["address"]

    folder = ("--cache-dir", str(tmp_path))
    assert address() == address(*folder) == shared.address
    assert address("--remote", "") is None and address(*folder, "--remote", "") is None
    monkeypatch.delenv("VLCACHE_REMOTE")
    assert address() is None and address("--remote", shared.address) == shared.address
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("VLCACHE_DIR", shared.address)
    assert address() == shared.address
    assert address("--remote", "") is None and address(*folder) is None


@pytest.mark.parametrize("url", ["http://u:hush@h", "redis://:hu/sh@h", "hush"])
def test_what_is_no_server(cache, url):
    result = cache.run("info", "--remote", url, status=2)
    assert "`remote` " in result.stderr and result.stdout == "" and "hush" not in result.stderr
    assert "no server is known" in cache.run("clear", "--server", "--yes", status=2).stderr
