"""Configuration, processor and the folder of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from .grammar import SPECIAL, vocabulary
from .pictures import CELL, SIZES

PATCH = CELL // 2
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == "image" %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == "video" %}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == "text" %}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer: lower case, split at spaces and around punctuation; unknown words are `<unk>`."""
    tokenizer = Tokenizer(WordLevel(vocabulary(), unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.Split(Regex(r"[^\w\s]"), "isolated")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in SPECIAL if token != "<unk>"],
        model_max_length=4096,
        padding_side="left",
    )


def build_processor() -> Qwen3VLProcessor:
    """The stock processor; digit grids of 4 x 4 to 16 x 16 cells and pictures of shapes keep their size."""
    values: dict[str, Any] = {
        "patch_size": PATCH,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    size = {"shortest_edge": (min(SIZES) * CELL) ** 2, "longest_edge": (max(SIZES) * CELL) ** 2}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **values),
        tokenizer=build_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(**values),
        chat_template=CHAT_TEMPLATE,
    )


def build_config() -> Qwen3VLConfig:
    """About two million parameters: six decoder layers, two ViT layers whose features all go through DeepStack."""
    ids = vocabulary()
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(ids),
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "initializer_range": 0.05,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 96,
            "intermediate_size": 288,
            "num_heads": 3,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": (2 * max(SIZES)) ** 2,
            "deepstack_visual_indexes": [0, 1],
            "initializer_range": 0.05,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def build_model(seed: int) -> Qwen3VLForConditionalGeneration:
    """The untrained model, float32."""
    torch.manual_seed(seed)
    config: Any = build_config()
    model: Any = Qwen3VLForConditionalGeneration(config).float()
    # Words stand out against what untrained layers add to them; logits start small all the same.
    text = model.model.language_model
    with torch.no_grad():
        text.embed_tokens.weight.mul_(6.0)
        text.norm.weight.mul_(0.15)
        for layer in text.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=16, eos_token_id=config.text_config.eos_token_id,
        pad_token_id=config.text_config.pad_token_id,
    )  # fmt: skip
    return model


def save(model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
    """Write weights in bfloat16, configuration and processor, as `from_pretrained` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    copy: Any = Qwen3VLForConditionalGeneration(model.config)
    copy.to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.save_pretrained(folder)
    build_processor().save_pretrained(folder)
