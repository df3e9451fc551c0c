from __future__ import annotations

import os
import pickle
import time

import pytest

from vlcache_hf.cli import entries as entries_module


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def files(cache):
    return sorted(cache.root.rglob("*.safetensors"))


def test_verify_reports_and_deletes(filled):
    good = filled.json("verify")
    assert (good["good"], good["bad"], good["deleted"]) == (5, [], 0)
    assert good["checked_bytes"] == sum(path.stat().st_size for path in files(filled))
    last_byte = filled.put("kv", 7, 1, rows=1000)  # of 4 MiB a tensor: several blocks
    flip(last_byte, -1)
    header = filled.put("kv", 8, 1)
    flip(header, 20)
    stranger = filled.put("kv", 9, 1)
    stranger.write_bytes(files(filled)[0].read_bytes())
    short = filled.put("kv", 10, 1)
    os.truncate(short, 5000)
    report = filled.json("verify", status=1)
    assert (report["good"], report["deleted"], report["unreadable"]) == (5, 0, [])
    problems = {bad["path"]: bad["problem"] for bad in report["bad"]}
    assert set(problems) == {str(path.relative_to(filled.root)) for path in (last_byte, header, stranger, short)}
    assert problems[str(last_byte.relative_to(filled.root))] == "the checksum of block 3 of tensor 'v.0' does not fit"
    text = filled.run("verify", status=1).stdout
    assert text.count("bad: kv/") == 4
    assert "5 good entries, 4 bad" in text
    assert filled.json("verify", "--delete", status=1)["deleted"] == 4
    assert len(files(filled)) == 5
    assert filled.store.nbytes() == sum(path.stat().st_size for path in files(filled))
    assert filled.json("verify", "--delete")["good"] == 5


@pytest.mark.parametrize("at", [8, 100, 300])
def test_verify_a_damaged_header(cache, at):
    path = cache.put("kv", 1, 1)
    flip(path, at)
    report = cache.json("verify", status=1)
    assert len(report["bad"]) == 1


def test_verify_every_block(cache):
    path = cache.put("kv", 1, 1, rows=1000)
    size, start = path.stat().st_size, path.stat().st_size - 2 * 1000 * 1024 * 4
    for at in range(start, size, 2**20 - 1):
        flip(path, at)
        assert len(cache.json("verify", status=1)["bad"]) == 1
        flip(path, at)
    assert cache.json("verify")["good"] == 1


