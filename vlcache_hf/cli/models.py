"""What the commands that load a model share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .common import Misuse

DTYPES = ("auto", "bfloat16", "float16", "float32")

model_option = click.option(
    "--model", "model_id", required=True, metavar="PATH_OR_ID", help="The model: a folder, or a Hub id."
)
images_option = click.option(
    "--images",
    "folder",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of images; those in folders below it count too.",
)


def load_model(model_id: str, dtype: str, device: str, config: Any) -> tuple[Any, Any]:
    """A model with an image cache, and its processor.

    Args:
        model_id (`str`): folder or Hub id.
        dtype (`str`): one of `DTYPES`, or what `from_pretrained` takes.
        device (`str`): `"auto"`, or a device of torch.
        config (`VLCacheConfig`, *optional*): settings of its cache.

    Raises:
        `Misuse`: it cannot be loaded, or has no image cache.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(model_id)
        model: Any = AutoModelForImageTextToText.from_pretrained(
            model_id,
            dtype=dtype,
            device_map="auto" if device == "auto" else {"": device},
            attn_implementation="vlcache",
            vlcache_config=config,
        )
    except Exception as error:  # whatever transformers, the Hub and torch raise at names, files and devices
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Misuse(
            f"--model {model_id!r} could not be loaded (dtype {dtype}, device {device}): {lines[0]} "
            "Give a Qwen2.5-VL, Qwen3-VL or Qwen3-VL-MoE model: a folder, or an id on the Hub."
        ) from None
    if not hasattr(model, "vlcache"):
        raise Misuse(
            f"--model {model_id!r} is a {type(model).__name__}, which has no image cache. "
            "Give a Qwen2.5-VL, Qwen3-VL or Qwen3-VL-MoE model."
        )
    # generation continues at the end of a row
    processor.tokenizer.padding_side = "left"
    return model.eval(), processor
