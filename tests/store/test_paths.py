import os
import re
import stat

import pytest

from vlcache_hf.store import paths

A, B = "a" * 64, "0123456789abcdef" * 4


@pytest.mark.parametrize("kind", ["kv", "vit"])
def test_keys_are_short_and_plain(kind):
    key = paths.entry_key(kind, A, B)
    assert len(key) < 150
    assert re.fullmatch(r"[0-9a-z._/-]+", key)
    assert paths.is_entry_key(key)


@pytest.mark.parametrize(
    "kind, group, name",
    [
        ("models", A, B),
        ("../kv", A, B),
        ("kv", A.upper(), B),
        ("kv", A[:-1], B),
        ("kv", A + "\n", B),
        ("kv", "../" + A[3:], B),
        ("kv", A, ""),
        ("kv", A, None),
    ],
)
def test_malformed_keys_are_errors(kind, group, name):
    with pytest.raises(ValueError, match="must be"):
        paths.entry_key(kind, group, name)


@pytest.mark.parametrize(
    "key",
    [
        f"kv/aa/{A}/../{B}.safetensors",
        f"../kv/aa/{A}/{B}.safetensors",
        f"/kv/aa/{A}/{B}.safetensors",
        f"kv/ab/{A}/{B}.safetensors",
        f"kv/aa/{A}/{B}.safetensors\n",
        f"kv/aa/{A}/{B}.pkl",
        f"kv/aa/{A}/{B}.safetensors".encode(),
        None,
        7,
    ],
)
def test_other_keys_are_not_entry_keys(key):
    assert not paths.is_entry_key(key)


def test_folders_are_private_whatever_the_umask(tmp_path):
    for umask in (0, 0o777):
        root = tmp_path / f"umask-{umask}"
        before = os.umask(umask)
        try:
            paths.private_dirs(root, "kv/aa")
        finally:
            os.umask(before)
        for folder in (root, root / "kv", root / "kv" / "aa"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_folders_of_others_are_left_alone(tmp_path):
    os.chmod(tmp_path, 0o755)
    paths.private_dirs(tmp_path, "kv")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_walk_finds_entries_only(tmp_path):
    key = paths.entry_key("kv", A, B)
    paths.private_dirs(tmp_path, os.path.dirname(key))
    for name in (key, f"kv/aa/{A}/{B}.tmp", "kv/readme.txt", "kv/aa/other"):
        (tmp_path / name).write_bytes(b"x")
    assert list(paths.walk_entries(tmp_path)) == [key]
    assert list(paths.walk_entries(tmp_path / "none")) == []


def test_remove_prunes_empty_folders_only(tmp_path):
    keys = [paths.entry_key("kv", A, name) for name in (A, B)]
    paths.private_dirs(tmp_path, os.path.dirname(keys[0]))
    for key in keys:
        (tmp_path / key).write_bytes(b"x")
    paths.remove_entry_file(tmp_path, keys[0])
    assert os.listdir(tmp_path / "kv" / "aa" / A) == [f"{B}.safetensors"]
    paths.remove_entry_file(tmp_path, keys[1])
    assert os.listdir(tmp_path) == ["kv"]
    assert os.listdir(tmp_path / "kv") == []


def test_stamps_never_repeat(monkeypatch):
    monkeypatch.setattr(paths.time, "time_ns", lambda: 5)
    first = paths.stamp()
    assert paths.stamp() == first + 1
