"""Paths and environment of all tests."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
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
    monkeypatch.setenv("VLCACHE_MIN_TOKENS", "1")  # of tiny models no image is large enough to pay


class _Deprecations(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        # assisted generation warns of the way it calls `generate` itself, and loading of torchvision's decoder
        own = ("Passing `generation_config` together with", "Image decoding with `torchvision` is deprecated")
        if "deprecat" in message.lower() and not message.startswith(own):
            self.messages.append(message)


@pytest.fixture(autouse=True)
def _no_deprecated_call() -> Iterator[None]:
    """Most of Transformers' renamings are announced through its logger, where `filterwarnings` sees nothing."""
    handler = _Deprecations()
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not handler.messages, handler.messages
