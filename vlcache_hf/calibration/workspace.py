"""The store of a calibration."""

from __future__ import annotations

import tempfile
from types import TracebackType
from typing import Any

from ..cache import VLCache
from ..store import DiskStore


class Workspace:
    """A store of its own for the auxiliary prompts, which is gone afterwards: nothing of a calibration meets the
    user's cache. It holds one image at a time."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vlcache-calibrate-")

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def clear(self) -> None:
        DiskStore(self._folder.name, None).clear()

    def cache(self, **settings: Any) -> VLCache:
        """A cache for one request on this store, whatever the model's own settings are."""
        settings.setdefault("schedule", 0.0)
        return VLCache(
            cache_dir=self._folder.name,
            namespace="calibration",
            max_disk_bytes=None,
            min_free_bytes=0,
            max_ram_bytes=0,
            write_behind=False,
            remote=None,
            reuse="lossy",
            guard="off",
            storage_dtype="auto",
            min_tokens=1,
            lossy_multi_image=True,
            second_sight_bytes=None,
            **settings,
        )
