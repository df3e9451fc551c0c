"""Models of the released shapes with random weights, made on the device, and prompts for them."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText, GenerationConfig

# ids of the Qwen tokenizer
VOCAB_SIZE = 151_936
END_OF_TEXT = 151_643
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = 151_652, 151_653, 151_655, 151_656

TEXT_TOKENS = 20

_CLASS_PREFIX = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe"}
_SHARPENED = {"q_norm", "k_norm", "q_proj", "k_proj"}


@dataclass(frozen=True)
class Shape:
    """Shape of a model.

    Args:
        name (`str`): the released model that has it, without its organisation.
        architecture (`str`): `"qwen2_5_vl"`, `"qwen3_vl"` or `"qwen3_vl_moe"`.
        text (`Mapping`): its text config.
        vision (`Mapping`): its vision config.
        schedule (`str` or `float`): the recompute schedule of the row "dynamic".
    """

    name: str
    architecture: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    schedule: str | float

    @property
    def head_dim(self) -> int:
        """Size of an attention head of the decoder."""
        return self.text.get("head_dim") or self.text["hidden_size"] // self.text["num_attention_heads"]

    def shallow(self, layers: int) -> Shape:
        """The same widths with a few layers only, in the decoder and in the vision tower.

        Args:
            layers (`int`): how many, at least 4.
        """
        vision = dict(self.vision, depth=layers)
        if "deepstack_visual_indexes" in vision:
            vision["deepstack_visual_indexes"] = [0, 1, 2]
        if "fullatt_block_indexes" in vision:
            vision["fullatt_block_indexes"] = [1, 3]
        text = dict(self.text, num_hidden_layers=layers)
        return Shape(f"{self.name}, {layers} layers", self.architecture, text, vision, self.schedule)

    def config(self) -> transformers.PreTrainedConfig:
        """The config of the whole model."""
        config_class = getattr(transformers, _CLASS_PREFIX[self.architecture] + "Config")
        tokens = {"bos_token_id": END_OF_TEXT, "eos_token_id": None, "pad_token_id": None}
        return config_class(
            text_config={"vocab_size": VOCAB_SIZE, **tokens, **self.text},
            vision_config={**self.vision, "out_hidden_size": self.text["hidden_size"]},
            image_token_id=IMAGE_PAD,
            video_token_id=VIDEO_PAD,
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
            tie_word_embeddings=False,
        )


def _rope(theta: float, sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, "mrope_section": sections, **more}}


def _text(width: int, layers: int, heads: int, kv_heads: int, mlp: int, positions: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "max_position_embeddings": positions,
        **more,
    }


def _vision(depth: int, width: int, heads: int, mlp: int, patch: int, **more: Any) -> dict[str, Any]:
    return {
        "depth": depth,
        "hidden_size": width,
        "num_heads": heads,
        "intermediate_size": mlp,
        "patch_size": patch,
        **more,
    }


_QWEN3_ROPE = _rope(5e6, [24, 20, 20], mrope_interleaved=True)
_TINY_ROPE = _rope(5e6, [4, 2, 2], mrope_interleaved=True)
_QWEN3_VISION = _vision(27, 1152, 16, 4304, 16, num_position_embeddings=2304, deepstack_visual_indexes=[8, 16, 24])
_TINY_QWEN3_VISION = _vision(4, 32, 2, 64, 16, num_position_embeddings=2304, deepstack_visual_indexes=[0, 1, 2])

# in order of importance
REAL = (
    Shape(
        "Qwen3-VL-8B-Instruct",
        "qwen3_vl",
        _text(4096, 36, 32, 8, 12_288, 262_144, head_dim=128, **_QWEN3_ROPE),
        _QWEN3_VISION,
        "Qwen3-VL-8B-Instruct",
    ),
    Shape(
        "Qwen2.5-VL-7B-Instruct",
        "qwen2_5_vl",
        _text(3584, 28, 28, 4, 18_944, 128_000, **_rope(1e6, [16, 24, 24])),
        _vision(32, 1280, 16, 3420, 14, window_size=112, fullatt_block_indexes=[7, 15, 23, 31]),
        "Qwen2.5-VL-7B-Instruct",
    ),
    Shape(
        "Qwen3-VL-30B-A3B-Instruct",
        "qwen3_vl_moe",
        _text(
            2048,
            48,
            32,
            4,
            6144,
            262_144,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            **_QWEN3_ROPE,
        ),
        _QWEN3_VISION,
        "Qwen3-VL-30B-A3B-Instruct",
    ),
)

TINY = (
    Shape(
        "tiny Qwen3-VL",
        "qwen3_vl",
        _text(64, 4, 4, 2, 128, 32_768, head_dim=16, **_TINY_ROPE),
        _TINY_QWEN3_VISION,
        0.035,
    ),
    Shape(
        "tiny Qwen2.5-VL",
        "qwen2_5_vl",
        _text(64, 4, 4, 2, 128, 32_768, **_rope(1e6, [2, 3, 3])),
        _vision(4, 32, 2, 64, 14, window_size=112, fullatt_block_indexes=[1, 3]),
        0.035,
    ),
    Shape(
        "tiny Qwen3-VL-MoE",
        "qwen3_vl_moe",
        _text(
            64,
            4,
            4,
            2,
            128,
            32_768,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            **_TINY_ROPE,
        ),
        _TINY_QWEN3_VISION,
        0.035,
    ),
)


@torch.no_grad()
def build_model(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """A stock model in `eval()` with random weights, made where it stays.

    Args:
        shape (`Shape`): its shape.
        device (`torch.device`): where it is made.
        dtype (`torch.dtype`): of its weights; frequencies of RoPE stay in fp32, as `from_pretrained` leaves them.
        seed (`int`): of its weights.
    """
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(shape.config(), dtype=dtype, attn_implementation="sdpa")
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        _fill(name, parameter, shape.text["num_hidden_layers"], generator)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=END_OF_TEXT)
    return model.eval()


def _fill(name: str, parameter: torch.Tensor, layers: int, generator: torch.Generator) -> None:
    """Activations keep their scale at any width and depth, and images change the answer: as in `examples/offline.py`,
    which needs the real tokenizer's package."""
    if parameter.ndim == 1:
        bias = name.endswith("bias")
        parameter.normal_(0.0 if bias else 1.0, 0.1, generator=generator)
    elif "embed" in name and "patch_embed" not in name:
        parameter.normal_(0.0, 1.0, generator=generator)
    else:
        fan_in = parameter.shape[-1] if parameter.ndim <= 3 else parameter[0].numel()
        gain = 1.0
        if "language_model" in name:
            if "o_proj" in name:
                gain = 3.0 * layers**-0.5
            elif "down_proj" in name:
                gain = layers**-0.5
        parameter.normal_(0.0, gain * fan_in**-0.5, generator=generator)
    if "language_model" in name and name.rsplit(".", 2)[-2] in _SHARPENED:
        parameter.mul_(1.5)


