"""Tiny random models and prompts, no processor. Untied embeddings and wide weights: outputs depend on images."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

VOCAB = 200
IMAGE, VIDEO, VISION_START, VISION_END, PAD, EOS = 150, 151, 152, 153, 0, 199
ARCHITECTURES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
STOCK = {
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": Qwen3VLMoeForConditionalGeneration,
}

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": False,
}
_QWEN3_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
    "initializer_range": 0.15,
}


def config(architecture: str, **text: Any) -> Any:
    """Config of a tiny model; `text` overrides fields of its text config."""
    if architecture == "qwen2_5_vl":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
            "initializer_range": 0.15,
        }
        return Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": rope, **text}, vision_config=vision, **_TOKENS
        )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    fields = {**_TEXT, "head_dim": 16, "rope_parameters": rope}
    if architecture == "qwen3_vl":
        return Qwen3VLConfig(text_config={**fields, **text}, vision_config=dict(_QWEN3_VISION), **_TOKENS)
    fields |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3VLMoeConfig(text_config={**fields, **text}, vision_config=dict(_QWEN3_VISION), **_TOKENS)


def stock(architecture: str, seed: int = 0, dtype: torch.dtype = torch.float32, **text: Any) -> Any:
    """A stock tiny model in eval mode."""
    torch.manual_seed(seed)
    model = STOCK[architecture](config(architecture, **text)).to(dtype).eval()
    model.generation_config.eos_token_id = None  # runs of equal length: nothing stops early
    model.generation_config.pad_token_id = PAD
    return model


def image(seed: int, height: int = 8, width: int = 8) -> tuple[torch.Tensor, list[int]]:
    """Patches and grid of a random image; it has `height * width / 4` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(height * width, 3 * 2 * 4 * 4, generator=generator), [1, height, width]


def text(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(1, 140, (count,), generator=generator).tolist()


def prompt(*parts: Any) -> tuple[list[int], list[tuple[torch.Tensor, list[int]]]]:
    """Token ids and images of one row. A part is a list of ids or an image."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, tuple):
            images.append(part)
            count = part[1][0] * part[1][1] * part[1][2] // 4
            ids += [VISION_START, *[IMAGE] * count, VISION_END]
        else:
            ids += part
    return ids, images


def batch(*rows: Any, side: str = "left") -> dict[str, torch.Tensor]:
    """Model inputs of several rows, padded on one side, as the processor returns them."""
    width = max(len(ids) for ids, _ in rows)
    input_ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for index, (ids, _) in enumerate(rows):
        part = slice(width - len(ids), width) if side == "left" else slice(0, len(ids))
        input_ids[index, part], mask[index, part] = torch.tensor(ids), 1
    inputs = {"input_ids": input_ids, "attention_mask": mask, "mm_token_type_ids": (input_ids == IMAGE).int()}
    images = [part for _, row_images in rows for part in row_images]
    if images:
        inputs["pixel_values"] = torch.cat([pixels for pixels, _ in images])
        inputs["image_grid_thw"] = torch.tensor([grid for _, grid in images])
    return inputs


def clone(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in inputs.items()
    }


def generate(model: Any, inputs: dict[str, Any], tokens: int = 8, **kwargs: Any) -> Any:
    kwargs.setdefault("do_sample", False)
    return model.generate(**clone(inputs), max_new_tokens=tokens, **kwargs)


def kinds(model: Any) -> list[str]:
    """What happened to the images of the last request."""
    return [record.kv for record in model.vlcache.last_request.images]
