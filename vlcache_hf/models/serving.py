"""Which requests are served from the cache; everything else is computed in full, exactly as stock."""

from __future__ import annotations

import contextlib
import dataclasses
from time import perf_counter
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..decide import decide
from ..encoder import EncodedImages
from ..hooks import has_hooks, has_hooks_but_behind, watched_output
from ..options import model_label
from ..precision import KVShape
from ..prefill import PrefillRequest
from ..prompt import NotServable, read_prompt
from ..records import RequestRecord
from ..worthwhile import min_tokens

# Forward arguments that a served request may carry. Anything else, now or in a later Transformers, is left to stock.
_KNOWN = {
    "attention_mask",
    "cache",
    "image_grid_thw",
    "input_ids",
    "logits_to_keep",
    "mm_encoder_outputs",
    "mm_token_type_ids",
    "position_ids",
    "return_dict",
    "use_cache",
}
# RoPE types whose frequencies depend on the length of the prompt, hence the keys of an image on the text after it.
_DYNAMIC_ROPE = ("dynamic", "longrope")


def wants_full_outputs(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a direct `forward` asks for values of rows that a hit skips, or for gradients."""
    pixels = kwargs["pixel_values"]
    asked = any(
        kwargs.get(name, getattr(model.config, name, False))
        for name in ("output_attentions", "output_hidden_states", "output_router_logits")
    )
    trains = torch.is_grad_enabled() and (
        getattr(pixels, "requires_grad", False) or any(parameter.requires_grad for parameter in model.parameters())
    )
    return asked or trains or kwargs.get("labels") is not None


def encode(model: Any, pixels: torch.Tensor, grids: torch.Tensor | None, cache: Cache | None) -> EncodedImages | None:
    """Hashes the images of a request.

    Args:
        model: one of our models.
        pixels (`torch.Tensor` of shape `(patches, patch_values)`): `pixel_values`.
        grids (`torch.Tensor` of shape `(images, 3)`): `image_grid_thw`.
        cache (`Cache`, *optional*): the request's cache; a `VLCache` chooses store and settings.

    Returns:
        `EncodedImages` or `None`: `None` leaves the request to stock, errors included.
    """
    core, runtime = model.model, model.vlcache
    if not isinstance(pixels, torch.Tensor) or not isinstance(grids, torch.Tensor):
        return None
    if has_hooks_but_behind(core.visual):
        return None
    merge = core.visual.spatial_merge_size**2
    if pixels.ndim != 2 or grids.ndim != 2 or grids.shape[1] != 3:
        return None
    patches = grids.prod(-1)
    if int(patches.sum()) != pixels.shape[0] or bool((patches % merge).any()) or bool((patches <= 0).any()):
        return None
    if (getattr(model, "_tp_size", None) or 1) > 1:
        runtime.warn_once("Nothing is cached under tensor parallelism: each rank holds a part of the KV heads only.")
        return None
    options = runtime.options(cache, model.config, len(core.language_model.layers))
    least = min_tokens(options.config, core.config, core.language_model.device.type)
    if int(patches.max()) < least * merge:
        # nothing is even hashed: for images this small that would cost more than it can save
        runtime.note(RequestRecord(in_full=f"all images have fewer tokens than min_tokens={least}"))
        return None
    start = perf_counter()
    keys = runtime.model_keys(core, options.config.namespace)
    fingerprint = perf_counter() - start
    if keys is None:
        return None
    options = dataclasses.replace(options, model=model_label(model.config, keys), min_tokens=least)

    def tower(some_pixels: torch.Tensor, some_grids: torch.Tensor, watched: bool) -> Any:
        runtime.vision_called()
        with watched_output(core.visual) if watched else contextlib.nullcontext():
            return core.get_image_features(some_pixels, some_grids, return_dict=True)

    levels = len(getattr(core.config.vision_config, "deepstack_visual_indexes", None) or ())
    encoded = EncodedImages(runtime, keys, pixels, grids, merge, tower, options, levels)
    encoded.record.seconds["fingerprint"] = fingerprint
    return encoded


def plan_request(model: Any, encoded: EncodedImages, kwargs: dict[str, Any]) -> PrefillRequest:
    """Plans a prefill.

    Args:
        model: one of our models.
        encoded (`EncodedImages`): the request's images.
        kwargs (`dict`): the arguments of `forward`.

    Raises:
        `NotServable`: the request must be computed in full; the message says why.
    """
    _check_model(model)
    _check_arguments(model, kwargs)
    core, input_ids = model.model, kwargs["input_ids"]
    if int((input_ids == model.config.image_token_id).sum()) != sum(encoded.lengths):
        raise NotServable("image tokens and images do not match")  # before positions, as stock
    position_ids = _positions(core, kwargs)
    prompt = read_prompt(
        input_ids,
        kwargs.get("attention_mask"),
        position_ids,
        model.config.image_token_id,
        encoded.lengths,
        kwargs.get("logits_to_keep", 0),
    )
    text = core.config.text_config
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dtype = core.language_model.dtype
    options = encoded.options
    shape = KVShape(len(core.language_model.layers), text.num_key_value_heads, head_dim, dtype, options.storage)
    uses = decide(prompt, encoded, options, shape, set())
    return PrefillRequest(prompt, encoded, input_ids, position_ids, shape, uses)


def _check_model(model: Any) -> None:
    text_model = model.model.language_model
    if has_hooks(text_model) or model.model._forward_hooks or model.model._forward_pre_hooks:
        raise NotServable("what forward hooks do is unknown")
    if [getattr(layer.self_attn, "layer_idx", None) for layer in text_model.layers] != list(
        range(len(text_model.layers))
    ):
        raise NotServable("the layers were exchanged, so that they do not stand where their numbers say")
    text = model.config.text_config
    if any(kind != "full_attention" for kind in getattr(text, "layer_types", None) or ()):
        raise NotServable("the model has layers without full attention, which have no KV per token")
    if (text.rope_parameters or {}).get("rope_type", "default") in _DYNAMIC_ROPE:
        raise NotServable("the model's RoPE frequencies depend on the length of the prompt")
    if getattr(text, "is_causal", True) is False:
        raise NotServable("attention is bidirectional")


def _check_arguments(model: Any, kwargs: dict[str, Any]) -> None:
    outputs = kwargs.get("mm_encoder_outputs") or {}
    if any(value is not None for name, value in outputs.items() if name != "image"):
        raise NotServable("prompts with video are computed in full")
    if kwargs.get("inputs_embeds") is not None or kwargs.get("input_ids") is None:
        raise NotServable("what `inputs_embeds` show is unknown")
    if kwargs["input_ids"].ndim != 2 or kwargs["input_ids"].numel() == 0:
        raise NotServable("the prompt is empty")
    for name, value in kwargs.items():
        if name not in _KNOWN and value is not None and value is not False:
            raise NotServable(f"`{name}` is asked for")
    for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if getattr(model.config, name, False) or getattr(model.config.text_config, name, False):
            raise NotServable(f"`{name}` is asked for")
    keep = kwargs.get("logits_to_keep", 0)
    if not isinstance(keep, int) or keep < 0:
        raise NotServable("`logits_to_keep` chooses single positions")
    mask = kwargs.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
        raise NotServable("what a 4-D mask hides is unknown")
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
        raise NotServable("gradients are recorded")
    _check_cache(kwargs.get("cache"))


def _check_cache(cache: Any) -> None:
    if cache is None:
        return
    if not isinstance(cache, Cache) or type(cache).update is not Cache.update:
        raise NotServable(f"a {type(cache).__name__} is filled in its own way")
    if any(not isinstance(layer, CacheLayerMixin) or getattr(layer, "is_sliding", False) for layer in cache.layers):
        raise NotServable("the cache does not keep every token")
    if int(cache.get_seq_length()) > 0:
        raise NotServable("the prompt continues a cache, whose content is unknown")


def _positions(core: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """M-RoPE positions `(3, B, S)` as the stock forwards would make them; leaves `rope_deltas` as they would."""
    input_ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
    position_ids, batch = kwargs.get("position_ids"), input_ids.shape[0]
    if position_ids is None:
        shape_only = torch.empty(*input_ids.shape, 0, device=input_ids.device)
        arguments = {
            "input_ids": input_ids,
            "image_grid_thw": kwargs.get("image_grid_thw"),
            "video_grid_thw": None,
            "inputs_embeds": shape_only,
            "attention_mask": mask,
            "cache": kwargs.get("cache"),
            "mm_token_type_ids": kwargs.get("mm_token_type_ids"),
        }
        position_ids = core.compute_3d_position_ids(**arguments)
    text_positions = None
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).view(1, 1, -1).expand(3, batch, -1)
    elif position_ids.ndim == 2:
        text_positions, position_ids = position_ids, position_ids[None].expand(3, batch, -1)
    elif position_ids.shape[0] == 4:
        text_positions, position_ids = position_ids[0], position_ids[1:]
    if text_positions is not None and mask is None and kwargs.get("cache") is None:
        if bool((text_positions[:, 1:] - text_positions[:, :-1] != 1).any()):
            raise NotServable("packed sequences have masks of their own")
    if tuple(position_ids.shape[1:]) != tuple(input_ids.shape):
        position_ids = position_ids.expand(-1, *input_ids.shape)
    return position_ids
