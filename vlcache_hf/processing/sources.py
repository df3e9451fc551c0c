"""What an image is before it is processed: digests of its bytes, never of names, paths or metadata."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import io
import json
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import blake3
import numpy as np
import PIL.Image
import torch

from ..bulk import bulk_digest

_SOURCE = "vlcache_source"
# whose versions decide what the processor makes of an image
_PACKAGES = ("transformers", "torch", "torchvision", "torchcodec", "pillow", "numpy")


class _Encoded:
    """The bytes of a file, which an opened image carries along."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.digest = blake3.blake3(data).hexdigest()


def fetch(image: str | bytes) -> PIL.Image.Image | None:
    """Opens an image without decoding it, and notes the digest of its encoded bytes.

    Args:
        image (`str` or `bytes`): path, URL, base64 (with or without `data:` before it), or the bytes of a file.

    Returns:
        `PIL.Image.Image` or `None`: `None` for what is better left to Transformers, errors included.
    """
    try:
        data = image if isinstance(image, bytes) else _encoded_bytes(image)
        if not data:
            return None
        opened = PIL.Image.open(io.BytesIO(data))
    except (OSError, ValueError, PIL.Image.DecompressionBombError):
        return None
    if opened.format == "GIF" or _is_decoded(opened):
        return None  # torchvision makes an image of every frame; and what is decoded already is nothing to wait with
    setattr(opened, _SOURCE, _Encoded(data))
    return opened


def _encoded_bytes(text: str) -> bytes | None:
    if text.startswith(("http://", "https://")):
        try:
            import httpx  # type: ignore[import-not-found]
        except ImportError:
            return None

        # a status is not looked at, as Transformers does not: what is no image cannot be opened
        return httpx.get(text, follow_redirects=True).content
    if os.path.isfile(text):
        with open(text, "rb") as file:
            return file.read()
    if text.startswith("data:image/"):
        text = text.split(",")[1]
    try:
        return base64.decodebytes(text.encode())
    except binascii.Error:
        return None


def _source(image: Any) -> _Encoded | None:
    """The bytes that an image was opened from, as long as nobody has looked at its pixels, and maybe drawn on them."""
    if isinstance(image, _Encoded):
        return image
    encoded: _Encoded | None = getattr(image, _SOURCE, None)
    return None if encoded is None or _is_decoded(image) else encoded


def _is_decoded(image: PIL.Image.Image) -> bool:
    return (image.__dict__.get("_im") or image.__dict__.get("im")) is not None  # `im` until Pillow 11


def kept(image: Any) -> Any:
    """What `decoded` takes and nobody else can change, for a later look at an image.

    Args:
        image: an image of any kind that `source_digest` knows.
    """
    encoded = _source(image)
    if encoded is not None:
        return encoded
    return image.clone() if isinstance(image, torch.Tensor) else image.copy()


def decoded(image: Any, load: Callable[[str], Any]) -> Any:
    """What the processor takes: an image opened by `fetch` is decoded as the processor itself would.

    Args:
        image: an image of any kind that a processor takes, or one that was `kept`.
        load (`Callable[[str], Any]`): the stock `fetch_images`. It gets the very bytes that were hashed.
    """
    encoded = _source(image)
    if encoded is None:
        return image
    return load("data:image/any;base64," + base64.b64encode(encoded.data).decode())


def source_digest(image: Any) -> str | None:
    """Digest of all that an image shows, before it is processed.

    Args:
        image: opened by `fetch`, or a PIL image, numpy array or CPU tensor of the caller's, hashed anew at every call
            since it may have been drawn on.

    Returns:
        `str` or `None`: `None` for what is not known well enough.
    """
    encoded = _source(image)
    if encoded is not None:
        return f"encoded {encoded.digest}"
    if isinstance(image, PIL.Image.Image) and type(image).__module__.startswith("PIL."):
        palette = image.getpalette("RGBA") if image.mode in ("P", "PA") else None
        content = bulk_digest(memoryview(image.tobytes())).hex()
        return json.dumps(["pil", image.mode, image.size, palette, repr(image.info.get("transparency")), content])
    if type(image) is torch.Tensor and image.device.type == "cpu" and image.layout == torch.strided:
        if image.requires_grad or image.is_conj() or image.is_neg():
            return None
        # as bytes: numpy knows no bfloat16
        raw = image.contiguous().flatten().view(torch.uint8).numpy()
        return _array_digest("tensor", str(image.dtype), image.shape, raw)
    if type(image) is np.ndarray and not image.dtype.hasobject:
        return _array_digest("array", image.dtype.str, image.shape, np.ascontiguousarray(image).view(np.uint8))
    return None


def _array_digest(kind: str, dtype: str, shape: Sequence[int], content: np.ndarray) -> str:
    return json.dumps([kind, dtype, list(shape), bulk_digest(content.reshape(-1).data).hex()])


def settings_digest(image_processor: Any, kwargs: dict[str, Any]) -> str | None:
    """Everything that decides what an image processor makes of an image, as JSON.

    Args:
        image_processor (`BaseImageProcessor`): the processor, with its attributes.
        kwargs (`dict`): the arguments of this call.

    Returns:
        `str` or `None`: `None` when one of them is something that cannot be written down.
    """
    kind = type(image_processor)
    named = getattr(image_processor, "valid_kwargs", None)
    defaults = {name: getattr(image_processor, name, None) for name in getattr(named, "__annotations__", ())}
    versions = {name: _version(name) for name in _PACKAGES}
    base = next(cls for cls in kind.__mro__ if cls.__module__.startswith("transformers."))
    try:
        return json.dumps(
            [base.__qualname__, defaults, image_processor.to_dict(), kwargs, versions], sort_keys=True, default=_plain
        )
    except (TypeError, ValueError):
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return [type(value).__name__, value.name]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (torch.device, torch.dtype)):
        return str(value)
    raise TypeError


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
