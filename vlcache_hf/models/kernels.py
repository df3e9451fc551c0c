"""The kernel of decoding and of the vision tower, a setting of its own."""

from __future__ import annotations

from typing import Any

from transformers.utils.import_utils import is_flash_attn_2_available

from ..attention.interface import KERNEL_ATTRIBUTE, NAME


def resolve_base(name: str, model: Any = None) -> str:
    """The kernel meant by `VLCacheConfig.base_attn_implementation`.

    Args:
        name (`str`): `"auto"` or a kernel.
        model (`PreTrainedModel`, *optional*): flash-attention is chosen for half-precision models on CUDA only.

    Raises:
        `ImportError`: flash-attention is asked for by name and not installed.
    """
    if name == "flash_attention_2" and not is_flash_attn_2_available():
        raise ImportError(
            '`base_attn_implementation="flash_attention_2"` needs the flash-attn package and a CUDA device: '
            '`pip install "vlcache-hf[flash-attn]"`, or choose "sdpa".'
        )
    if name != "auto":
        return name
    half = model is not None and model.device.type == "cuda" and model.dtype.itemsize == 2
    return "flash_attention_2" if half and is_flash_attn_2_available() else "sdpa"


def normalise(config: Any) -> None:
    """Brings a composite config that is about to become one of our models into one form.

    Asking for "vlcache" at the top, or for nothing at all, means the text model; a vision tower never runs it.

    Args:
        config (`PreTrainedConfig`): the composite config, changed in place.
    """
    top, text = config._attn_implementation, config.text_config._attn_implementation
    if top == NAME or (top is None and text is None):
        config.text_config._attn_implementation = NAME
    route_vision(config, "auto")


def route_vision(config: Any, name: str, model: Any = None) -> None:
    """The vision tower has no KV: what asks for "vlcache" there gets a stock kernel."""
    if config.vision_config._attn_implementation == NAME:
        config.vision_config._attn_implementation = resolve_base(name, model)


def install(model: Any, name: str) -> None:
    """Tells every attention layer of the text model its base kernel."""
    kernel = resolve_base(name, model)
    route_vision(model.config, name, model)
    vision = model.model.visual
    if vision.config._attn_implementation == NAME or name != "auto":
        vision.config._attn_implementation = kernel
    for block in model.model.language_model.layers:
        setattr(block.self_attn, KERNEL_ATTRIBUTE, kernel)