def twin(model: Any) -> Any:
    """A second model over the same weights: it takes no memory for them.

    Args:
        model (`PreTrainedModel`): the first one.
    """
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def pixels(config: Any, tokens: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Patches of an image, `(4 * tokens, patch values)`, in fp32 as processors give them.

    Args:
        config (`PreTrainedConfig`): of the model.
        tokens (`int`): image tokens.
        device (`torch.device`): where they lie.
        seed (`int`): another image.
    """
    vision = config.vision_config
    values = 3 * vision.temporal_patch_size * vision.patch_size**2
    return torch.randn(4 * tokens, values, device=device, generator=torch.Generator(device).manual_seed(seed))


def prompt(patches: torch.Tensor, seed: int, before: int = TEXT_TOKENS // 2) -> dict[str, torch.Tensor]:
    """One square image between `before` and `TEXT_TOKENS - before` random text tokens.

    Args:
        patches (`torch.Tensor`): from `pixels`, of a square number of tokens.
        seed (`int`): another text.
        before (`int`): text tokens in front of the image.
    """
    tokens, device = patches.shape[0] // 4, patches.device
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise ValueError(f"Image tokens must be a square number, got {tokens}; {side * side} is one.")
    text = torch.randint(1000, 100_000, (TEXT_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
    image = [VISION_START, *[IMAGE_PAD] * tokens, VISION_END]
    ids = torch.tensor([text[:before] + image + text[before:]], device=device)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE_PAD).int(),
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 2 * side, 2 * side]], device=device),
    }