def test_verify_unpickles_nothing(cache, tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    cache.put("kv", 1, 1).write_bytes(pickle.dumps(Payload()))
    (cache.root / "index" / "cache.db").write_bytes(pickle.dumps(Payload()))
    for command in ("info", "ls"):
        cache.json(command)
    cache.json("verify", "--delete", status=1)
    assert not (tmp_path / "boom").exists()
    assert files(cache) == []


def test_verify_keeps_what_cannot_be_read_now(filled, monkeypatch):
    def broken_disk(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(entries_module, "open", broken_disk, raising=False)
    report = filled.json("verify", "--delete", status=1)
    assert (report["good"], report["bad"], len(report["unreadable"])) == (0, [], 5)
    assert "Input/output error" in report["unreadable"][0]["problem"]
    assert len(files(filled)) == 5


def test_verify_says_what_it_could_not_delete(filled, monkeypatch):
    monkeypatch.setattr(type(filled.store), "discard", lambda *key: None)
    flip(files(filled)[0], -1)
    result = filled.run("verify", "--delete", status=1)
    assert "1 entry could not be removed" in result.stderr
    assert "0 deleted" in result.stdout


def test_verify_of_nothing(cache):
    assert cache.json("verify", "--delete")["checked"] == 0
    assert not cache.root.exists()


def test_prune_by_age(filled):
    plan = filled.json("prune", "--older-than", "25d", "--dry-run")
    assert [row["path"].split("/")[0] for row in plan["removed"]] == ["vit", "vit", "kv"]
    assert {row["reason"] for row in plan["removed"]} == {"age"}
    assert len(files(filled)) == 5
    done = filled.json("prune", "--older-than", "25d")
    assert done == {**plan, "dry_run": False}
    assert len(files(filled)) == done["left_entries"] == 2
    assert filled.store.nbytes() == done["left_bytes"] == sum(path.stat().st_size for path in files(filled))
    assert filled.json("prune", "--older-than", "25d")["removed"] == []


def test_prune_by_size_takes_the_least_recently_used(filled):
    newest = max(files(filled), key=lambda path: path.stat().st_mtime)
    document = filled.json("prune", "--max-bytes", str(newest.stat().st_size))
    assert files(filled) == [newest]
    assert {row["reason"] for row in document["removed"]} == {"size"}
    assert "removed 1 entry and 0 orphans" in filled.run("prune", "--max-bytes", "0").stdout
    assert files(filled) == []


def test_prune_by_both(filled):
    document = filled.json("prune", "--older-than", "35d", "--max-bytes", "2.5MiB")
    assert [row["reason"] for row in document["removed"]] == ["age", "age", "size", "size"]
    assert document["left_bytes"] < 2.5 * 2**20


def test_prune_leaves_what_was_used_meanwhile(filled, monkeypatch):
    from vlcache_hf.cli import maintain

    used = min(files(filled), key=lambda path: path.stat().st_mtime)

    def scan_then_use(root, scan=maintain.scan):
        found = scan(root)
        os.utime(used)
        return found

    monkeypatch.setattr(maintain, "scan", scan_then_use)
    assert len(filled.json("prune", "--older-than", "25d")["removed"]) == 2
    assert used.exists()


def test_prune_orphans(filled):
    dead, alive, grave = (filled.root / "tmp" / name for name in ("1-a.tmp", "2-b.tmp", "3-c.index"))
    dead.write_bytes(bytes(1000))
    alive.write_bytes(bytes(500))
    grave.mkdir()
    (grave / "cache.db").write_bytes(bytes(24))
    for path in (dead, grave):
        os.utime(path, (time.time() - 7200,) * 2)
    plan = filled.json("prune", "--orphans", "--dry-run")
    assert sorted(row["bytes"] for row in plan["removed_orphans"]) == [24, 1000]
    assert dead.exists() and grave.exists()
    assert "removed 0 entries and 2 orphans, 1.0 KiB; 5 entries left" in filled.run("prune", "--orphans").stdout
    assert [path.name for path in (filled.root / "tmp").iterdir()] == ["2-b.tmp"]
    assert len(files(filled)) == 5


def test_prune_needs_a_rule(filled):
    result = filled.run("prune", status=2)
    assert "Give --max-bytes 10GiB, --older-than 30d or --orphans." in result.stderr
    assert "'10G' is no size" in filled.run("prune", "--max-bytes", "10G", status=2).stderr


def test_prune_and_clear_of_nothing(cache):
    assert cache.json("prune", "--max-bytes", "0", "--orphans")["removed"] == []
    assert cache.json("clear", "--yes")["removed_entries"] == 0
    assert not cache.root.exists()


def test_clear_asks(filled):
    result = filled.run("clear", input="n\n", status=1)
    assert "Remove 5 entries" in result.stderr
    assert "Remove" not in result.stdout
    filled.run("clear", status=1)  # nobody there to answer
    assert "--json never asks. Give --yes" in filled.run("clear", "--json", status=2).stderr
    assert len(files(filled)) == 5
    filled.store.mark("met")
    (filled.root / "notes.txt").write_text("mine")
    assert "removed 5 entries" in filled.run("clear", input="y\n").stdout
    assert files(filled) == []
    assert not filled.store.marked("met")
    assert filled.store.nbytes() == 0
    assert (filled.root / "notes.txt").read_text() == "mine"


def test_clear_one_kind(filled):
    assert filled.json("clear", "--kind", "vit", "--yes")["removed_entries"] == 2
    assert {path.relative_to(filled.root).parts[0] for path in files(filled)} == {"kv"}
    assert filled.store.nbytes() == sum(path.stat().st_size for path in files(filled))


def test_clear_without_an_index(filled):
    filled.store.close()
    for path in (filled.root / "index").iterdir():
        path.unlink()
    (filled.root / "index").rmdir()
    assert filled.json("clear", "--yes")["left_entries"] == 0
    assert files(filled) == []
