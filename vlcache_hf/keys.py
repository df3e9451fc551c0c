"""Everything an image's features and KV depend on, as 256-bit digests of length-prefixed fields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .bulk import bulk_digest
from .precision import AS_COMPUTED

# Part of every key: raised whenever the meaning of stored tensors changes, so that old entries are never read.
FORMAT_VERSION = "3"

# Fields of a model config that cannot change features or KV. Anything not listed is part of the key: a needless miss
# is acceptable, a needless hit is not.
_NEUTRAL_CONFIG = {
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation",
    "_experts_implementation_internal",
    "architectures",
    "attn_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


class Digest:
    """SHA-256 over fields, each preceded by its length, so that no two field lists have the same bytes."""

    def __init__(self, *fields: bytes | str | int) -> None:
        self._hash = hashlib.sha256()
        self.add(*fields)

    def add(self, *fields: bytes | memoryview | str | int) -> Digest:
        for value in fields:
            data: bytes | memoryview
            if isinstance(value, (str, int)):
                data = str(value).encode()
            else:
                view = memoryview(value)
                data = view.cast("B") if view.nbytes else b""  # an empty view cannot be cast
            self._hash.update(len(data).to_bytes(8, "little"))
            self._hash.update(data)
        return self

    def copy(self) -> Digest:
        other = Digest()
        other._hash = self._hash.copy()
        return other

    def hex(self) -> str:
        return self._hash.hexdigest()


def config_json(config: Any) -> str:
    """The part of a model config that its features or KV depend on, as canonical JSON."""

    def keep(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): keep(v) for k, v in value.items() if k not in _NEUTRAL_CONFIG}
        if isinstance(value, (list, tuple)):
            return [keep(v) for v in value]
        return value

    return json.dumps(keep(config.to_dict()), sort_keys=True, default=str)


def pixel_digest(pixels: torch.Tensor, grid: Sequence[int]) -> str:
    """Digest of what the vision tower sees of one image.

    Args:
        pixels (`torch.Tensor` of shape `(t * h * w, patch_values)`): the processor's patches of the image.
        grid (sequence of three `int`): its `image_grid_thw` row. Two images with equal bytes and other sides differ.
    """
    host = pixels.detach().to("cpu").contiguous()
    raw = host.view(torch.uint8).numpy() if host.numel() else np.empty(0, np.uint8)
    # three times as fast as SHA-256 with the CPU's own instructions, and as long
    content = bulk_digest(raw.reshape(-1).data)
    return Digest("pixels", str(host.dtype), *(int(n) for n in host.shape), *(int(n) for n in grid), content).hex()


@dataclass(frozen=True)
class ModelKeys:
    """Digests of one state of a model: `vision` decides the features, `text` (with them) the KV."""

    vision: str
    text: str

    def image(self, pixel_key: str) -> str:
        """Key of the encoder output of an image under this model."""
        return Digest("image", self.vision, pixel_key).hex()

    def kv_group(self, image_key: str, layout: np.ndarray, storage: str = AS_COMPUTED) -> str:
        """Key shared by all contexts of an image under this model.

        Args:
            image_key (`str`): what `image()` returned.
            storage (`str`): precision in which the KV is stored. What was rounded is never met by who asks for more.
            layout (`np.ndarray` of shape `(3, T)`, int64): positions of the image's tokens minus those of its first
                token. Sequential positions (no `mm_token_type_ids`) and M-RoPE differ here.
        """
        digest = Digest("kv", self.text, image_key).add(np.ascontiguousarray(layout).data)
        return (digest if storage == AS_COMPUTED else digest.add("storage", storage)).hex()


def model_keys(
    *,
    namespace: str,
    transformers_version: str,
    vision_config: Any,
    text_config: Any,
    vision_weights: str,
    text_weights: str,
    vision_dtype: str,
    text_dtype: str,
) -> ModelKeys:
    """Combines all that identifies a model state; the dtypes are those of the computation, autocast included."""
    common = (FORMAT_VERSION, namespace, transformers_version)
    vision = Digest("vision", *common, config_json(vision_config), vision_weights, vision_dtype).hex()
    text = Digest("text", *common, config_json(text_config), text_weights, text_dtype).hex()
    return ModelKeys(vision, text)


class ContextChain:
    """Digest over the visible tokens before an image: ids, positions, and what the images among them show.

    Two contexts are equal only when all that the image's KV can attend to is equal (see the design's "context").
    """

    def __init__(self) -> None:
        self._digest = Digest("context")

    def text(self, ids: np.ndarray, positions: np.ndarray) -> None:
        """Appends text tokens.

        Args:
            ids (`np.ndarray` of shape `(n,)`, int64): token ids.
            positions (`np.ndarray` of shape `(3, n)`, int64): their temporal, height and width positions.
        """
        self._digest.add("text", ids.size)
        self._digest.add(np.ascontiguousarray(ids).data, np.ascontiguousarray(positions).data)

    def image(self, image_key: str, positions: np.ndarray) -> str:
        """Appends an image and returns the digest of the context *before* it.

        Args:
            image_key (`str`): key of what the image shows.
            positions (`np.ndarray` of shape `(3, T)`, int64): positions of its tokens.
        """
        start = np.ascontiguousarray(positions[:, :1])
        context = self._digest.copy().add("at").add(start.data).hex()
        self._digest.add("image", image_key).add(np.ascontiguousarray(positions).data)
        return context
