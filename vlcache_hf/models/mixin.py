"""What the model classes share: the seams of `generate()` and `forward()` that carry images through."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.utils.generic import ModelOutput

from ..attention import NAME
from ..config import VLCacheConfig
from ..encoder import EncodedImages
from ..prefill import PrefillRequest, run
from ..prompt import NotServable
from ..records import RequestRecord
from ..runtime import VLCacheRuntime
from ..schedule_hub import loaded_commit
from . import kernels
from .projection import kv_projection
from .serving import encode, plan_request, wants_full_outputs

REQUEST = "vlcache_request"

# What these classes are mixed into: for a type checker a class of any attributes.
_MixedInto: Any = object


def signature_of(stock: Any) -> Callable[[Callable[..., Any]], Any]:
    """Gives an override the signature of the stock method, which `generate()` inspects."""
    return functools.wraps(stock)


class _StockIdentity(_MixedInto):
    """Transformers knows classes by name: the architecture that `save_pretrained` writes, the models that a pipeline
    takes, the renamings of checkpoint keys. Ours have the modules and parameters of the stock class, so they take its
    name (`__qualname__` keeps their own) and are no custom code."""

    vlcache_stock_class: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "vlcache_stock_class" in cls.__dict__:
            cls.__name__ = cls.vlcache_stock_class.__name__

    @classmethod
    def is_custom_code(cls) -> bool:
        return False


class VLCacheCoreMixin(_StockIdentity):
    """Mixed into the base model (`model.model`), whose forward is where a prefill is replaced."""

    def vlcache_core_forward(self, stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request: PrefillRequest | None = kwargs.pop(REQUEST, None)
        if request is None:
            return stock(self, *args, **kwargs)
        text_model, cache = self.language_model, kwargs.get("cache")
        use_cache = kwargs.get("use_cache")
        if cache is None and (text_model.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=text_model.config)
        hidden = run(text_model, request, cache, kv_projection(text_model))
        # without `image_outputs`: the stock caller makes a tuple of all fields, which would bring every feature
        return self.vlcache_output_class(last_hidden_state=hidden, cache=cache)


class VLCacheGenerationMixin(_StockIdentity):
    """Mixed into the `...ForConditionalGeneration` classes."""

    vlcache_core_class: type
    vlcache_arguments: tuple[str, ...]
    vlcache: VLCacheRuntime

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.vlcache_arguments = tuple(inspect.signature(cls.vlcache_stock_class.forward).parameters)[1:]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        kernels.normalise(config)
        super().__init__(config, *args, **kwargs)
        self.vlcache_install(VLCacheConfig())

    def vlcache_install(self, config: VLCacheConfig) -> None:
        """Gives the model its cache; also what `attach` and `from_pretrained` end with."""
        core = self.model
        core.__class__ = self.vlcache_core_class
        self.__dict__["vlcache"] = runtime = VLCacheRuntime(config)
        kernels.install(self, config.base_attn_implementation)
        if config.schedule != "auto":  # a schedule that does not fit is an error now, not at the first request
            runtime.options(None, self.config, len(core.language_model.layers))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """As the stock method.

        Args:
            vlcache_config (`VLCacheConfig` or `dict`, *optional*): settings of the cache.
        """
        settings = VLCacheConfig.from_any(kwargs.pop("vlcache_config", None))
        if kwargs.get("config") is None:
            kwargs.setdefault("attn_implementation", NAME)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        # never saved with the config; a schedule in the model's repository is looked for at this commit
        commit = loaded_commit(str(pretrained_model_name_or_path), kwargs.get("revision"), kwargs.get("cache_dir"))
        model.config._commit_hash = commit
        model.vlcache_install(settings)
        return loaded

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        settings = VLCacheConfig.from_any(kwargs.pop("vlcache_config", None))
        model = super()._from_config(config, **kwargs)
        model.vlcache_install(settings)
        return model

    def set_attn_implementation(self, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the stock method; `"vlcache"` switches the cache on, any other name off."""
        kernel = kernels.resolve_base(self.vlcache.config.base_attn_implementation, self)
        if attn_implementation == NAME:
            attn_implementation = {"": NAME, "text_config": NAME, "vision_config": kernel}
        elif isinstance(attn_implementation, dict) and attn_implementation.get("vision_config") == NAME:
            attn_implementation = {**attn_implementation, "vision_config": kernel}
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    @property
    def _vlcache_on(self) -> bool:
        core = self.model
        if core.language_model.config._attn_implementation != NAME:
            return False
        return not any(module.training for module in core.modules())  # dropout in one part is enough

    # --- forward

    def vlcache_forward(self, stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serves what can be served and leaves the rest to the stock forward."""
        kwargs = {**dict(zip(self.vlcache_arguments, args)), **kwargs}
        outputs = kwargs.get("mm_encoder_outputs") or {}
        encoded = outputs.get("image")
        has_pixels = kwargs.get("pixel_values") is not None and kwargs.get("pixel_values_videos") is None
        if torch.compiler.is_compiling() or not (has_pixels or isinstance(encoded, EncodedImages)):
            return stock(self, **kwargs)
        on = encoded is None and self._vlcache_on and not outputs
        if on and wants_full_outputs(self, kwargs):
            self.vlcache.note(RequestRecord(in_full="values of all rows, or gradients, are asked for"))
        elif on:
            encoded = encode(self, kwargs["pixel_values"], kwargs.get("image_grid_thw"), kwargs.get("cache"))
            if encoded is not None:
                kwargs = {**kwargs, "pixel_values": None, "mm_encoder_outputs": {"image": encoded}}
        if not isinstance(encoded, EncodedImages) or encoded.owner is not self.vlcache:
            return stock(self, **kwargs)
        result = self._vlcache_serve(stock, encoded, kwargs)
        return self._with_image_outputs(result, encoded) if has_pixels else result

    def _vlcache_serve(self, stock: Any, encoded: EncodedImages, kwargs: dict[str, Any]) -> Any:
        encoded.begin()
        record = encoded.record
        try:
            request = encoded.take_planned() or plan_request(self, encoded, kwargs)
            result = stock(self, **kwargs, **{REQUEST: request})
        except NotServable as reason:
            record.in_full = str(reason)
            result = stock(self, **kwargs)
            encoded.note_in_full()
        self._vlcache_finish(encoded)
        return result

    def _vlcache_finish(self, encoded: EncodedImages) -> None:
        record = encoded.record
        with record.timed("storing"):
            record.bytes_written += encoded.write_pending()
        self.vlcache.finish(record)

    def _with_image_outputs(self, result: Any, encoded: EncodedImages) -> Any:
        """Gives the result of a direct `forward` plain features: they keep no pixels and no model alive."""
        features = encoded.materialized(self.model.vlcache_features_class)
        if isinstance(result, ModelOutput):
            result.image_outputs = features
            return result
        served = self.vlcache.last_request is not None and self.vlcache.last_request.in_full is None
        return (*result, features.to_tuple()) if served else result

    # --- generate

    def _prepare_multimodal_encoder_kwargs_for_generation(self, model_kwargs: dict[str, Any]) -> Any:
        pixels = model_kwargs.get("pixel_values")
        outputs = model_kwargs.get("mm_encoder_outputs") or {}
        encoded = None
        if pixels is not None and outputs.get("image") is None and self._vlcache_on and not torch.is_grad_enabled():
            encoded = encode(self, pixels, model_kwargs.get("image_grid_thw"), model_kwargs.get("cache"))
        if encoded is not None:
            del model_kwargs["pixel_values"]
        model_kwargs = super()._prepare_multimodal_encoder_kwargs_for_generation(model_kwargs)
        if encoded is not None:
            model_kwargs["mm_encoder_outputs"]["image"] = encoded
        return model_kwargs

    def _expand_multimodal_outputs(
        self,
        input_ids: torch.Tensor,
        mm_encoder_output: dict[str, Any],
        expand_size: int = 1,
        inputs_embeds: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        encoded = mm_encoder_output.get("image")
        if isinstance(encoded, EncodedImages):
            order = self._vlcache_expanded_order(encoded, input_ids, expand_size)
            mm_encoder_output = dict(mm_encoder_output)
            if order is not None:
                del mm_encoder_output["image"]
                expanded = super()._expand_multimodal_outputs(input_ids, mm_encoder_output, expand_size, inputs_embeds)
                return {**expanded, "image": encoded.expanded(order)}
            mm_encoder_output["image"] = encoded.materialized(self.model.vlcache_features_class)
        return super()._expand_multimodal_outputs(input_ids, mm_encoder_output, expand_size, inputs_embeds)

    def _vlcache_expanded_order(
        self, encoded: EncodedImages, input_ids: torch.Tensor | None, expand_size: int
    ) -> list[int] | None:
        """Which image stands where once every row is repeated; `None` when rows and images cannot be matched."""
        if input_ids is None or input_ids.numel() == 0:
            return None
        order, at = [], 0
        for wanted in (input_ids == self.config.image_token_id).sum(-1).tolist():
            group = []
            while wanted > 0 and at < len(encoded):
                wanted -= encoded.lengths[at]
                group.append(at)
                at += 1
            if wanted:
                return None
            order += group * expand_size
        return order if at == len(encoded) else None

    def _prefill(
        self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        encoded = (model_kwargs.get("mm_encoder_outputs") or {}).get("image")
        chunk = generation_config.prefill_chunk_size
        if chunk is not None and isinstance(encoded, EncodedImages) and encoded.owner is self.vlcache:
            if self._vlcache_fits(encoded, input_ids, model_kwargs, chunk):
                generation_config = copy.copy(generation_config)
                generation_config.prefill_chunk_size = None
            else:
                # chunks cut images anywhere: the features are reused, the KV is computed as stock
                model_kwargs["mm_encoder_outputs"]["image"] = encoded.materialized(self.model.vlcache_features_class)
                encoded.record.in_full = "the tokens to compute do not fit one prefill chunk"
                encoded.note_in_full()
                self._vlcache_finish(encoded)
        # where users have compiled `forward`, a prefill of ours still runs as Python: a graph can read no store
        compiled = self.__dict__.get("forward")
        original = getattr(compiled, "_torchdynamo_orig_callable", None)
        if not isinstance(encoded, EncodedImages) or original is None:
            return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        self.forward = original
        try:
            return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            self.forward = compiled

    def _vlcache_fits(
        self, encoded: EncodedImages, input_ids: torch.Tensor, model_kwargs: dict[str, Any], chunk: int
    ) -> bool:
        """Whether the whole prompt's active tokens fit one chunk; then the plan is kept for the forward."""
        if model_kwargs.get("cache") is None:
            return False
        try:
            request = plan_request(self, encoded, {"input_ids": input_ids, **model_kwargs})
        except NotServable:
            return False
        if request.active > chunk * input_ids.shape[0]:
            return False
        encoded.planned = request
        return True

    def vlcache_prepare_inputs(self, stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keeps the 2-D mask at the prefill: with a static cache stock makes it 4-D, which hides what is visible."""
        inputs = stock(self, *args, **kwargs)
        encoded = (inputs.get("mm_encoder_outputs") or {}).get("image")
        mask = inputs.get("attention_mask")
        if isinstance(encoded, EncodedImages) and (isinstance(mask, dict) or (mask is not None and mask.ndim == 4)):
            inputs["attention_mask"] = kwargs.get("attention_mask")
        return inputs
