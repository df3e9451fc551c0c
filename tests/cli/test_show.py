from __future__ import annotations

import os
import time

import pytest
from click.testing import CliRunner

from vlcache_hf.cli import main


def test_info(filled):
    document = filled.json("info")
    assert document["cache_dir"] == str(filled.root)
    assert (document["exists"], document["entries"], document["unreadable_entries"]) == (True, 5, 0)
    files = [path.stat() for path in filled.root.rglob("*.safetensors")]
    assert document["bytes"] == sum(file.st_size for file in files)
    assert {name: (kind["entries"], kind["images"]) for name, kind in document["kinds"].items()} == {
        "kv": (3, 2),
        "vit": (2, 2),
        "src": (0, 0),
    }
    assert sum(kind["bytes"] for kind in document["kinds"].values()) == document["bytes"]
    assert document["max_disk_bytes"] == 64 * 2**30
    assert document["free_bytes"] > 0
    assert document["oldest_use"] < document["newest_use"]
    assert document["temporary"] == {"files": 0, "bytes": 0, "orphans": 0, "orphan_bytes": 0}
    models = {model["model"]: (model["entries"], model["kinds"]["kv"]["images"]) for model in document["models"]}
    assert models == {"org/big@aaaaaaaaaaaa": (3, 1), "small@bbbbbbbbbbbb": (1, 1), "unknown": (1, 0)}


def test_info_for_people(filled, monkeypatch):
    (filled.root / "tmp" / "1-dead.tmp").write_bytes(bytes(2048))
    os.utime(filled.root / "tmp" / "1-dead.tmp", (0, 0))
    next((filled.root / "vit").rglob("*.safetensors")).write_bytes(b"damaged")
    monkeypatch.setenv("VLCACHE_MAX_DISK_BYTES", str(2**30))
    text = filled.run("info").stdout
    assert str(filled.root) in text
    assert "of 1.0 GiB" in text
    assert "3 kv entries of 2 images" in text
    assert "1 file, 2.0 KiB; 1 left behind by killed writers: vlcache prune --orphans" in text
    assert "1 entry: vlcache verify" in text
    assert text.index("org/big@aaaaaaaaaaaa") < text.rindex("\n")


def test_ls(filled):
    document = filled.json("ls")
    rows = document["entries"]
    assert document["total"] == 5
    assert [(row["kind"], row["tokens"]) for row in rows] == [
        ("kv", 300),
        ("kv", 100),
        ("kv", 100),
        ("vit", 10),
        ("vit", 10),
    ]
    oldest_kv = rows[2]
    assert (oldest_kv["model"], oldest_kv["stored_by"], oldest_kv["grid"]) == (
        "org/big@aaaaaaaaaaaa",
        "vlcache_hf 9",
        "1x2x2",
    )
    assert (filled.root / oldest_kv["path"]).stat().st_size == oldest_kv["bytes"]
    assert filled.json("ls", "--sort", "size", "--limit", "1")["entries"][0]["tokens"] == 300
    assert filled.json("ls", "--limit", "0") == {"total": 5, "entries": [], "remote": None}


def test_ls_fits_a_terminal(filled):
    filled.put("kv", 2**200, 3, model="a-very-long-organisation/and-a-very-long-model-name-behind-it@cccccccccccc")
    lines = filled.run("ls", "--limit", "4").stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].split() == ["KIND", "GROUP/NAME", "TOKENS", "BYTES", "LAST", "USE", "MODEL"]
    assert "it@cccccccccccc" in lines[1]
    assert lines[-1] == "4 of 6 entries"


def test_nothing_from_a_file_reaches_the_terminal_as_a_command(cache):
    cache.put("kv", 1, 1, model="\x1b[2Jevil", tokens="\x1b[2J")
    cache.put("kv", 1, 2, tokens="9" * 5000)
    for command in ("ls", "info"):
        assert "\x1b" not in cache.run(command).stdout
    assert [row["tokens"] for row in cache.json("ls")["entries"]] == [100, 100]


@pytest.mark.parametrize("command", ["info", "ls", "verify"])
def test_looking_changes_nothing(filled, command):
    filled.put("kv", 3, 3).write_bytes(b"damaged")
    filled.store.close()
    before = filled.state()
    status = 1 if command == "verify" else 0
    filled.json(command, status=status)
    assert filled.state() == before
    for path in [filled.root, *filled.root.rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        filled.json(command, status=status)
    finally:
        for path in [filled.root, *filled.root.rglob("*")]:
            path.chmod(0o700 if path.is_dir() else 0o600)


def test_an_empty_cache_is_no_error(cache):
    assert cache.json("info")["entries"] == 0
    assert cache.json("info")["exists"] is False
    assert cache.json("ls") == {"total": 0, "entries": [], "remote": None}
    assert "does not exist yet" in cache.run("info").stdout
    assert cache.run("ls").stdout == "0 of 0 entries\n"
    assert not cache.root.exists()


def test_an_entry_that_goes_meanwhile(filled, monkeypatch):
    from vlcache_hf.cli import show

    def scan_then_evict(root, scan=show.scan):
        found = scan(root)
        next((filled.root / "kv").rglob("*.safetensors")).unlink()
        return found

    monkeypatch.setattr(show, "scan", scan_then_evict)
    assert filled.json("info")["unreadable_entries"] == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "--cache-dir is empty"),
        ("redis://user:secret@host", "Give a server as --remote, or set VLCACHE_REMOTE"),
        (__file__, "is not a directory. Give the cache directory with --cache-dir."),
        (__file__ + "/below", "is not a directory"),
    ],
)
def test_what_is_no_cache_directory(given, message):
    result = CliRunner().invoke(main, ["info", "--cache-dir", given])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "secret" not in result.stderr


def test_the_directory_of_the_environment(filled, monkeypatch):
    monkeypatch.setenv("VLCACHE_DIR", str(filled.root))
    assert CliRunner().invoke(main, ["ls"]).stdout.count("\n") == 6
    monkeypatch.setenv("VLCACHE_MAX_DISK_BYTES", "many")
    result = CliRunner().invoke(main, ["info"])
    assert result.exit_code == 2
    assert "VLCACHE_MAX_DISK_BYTES must be a whole number of bytes, got 'many'" in result.stderr


def test_many_entries_are_listed_in_time(cache):
    for number in range(200):
        cache.put("kv", number, number, rows=1)
    start = time.perf_counter()
    assert cache.json("ls")["total"] == 200
    assert time.perf_counter() - start < 5
