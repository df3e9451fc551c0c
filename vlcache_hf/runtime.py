"""`model.vlcache`: settings, state and totals of the cache of one model."""

from __future__ import annotations

import contextvars
import logging
from typing import Any

import torch
import transformers
from transformers.cache_utils import Cache

from .cache import VLCache
from .config import VLCacheConfig
from .fingerprint import FingerprintError, WeightsFingerprint
from .keys import ModelKeys, model_keys
from .options import Options
from .records import RequestRecord, Stats, StatsCounter
from .schedule import RecomputeSchedule
from .schedule_lookup import ModelFacts, resolve_schedule
from .store import DiskStore, RamTier, RemoteStore, Store, Tiered, WriteBehind

logger = logging.getLogger(__name__)

MIN_QUEUE_BYTES = 256 << 20  # of entries waiting to be written: without RAM for entries, too, more than one may wait


class VLCacheRuntime:
    """What a model's cache holds beside the model; reached as `model.vlcache`.

    Copies and pickles of a model take the settings along and start with empty totals.

    Args:
        config (`VLCacheConfig`): the model's settings.
    """

    def __init__(self, config: VLCacheConfig) -> None:
        self.config = config
        self._fingerprint = WeightsFingerprint()
        self._counter = StatsCounter()
        self._stores: dict[tuple[Any, ...], Store] = {}
        self._schedules: dict[tuple[Any, ...], RecomputeSchedule] = {}
        self._warned: set[str] = set()
        # per thread and task: threads that share a model must not read each other's record
        self._last: contextvars.ContextVar[RequestRecord | None] = contextvars.ContextVar("vlcache", default=None)
        if config.remote:
            self._store(config)  # redis-py takes half a second to import: not in the first request

    def __reduce__(self) -> tuple[Any, ...]:
        return (VLCacheRuntime, (self.config,))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config}, {self.stats()})"

    @property
    def last_request(self) -> RequestRecord | None:
        """Record of the last request with images in this thread, `None` before the first."""
        return self._last.get()

    def stats(self) -> Stats:
        """Totals of all requests since the model was loaded."""
        stores = self._stores.values()
        return self._counter.snapshot(sum(store.faults for store in stores), sum(store.dropped for store in stores))

    def refresh(self) -> None:
        """Reads all weights anew at the next request. Call it after changing weights through `tensor.data`."""
        self._fingerprint.refresh()

    @property
    def store(self) -> Store:
        """The store of the model's own settings."""
        return self._store(self.config)

    def flush(self) -> None:
        """Waits until everything that is to be stored is written."""
        for store in self._stores.values():
            store.flush()

    def clear(self) -> None:
        """Deletes all entries in `config.cache_dir`, those of other models too, and with `config.remote` all entries
        on that server: every machine that shares it loses them. Keys of other programs stay."""
        self.store.clear()

    # --- used by the models

    def _store(self, config: VLCacheConfig) -> Store:
        key = (
            config.cache_dir,
            config.max_disk_bytes,
            config.read_only,
            config.min_free_bytes,
            config.max_ram_bytes,
            config.write_behind,
            config.remote,
            config.remote_timeout_s,
            config.remote_ttl_s,
        )
        if key not in self._stores:
            self._stores[key] = open_store(config)
        return self._stores[key]

    def options(self, cache: Cache | None, model_config: Any, num_layers: int) -> Options:
        """Settings of a request.

        Args:
            cache (`Cache`, *optional*): the request's cache; a `VLCache` brings settings of its own.
            model_config (`PreTrainedConfig`): config of the model.
            num_layers (`int`): number of its decoder layers.
        """
        config = cache.applied_to(self.config) if isinstance(cache, VLCache) else self.config
        wanted, lossy = config.schedule, config.reuse == "lossy"
        key = (wanted if isinstance(wanted, RecomputeSchedule) else str(wanted), num_layers, lossy)
        if key not in self._schedules:
            self._schedules[key] = resolve_schedule(wanted, ModelFacts.of(model_config, num_layers), lossy)
        return Options(config, self._store(config), self._schedules[key])

    def model_keys(self, core: Any, namespace: str) -> ModelKeys | None:
        """Digests of the model's present state, or `None` when its weights cannot be told from others.

        Args:
            core (`PreTrainedModel`): the base model, with `visual` and `language_model`.
            namespace (`str`): the request's namespace.
        """
        try:
            vision_weights = self._fingerprint.digest(core.visual, "visual")
            text_weights = self._fingerprint.digest(core.language_model, "language_model")
        except FingerprintError as error:
            self.warn_once(f"Nothing is cached for this model: {error}.")
            return None
        return model_keys(
            namespace=namespace,
            transformers_version=transformers.__version__,
            vision_config=core.config.vision_config,
            text_config=core.config.text_config,
            vision_weights=vision_weights,
            text_weights=text_weights,
            vision_dtype=compute_dtype(core.visual),
            text_dtype=compute_dtype(core.language_model),
        )

    def warn_once(self, message: str) -> None:
        """Logs a warning the first time it is raised for this model."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    def vision_called(self) -> None:
        self._counter.vision_call()

    def finish(self, record: RequestRecord) -> None:
        """Publishes the record of a request that is done."""
        self._counter.add(record)
        self.note(record)

    def note(self, record: RequestRecord) -> None:
        """Publishes the record of a request that the cache had no part in."""
        self._last.set(record)
        logger.debug("%s", record)


def open_store(config: VLCacheConfig) -> Store:
    """The tiers that a config asks for; touches no disk and no server.

    Args:
        config (`VLCacheConfig`): the settings.

    Raises:
        `ImportError`: it names a server, and redis-py is not installed.
        `ValueError`: the URL of the server is not understood.
    """
    store: Store = DiskStore(config.cache_dir, config.max_disk_bytes, config.read_only, config.min_free_bytes)
    behind = config.write_behind and not config.read_only
    queue_bytes = max(config.max_ram_bytes, MIN_QUEUE_BYTES)
    if config.remote:
        remote = RemoteStore(config.remote, config.remote_timeout_s, config.remote_ttl_s, config.read_only)
        store = Tiered(store, remote, queue_bytes if behind else None)
    if behind:
        store = WriteBehind(store, queue_bytes)
    return RamTier(store, config.max_ram_bytes) if config.max_ram_bytes else store


def compute_dtype(module: Any) -> str:
    """The dtype of a model's activations: that of its weights, or what autocast makes of it.

    Args:
        module (`PreTrainedModel`): the model.
    """
    devices = {"cpu", "cuda", module.device.type} - {"meta"}
    autocast = [
        f"{device}:{torch.get_autocast_dtype(device)}"
        for device in sorted(devices)
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    ]
    return " ".join([str(module.dtype), *autocast])
