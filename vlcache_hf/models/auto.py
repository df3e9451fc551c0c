"""Makes the Auto classes give our models to loads that ask for "vlcache", and to no others."""

from __future__ import annotations

import copyreg
from typing import Any

from transformers import AutoModel, AutoModelForImageTextToText, AutoModelForMultimodalLM

from ..attention import NAME
from .qwen2_5_vl import VLCacheQwen2_5_VLForConditionalGeneration
from .qwen3_vl import VLCacheQwen3VLForConditionalGeneration
from .qwen3_vl_moe import VLCacheQwen3VLMoeForConditionalGeneration

AUTO_CLASSES: tuple[Any, ...] = (AutoModel, AutoModelForImageTextToText, AutoModelForMultimodalLM)
MODEL_CLASSES: tuple[Any, ...] = (
    VLCacheQwen2_5_VLForConditionalGeneration,
    VLCacheQwen3VLForConditionalGeneration,
    VLCacheQwen3VLMoeForConditionalGeneration,
)


def asks_for_vlcache(config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a load wants our class. The Auto classes have moved `attn_implementation` into `config` by now.

    Args:
        config (`PreTrainedConfig`): the composite config.
        kwargs (`dict`): the arguments of the load.
    """
    asked = kwargs.get("attn_implementation")
    if asked is not None:
        return asked == NAME or (isinstance(asked, dict) and NAME in (asked.get(""), asked.get("text_config")))
    return NAME in (config._attn_implementation, config.text_config._attn_implementation)


class _Dispatch(type):
    """Metaclass of the registered stand-ins: each builds either the stock model or ours."""

    stock: Any
    ours: Any
    auto: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.stock(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.__dict__["stock"], name)

    def from_pretrained(cls, path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        return cls.chosen(config, kwargs).from_pretrained(path, *args, config=config, **kwargs)

    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return cls.chosen(config, kwargs)._from_config(config, **kwargs)

    def chosen(cls, config: Any, kwargs: dict[str, Any]) -> Any:
        if asks_for_vlcache(config, kwargs):
            return cls.ours
        if "vlcache_config" in kwargs:
            raise ValueError(
                '`vlcache_config` was given without `attn_implementation="vlcache"`: add it, or drop `vlcache_config`.'
            )
        return cls.stock


def _find(auto: str, index: int) -> Any:
    """Finds a stand-in again, for pickles of the Auto mappings."""
    auto_class = next(cls for cls in AUTO_CLASSES if cls.__name__ == auto)
    return auto_class._model_mapping[MODEL_CLASSES[index].config_class]


copyreg.pickle(_Dispatch, lambda cls: (_find, (cls.auto, MODEL_CLASSES.index(cls.ours))))


def register() -> None:
    """Registers a stand-in for every supported config with the Auto classes."""
    for auto_class in AUTO_CLASSES:
        for ours in MODEL_CLASSES:
            config_class = ours.config_class
            stock: Any = auto_class._model_mapping[config_class]
            if isinstance(stock, _Dispatch):
                continue
            # name and module of the stock class: pipelines compare the name, and a class from outside `transformers`
            # would win over the remote code of a checkpoint that brings its own
            body = {"stock": stock, "ours": ours, "auto": auto_class.__name__, "__module__": stock.__module__}
            auto_class.register(config_class, _Dispatch(stock.__name__, (), body), exist_ok=True)
