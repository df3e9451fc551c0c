"""A store with entries of known age, and the command run on it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from servers import _shared_server, fake, server, start_server
from vlcache_hf.cli import main
from vlcache_hf.store import DiskStore
from vlcache_hf.store.paths import entry_key

__all__ = ["_shared_server", "fake", "server", "start_server"]

DAY = 86400.0


class Cache:
    """A cache directory and the command that looks after it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = DiskStore(root, None)

    def put(self, kind: str, group: int, name: int, days: float = 0, rows: int = 100, **fields: str) -> Path:
        """Stores an entry that was last used some days ago."""
        key = (kind, f"{group:064x}", f"{name:064x}")
        tensors = {"k.0": torch.rand(rows, 1024), "v.0": torch.rand(rows, 1024)}
        assert self.store.put(*key, tensors, {"grid": "1x2x2", **fields})
        path = self.root / entry_key(*key)
        os.utime(path, (time.time() - days * DAY,) * 2)
        return path

    def run(self, *arguments: str, status: int = 0, **kwargs: Any) -> Result:
        result = CliRunner().invoke(main, [*arguments, "--cache-dir", str(self.root)], **kwargs)
        assert result.exit_code == status, (result.output, result.exception)
        return result

    def json(self, *arguments: str, status: int = 0) -> Any:
        """What the command says with `--json`; anything else on stdout does not parse."""
        return json.loads(self.run(*arguments, "--json", status=status).stdout)

    def state(self) -> dict[str, tuple[int, int]]:
        """Size and time of everything in the directory."""
        return {
            str(path.relative_to(self.root)): (path.lstat().st_size, path.lstat().st_mtime_ns)
            for path in self.root.rglob("*")
        }


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def filled(cache: Cache) -> Cache:
    """Two contexts of image 1 and one of image 2, features of both, two models; the oldest first."""
    cache.put("vit", 11, 11, days=50, rows=10, model="org/big@aaaaaaaaaaaa", tokens="10")
    cache.put("vit", 12, 12, days=40, rows=10)
    cache.put("kv", 1, 1, days=30, model="org/big@aaaaaaaaaaaa", tokens="100", stored_by="vlcache_hf 9")
    cache.put("kv", 1, 2, days=20, model="org/big@aaaaaaaaaaaa", tokens="100")
    cache.put("kv", 2, 1, days=10, rows=300, model="small@bbbbbbbbbbbb", tokens="300")
    return cache
