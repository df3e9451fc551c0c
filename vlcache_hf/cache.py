"""The caches: `VLCache`, which users pass to choose settings per call, and the one that a packed prefill fills."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .config import VLCacheConfig
from .rope import rotate_into
from .state import PrefillState

TAINT = "vlcache_tainted"
REQUEST = "vlcache_request"


class VLCache(DynamicCache):
    """A `DynamicCache` that carries settings for one call: `model.generate(**inputs, cache=VLCache(schedule=0.3))`.

    Args:
        config (`PreTrainedConfig`, *optional*): the model's config, as for `DynamicCache`.
        **settings: fields of `VLCacheConfig` that differ from the model's for this call, e.g. `cache_dir`, `schedule`,
            `policy`, `reuse`, `namespace`, `read_only`.

    Raises:
        `TypeError`: a setting does not exist.
    """

    def __init__(self, config: PreTrainedConfig | None = None, **settings: Any) -> None:
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise TypeError(f"`VLCache` takes settings by name, as VLCache(schedule=0.3), got {config!r}.")
        known = {f.name for f in fields(VLCacheConfig)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise TypeError(f"Unknown VLCache setting(s) {unknown}. Known: {sorted(known)}.")
        VLCacheConfig(**settings)  # a value out of range is an error here, not in the middle of `generate()`
        super().__init__(config=config)
        self.settings = settings

    def applied_to(self, config: VLCacheConfig) -> VLCacheConfig:
        """`config` with the settings of this call."""
        return replace(config, **self.settings)


def is_tainted(cache: Cache | None) -> bool:
    """Whether a cache holds rows that a lossy reuse has touched."""
    return bool(getattr(cache, TAINT, False))


class PrefillCache(Cache):
    """What the decoder layers see as their cache during a packed prefill.

    `update` receives the keys of the active tokens *before* RoPE, keeps those of missed images for the store, merges
    them rotated with the stored rows into full-length keys and values, and hands these to the caller's cache.

    Args:
        state (`PrefillState`): the plan and its tensors.
        target (`Cache`, *optional*): the caller's cache, empty; `None` with `use_cache=False`.
    """

    def __init__(self, state: PrefillState, target: Cache | None) -> None:
        super().__init__(layers=[])
        self.state = state
        self.target = target

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merges the keys and values of one layer.

        Args:
            key_states (`torch.Tensor` of shape `(1, kv_heads, active, head_dim)`): keys before RoPE.
            value_states (`torch.Tensor` of shape `(1, kv_heads, active, head_dim)`): values.
            layer_idx (`int`): the layer.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: pools of keys and values, `(B, P, kv_heads, head_dim)`, where the
            visible tokens of row `b` stand at `[b, 0:n_b]`.

        Raises:
            `StoreReadError`: stored rows cannot be read or do not fit.
        """
        state, plan = self.state, self.state.plan[layer_idx]
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        keys, values = state.with_aside(layer_idx, keys, values)
        cos, sin = state.key_rope(keys.device)
        pool_shape = (*state.pool_shape, *keys.shape[1:])
        key_pool, value_pool = keys.new_empty(pool_shape), values.new_empty(pool_shape)

        offset = 0
        for row, a, b in plan.runs:
            end = offset + b - a
            rotate_into(key_pool[row, a:b], keys[offset:end], cos[offset:end], sin[offset:end])
            value_pool[row, a:b] = values[offset:end]
            offset = end
        for offset, index, a, b in plan.visual:
            use, computed = state.uses[index], (keys[offset : offset + b - a], values[offset : offset + b - a])
            use.capture_rows(layer_idx, *computed)
            if use.kind == "reused" and state.watch.compares_kv(layer_idx):
                state.watch.add_kv(
                    layer_idx, index, a, computed, use.stored_rows(layer_idx, a, b, *computed, state.ahead)
                )
        for index, a, b in plan.stored:
            state.put_stored(state.uses[index], layer_idx, a, b, key_pool, value_pool)
        self._hand_over(key_pool, value_pool, layer_idx)
        return key_pool, value_pool

    def _hand_over(self, key_pool: torch.Tensor, value_pool: torch.Tensor, layer_idx: int) -> None:
        target = self.target
        if target is None:
            return
        keys, values = (self.state.to_columns(pool).transpose(1, 2) for pool in (key_pool, value_pool))
        if target.layer_class_to_replicate is not None:
            while len(target.layers) <= layer_idx:
                target.layers.append(target.layer_class_to_replicate())
        layer = target.layers[layer_idx]
        if type(layer) is DynamicLayer and not target.offloading:
            # its own update would copy everything once more, to concatenate it with nothing
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        else:
            target.update(keys, values, layer_idx)
