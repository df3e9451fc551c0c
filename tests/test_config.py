from __future__ import annotations

import os

import pytest

from vlcache_hf import VLCacheConfig


def test_defaults_come_from_the_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("VLCACHE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert VLCacheConfig().cache_dir == str(tmp_path / "vlcache")
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("VLCACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("VLCACHE_MAX_DISK_BYTES", "1000")
    monkeypatch.setenv("VLCACHE_NAMESPACE", "tenant")
    monkeypatch.setenv("VLCACHE_READ_ONLY", "1")
    monkeypatch.setenv("VLCACHE_REUSE", "exact")
    config = VLCacheConfig()
    assert config.cache_dir == str(tmp_path / "elsewhere")
    assert (config.max_disk_bytes, config.namespace, config.read_only, config.reuse) == (1000, "tenant", True, "exact")


def test_no_home(monkeypatch):
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "VLCACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert VLCacheConfig().cache_dir.endswith("vlcache")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"reuse": "some"}, "`reuse` must be one of 'lossy', 'exact', got 'some'"),
        ({"policy": "best"}, "`policy`.*'best'"),
        ({"attention": "magic"}, "`attention`.*'magic'"),
        ({"base_attn_implementation": "vlcache"}, "`base_attn_implementation`.*'vlcache'"),
        ({"max_disk_bytes": -1}, "got -1"),
        ({"contexts_per_image": 0}, "got 0"),
        ({"schedule": 1.5}, "got 1.5"),
    ],
)
def test_bad_values_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        VLCacheConfig(**fields)


@pytest.mark.parametrize("name, value", [("VLCACHE_MAX_DISK_BYTES", "1G"), ("VLCACHE_READ_ONLY", "perhaps")])
def test_bad_environment_values_are_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        VLCacheConfig()


def test_from_any():
    config = VLCacheConfig(schedule=0.5)
    assert VLCacheConfig.from_any(config) is config
    assert VLCacheConfig.from_any({"schedule": 0.2}).schedule == 0.2
    assert VLCacheConfig.from_any(None) == VLCacheConfig()
    with pytest.raises(TypeError, match="Unknown field.*colour"):
        VLCacheConfig.from_any({"colour": 1})
    with pytest.raises(TypeError, match="got int"):
        VLCacheConfig.from_any(3)
