"""User settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .policies import RecomputePolicy, resolve_policy
from .precision import STORAGE_DTYPES
from .schedule import RecomputeSchedule

AUTO = "auto"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}
GIB = 1024**3
DEFAULT_MAX_DISK_BYTES = 64 * GIB
DEFAULT_MAX_RAM_BYTES = 2 * GIB
DEFAULT_MIN_FREE_BYTES = GIB
DEFAULT_REMOTE_TTL_S = 7 * 24 * 3600

REUSE_MODES = ("lossy", "exact")
GUARDS = ("off", "warn", "escalate")
DEFAULT_GUARD_THRESHOLD = 0.7
SEGMENT_BACKENDS = ("auto", "sdpa", "flash_attention_2", "varlen")
REMOTE_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
BASE_KERNELS = ("auto", "sdpa", "eager", "flash_attention_2")


def _default_cache_dir(local: bool = False) -> str:
    explicit = os.environ.get("VLCACHE_DIR")
    if explicit and not (local and _is_remote(explicit)):
        return explicit
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "huggingface"
    )
    return os.path.join(home, "vlcache")


def _env_int(name: str, default: int, of: str = " of bytes") -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"The environment variable {name} must be a whole number{of}, got {text!r}.") from None


def _env_min_tokens() -> int | str:
    name = "VLCACHE_MIN_TOKENS"
    return AUTO if os.environ.get(name, AUTO) == AUTO else _env_int(name, 1, ", or auto")


def _env_bool(name: str, default: str = "") -> bool:
    text = os.environ.get(name, default).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"The environment variable {name} must be 1 or 0, got {text!r}.")


def _is_remote(place: str | os.PathLike[str]) -> bool:
    return isinstance(place, str) and place.split("://")[0] in REMOTE_SCHEMES and "://" in place


def _check_remote(url: Any) -> None:
    # messages never quote the URL: it may hold a password
    if not isinstance(url, str) or not _is_remote(url):
        known = ", ".join(f"{scheme}://" for scheme in REMOTE_SCHEMES)
        raise ValueError(f"`remote` must be a URL that starts with one of {known}, or None for no server.")
    try:
        _ = urlsplit(url).port
    except ValueError:
        raise ValueError(
            "`remote` is a URL that cannot be parsed. Special characters in a password are written as %XX."
        ) from None


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_schedule(value: Any) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not 0.0 <= float(value) <= 1.0:
            raise ValueError(f"`schedule` as a ratio must lie in [0, 1] (10 % is 0.1), got {value}.")
    elif not isinstance(value, (str, os.PathLike, RecomputeSchedule)):
        raise ValueError(
            f'`schedule` must be "auto", a ratio in [0, 1], a RecomputeSchedule, a file or a Hub id, got {value!r}. '
            "For one ratio per layer: RecomputeSchedule([0.5, 0.1, ...])."
        )


@dataclass
class VLCacheConfig:
    """Settings of the cache of one model.

    Args:
        cache_dir (`str` or `os.PathLike`, *optional*):
            Where entries are kept. Defaults to `$VLCACHE_DIR`, else `$HF_HOME/vlcache`. The folder is created private
            (0700) at the first write. The URL of a server (see `remote`) means that server, and the default folder.
        max_disk_bytes (`int`, *optional*, defaults to `$VLCACHE_MAX_DISK_BYTES` or 64 GiB):
            Cap on the bytes of all entries in `cache_dir`. Entries never used again since they were stored go first,
            then the least recently used; a use protects for a day. `None` is no cap.
        schedule (`str`, `float`, `os.PathLike` or `RecomputeSchedule`, *optional*, defaults to `"auto"`):
            How many of the first tokens of a reused image each layer recomputes. A float is a uniform ratio. A string
            is the path of a `vlcache_schedule.json` or of a folder with one, the name of a shipped file
            (`"Qwen3-VL-8B-Instruct.b0.025"`), or a Hub id (`"org/name"`, `"org/name/another_file.json"`); it is read
            when the model is loaded. `"auto"` takes, at the first request with an image, the file in the model's own
            folder or repository, else the shipped one for the model, else a uniform 0.1, and logs which.
        reuse (`str`, *optional*, defaults to `$VLCACHE_REUSE` or `"lossy"`):
            `"lossy"` is the paper's method: an image met in another context is reused with partial recompute.
            `"exact"` serves lossless hits only and computes everything else in full.
        lossy_multi_image (`bool`, *optional*, defaults to `False`):
            Reuse images of other contexts also in prompts that show several. Their KV says which of them they are, so
            that a model may answer about the wrong one (benchmarks/accuracy: 98 % right answers become 9 % where two
            pictures change places). By default such prompts reuse lossless hits only; a new order is computed once in
            full, without the vision tower, and stored.
        contexts_per_image (`int`, *optional*, defaults to 4):
            How many entries, one per context, are kept for an image (least recently used go first).
        policy (`str` or `RecomputePolicy`, *optional*, defaults to `"prefix"`):
            Which tokens a reused image recomputes: the first (`"prefix"`, VLCache), or, for comparison, `"suffix"`,
            `"random"`, `"none"`, `"full"`, `"encoder_only"`, `"epic"`, `"mpic"`, `"cacheblend"`, `"kvshare"` (see
            `vlcache_hf.policies`).
        guard (`str`, *optional*, defaults to `$VLCACHE_GUARD` or `"off"`):
            What is done when the rows that a reused image recomputes in the first layers differ from the stored ones
            by more than `guard_threshold`: nothing, a warning (`"warn"`), or a new start with the image computed in
            full (`"escalate"`), which also stores it for this context. It does not see when images of one prompt are
            mixed up (`lossy_multi_image`).
        guard_threshold (`float`, *optional*, defaults to that of the schedule's file, or 0.7; a ratio brings none):
            Relative deviation `|computed - stored| / |computed|` of the first tokens' values, above which it acts.
            0.7 separates best on the two trained models of `examples/tiny_models` together; `vlcache audit` says what
            is right for a model of yours.
        namespace (`str`, *optional*, defaults to `$VLCACHE_NAMESPACE` or `""`):
            Part of every key. Entries are never shared between namespaces: one per tenant.
        read_only (`bool`, *optional*, defaults to `$VLCACHE_READ_ONLY`):
            Serve hits, write nothing.
        max_ram_bytes (`int`, *optional*, defaults to `$VLCACHE_MAX_RAM_BYTES` or 2 GiB):
            Bytes of recently used entries that stay in memory, pinned where there is CUDA. While as many, and at
            least 256 MiB, wait to be written, requests store nothing more. 0 keeps none.
        write_behind (`bool`, *optional*, defaults to `$VLCACHE_WRITE_BEHIND` or `True`):
            Write entries in a background thread, which is waited for at exit and by `model.vlcache.flush()`.
        min_free_bytes (`int`, *optional*, defaults to `$VLCACHE_MIN_FREE_BYTES` or 1 GiB):
            Nothing is stored when the disk would have less free space than this.
        min_tokens (`int` or `str`, *optional*, defaults to `$VLCACHE_MIN_TOKENS` or `"auto"`):
            Images of fewer tokens are neither looked up nor stored; a request without a larger one is left to the
            stock model. `"auto"`: where a hit would cost more than it saves, by the shape of the model and the kind of
            device, at most 128 (see `vlcache_hf.worthwhile`).
        second_sight_bytes (`int`, *optional*):
            Entries larger than this are stored when their image is met for the second time, so that large images that
            come once cost no writing. `None` stores everything at first sight.
        storage_dtype (`str`, *optional*, defaults to `"auto"`):
            Precision of the stored KV. `"auto"` stores it as computed. `"int8"` and `"fp8"` store 8 bits a value, with
            a scale for each token and head: about half the bytes of bfloat16, but every hit is lossy, also those of
            the same context. With `reuse="exact"` KV is stored as computed, whatever is set here.
        remote (`str`, *optional*, defaults to `$VLCACHE_REMOTE`):
            A Redis or Valkey server that machines share, behind the folder: `redis://`, `rediss://` (TLS),
            `valkey://`, `valkeys://` (TLS) or `unix://`, with user, password and number of the database. Needs
            `pip install 'vlcache-hf[remote]'`. An empty string or `None` is no server.
        remote_timeout_s (`float`, *optional*, defaults to 0.25):
            Seconds that a server which does not answer may cost; then it is left alone for up to 30 seconds.
        remote_ttl_s (`int`, *optional*, defaults to 7 days):
            Seconds after its last use at which an entry on the server expires.
        attention (`str`, *optional*, defaults to `"auto"`):
            Kernel of the prefill: `"flash_attention_2"`, `"varlen"` (torch's own) or `"sdpa"`; `"auto"` takes the
            first of them that is installed and fits the device and dtype.
        base_attn_implementation (`str`, *optional*, defaults to `"auto"`):
            Kernel of decoding and of the vision tower: `"flash_attention_2"`, `"sdpa"` or `"eager"`.

    Raises:
        `ValueError`: a value is out of its range; the message names it.
    """

    cache_dir: str | os.PathLike[str] = field(default_factory=_default_cache_dir)
    max_disk_bytes: int | None = field(
        default_factory=lambda: _env_int("VLCACHE_MAX_DISK_BYTES", DEFAULT_MAX_DISK_BYTES)
    )
    schedule: str | float | os.PathLike[str] | RecomputeSchedule = "auto"
    reuse: str = field(default_factory=lambda: os.environ.get("VLCACHE_REUSE", "lossy"))
    lossy_multi_image: bool = False
    contexts_per_image: int = 4
    policy: str | RecomputePolicy = "prefix"
    guard: str = field(default_factory=lambda: os.environ.get("VLCACHE_GUARD", "off"))
    guard_threshold: float | None = None
    namespace: str = field(default_factory=lambda: os.environ.get("VLCACHE_NAMESPACE", ""))
    read_only: bool = field(default_factory=lambda: _env_bool("VLCACHE_READ_ONLY"))
    max_ram_bytes: int = field(default_factory=lambda: _env_int("VLCACHE_MAX_RAM_BYTES", DEFAULT_MAX_RAM_BYTES))
    write_behind: bool = field(default_factory=lambda: _env_bool("VLCACHE_WRITE_BEHIND", "1"))
    min_free_bytes: int = field(default_factory=lambda: _env_int("VLCACHE_MIN_FREE_BYTES", DEFAULT_MIN_FREE_BYTES))
    min_tokens: int | str = field(default_factory=_env_min_tokens)
    second_sight_bytes: int | None = None
    storage_dtype: str = "auto"
    # not in the `repr`, which ends up in logs: it may hold a password
    remote: str | None = field(default_factory=lambda: os.environ.get("VLCACHE_REMOTE"), repr=False)
    remote_timeout_s: float = 0.25
    remote_ttl_s: int = DEFAULT_REMOTE_TTL_S
    attention: str = "auto"
    base_attn_implementation: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.cache_dir, (str, os.PathLike)):
            raise ValueError(f"`cache_dir` must be a path, got {self.cache_dir!r}; leave it out for the default.")
        if _is_remote(self.cache_dir):
            self.remote, self.cache_dir = str(self.cache_dir), _default_cache_dir(local=True)
        self.remote = self.remote or None
        if self.remote is not None:
            _check_remote(self.remote)
        self.cache_dir = str(Path(os.fspath(self.cache_dir)).expanduser())
        for name, value, allowed in (
            ("reuse", self.reuse, REUSE_MODES),
            ("guard", self.guard, GUARDS),
            ("storage_dtype", self.storage_dtype, STORAGE_DTYPES),
            ("attention", self.attention, SEGMENT_BACKENDS),
            ("base_attn_implementation", self.base_attn_implementation, BASE_KERNELS),
        ):
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
        if self.max_disk_bytes is not None and not _is_count(self.max_disk_bytes, 0):
            raise ValueError(f"`max_disk_bytes` must be whole bytes, or None for no cap, got {self.max_disk_bytes!r}.")
        for name in ("max_ram_bytes", "min_free_bytes"):
            if not _is_count(getattr(self, name), 0):
                raise ValueError(f"`{name}` must be whole bytes, got {getattr(self, name)!r}.")
        if not isinstance(self.remote_timeout_s, (int, float)) or not 0 < self.remote_timeout_s < float("inf"):
            raise ValueError(f"`remote_timeout_s` must be seconds above 0, got {self.remote_timeout_s!r}.")
        if not _is_count(self.remote_ttl_s, 1):
            raise ValueError(f"`remote_ttl_s` must be whole seconds from 1, got {self.remote_ttl_s!r}.")
        if not _is_count(self.contexts_per_image, 1):
            raise ValueError(f"`contexts_per_image` must be a whole number from 1, got {self.contexts_per_image!r}.")
        if self.min_tokens != AUTO and not _is_count(self.min_tokens, 1):
            raise ValueError(f'`min_tokens` must be a whole number from 1, or "auto", got {self.min_tokens!r}.')
        if self.second_sight_bytes is not None and not _is_count(self.second_sight_bytes, 0):
            raise ValueError(
                "`second_sight_bytes` must be whole bytes, or None to store everything at first sight, got "
                f"{self.second_sight_bytes!r}."
            )
        if not isinstance(self.lossy_multi_image, bool):
            raise ValueError(f"`lossy_multi_image` must be True or False, got {self.lossy_multi_image!r}.")
        if not isinstance(self.namespace, str):
            raise ValueError(f"`namespace` must be a string, got {self.namespace!r}.")
        limit = 0.0 if self.guard_threshold is None else self.guard_threshold
        if not isinstance(limit, (int, float)) or not 0.0 <= limit < float("inf"):
            raise ValueError(f"`guard_threshold` must be a deviation of at least 0, got {self.guard_threshold!r}.")
        resolve_policy(self.policy)
        _check_schedule(self.schedule)

    @classmethod
    def from_any(cls, value: VLCacheConfig | dict[str, Any] | None) -> VLCacheConfig:
        """The config meant by a `vlcache_config=` argument.

        Args:
            value (`VLCacheConfig`, `dict` or `None`): a config, its fields, or nothing for the defaults.

        Raises:
            `TypeError`: another type, or a field that does not exist.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, dict):
            unknown = sorted(set(value) - set(cls.__dataclass_fields__))
            if unknown:
                raise TypeError(
                    f"Unknown field(s) in `vlcache_config`: {unknown}. Known: {list(cls.__dataclass_fields__)}."
                )
            return cls(**value)
        raise TypeError(
            f"`vlcache_config` must be a VLCacheConfig or a dict of its fields, got {type(value).__name__}."
        )
