"""Paths and environment of all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# `import tiny` from every folder of the tests, also in test files that run as scripts of a second process
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _private_cache_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may read or write the user's cache. What a test looks for on disk is there when the call returns."""
    monkeypatch.setenv("VLCACHE_DIR", str(tmp_path_factory.mktemp("vlcache")))
    monkeypatch.delenv("VLCACHE_REMOTE", raising=False)
    monkeypatch.setenv("VLCACHE_WRITE_BEHIND", "0")
    monkeypatch.setenv("VLCACHE_MAX_RAM_BYTES", "0")
    monkeypatch.setenv("VLCACHE_MIN_FREE_BYTES", "0")
