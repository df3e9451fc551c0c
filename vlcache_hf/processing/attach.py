"""An image processor that knows images when it sees them, and how a processor gets it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoProcessor, BatchFeature
from transformers.image_utils import make_flat_list_of_images

from ..config import VLCacheConfig
from ..lazy import LazyPixels, PixelPart
from ..runtime import open_store
from .known import KnownImage, KnownImages
from .sources import decoded, fetch, kept, settings_digest, source_digest


class ProcessorCache:
    """What the fast path holds beside an image processor: `processor.image_processor.vlcache`.

    Copies of the processor share it, pickles take the settings along and start anew.

    Args:
        config (`VLCacheConfig`): store and namespace.

    Attributes:
        known (`int`), processed (`int`): images recognised, and images that the stock code processed.
    """

    def __init__(self, config: VLCacheConfig) -> None:
        self.config = config
        self.store = open_store(config)
        self.images = KnownImages(self.store, config.namespace)
        self.known = self.processed = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessorCache, (self.config,)

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessorCache:
        return self  # `to_dict` copies everything that a processor holds

    def flush(self) -> None:
        """Waits until everything that is known is written."""
        self.store.flush()


class FastImageProcessing:
    """Mixed into an image processor: what is known is not decoded, resized or cut into patches."""

    vlcache: ProcessorCache

    def fetch_images(self, image_url_or_urls: Any) -> Any:
        """As the stock method, but files are only opened; they are decoded when somebody needs their pixels."""
        if isinstance(image_url_or_urls, (list, tuple)):
            return [self.fetch_images(image) for image in image_url_or_urls]
        opened = fetch(image_url_or_urls) if isinstance(image_url_or_urls, (str, bytes)) else None
        return super().fetch_images(image_url_or_urls) if opened is None else opened  # type: ignore[misc]

    def _prepare_images_structure(self, images: Any, *args: Any, **kwargs: Any) -> Any:
        # where the stock code begins, also for callers of `preprocess`: what `fetch_images` only opened is decoded
        return self._decoded(super()._prepare_images_structure(images, *args, **kwargs))  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        """As the stock method: what is saved knows nothing of the fast path."""
        plain = dict(super().to_dict())  # type: ignore[misc]
        plain.pop("vlcache", None)
        return plain

    def __reduce__(self) -> tuple[Any, ...]:
        stock = next(base for base in type(self).__mro__ if base in _fast_classes())
        return _revive, (stock, self.__dict__.copy())

    def __call__(self, images: Any, *args: Any, **kwargs: Any) -> Any:
        images = self.fetch_images(images)
        flat: list[Any] = [*make_flat_list_of_images(images)]  # type: ignore[misc]
        settings = None if args or not _plain_request(kwargs) else settings_digest(self, kwargs)
        # an array of four dimensions among them is several images, or an error
        if settings is None or not flat or any(getattr(image, "ndim", 3) != 3 for image in flat):
            return self._stock(len(flat), images, *args, **kwargs)
        sources = [source_digest(image) for image in flat]
        keys = [None if source is None else self.vlcache.images.key(source, settings) for source in sources]
        known = [None if key is None else self.vlcache.images.find(key) for key in keys]
        if all(item is None for item in keys):
            return self._stock(len(flat), images, **kwargs)
        parts: list[PixelPart | None] = [
            None if item is None or key is None else self._part(key, item, kept(image), kwargs)
            for key, item, image in zip(keys, known, flat)
        ]
        missing = [index for index, part in enumerate(parts) if part is None]
        if missing:
            for index, part in zip(missing, self._process(missing, keys, flat, kwargs)):
                parts[index] = part
        self.vlcache.known += len(parts) - len(missing)
        whole = [part for part in parts if part is not None]
        grids = torch.tensor([part.grid for part in whole])
        return BatchFeature({"pixel_values": LazyPixels(whole), "image_grid_thw": grids})

    def _process(
        self, missing: Sequence[int], keys: Sequence[str | None], images: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[PixelPart]:
        """Runs the stock code for images that are not known, all in one call."""
        output = self._stock(len(missing), [images[index] for index in missing], **kwargs)
        pixels, parts, start = output["pixel_values"], [], 0
        for index, grid in zip(missing, output["image_grid_thw"].tolist()):
            stop = start + grid[0] * grid[1] * grid[2]
            item = KnownImage(tuple(grid), pixels.shape[1], pixels.dtype)
            parts.append(self._part(keys[index], item, images[index], kwargs, pixels[start:stop]))
            start = stop
        return parts

    def _part(
        self,
        key: str | None,
        item: KnownImage,
        image: Any,
        kwargs: dict[str, Any],
        pixels: torch.Tensor | None = None,
    ) -> PixelPart:
        images = self.vlcache.images

        def learned(digests: dict[str, str], anew: bool) -> None:
            item.digests = digests if anew else {**item.digests, **digests}
            if key is not None:
                images.learn(key, item)

        def compute() -> torch.Tensor:
            if pixels is not None:
                return pixels
            return self._stock(1, self._decoded([image]), **kwargs)["pixel_values"]

        return PixelPart(item.grid, item.width, item.dtype, dict(item.digests), compute, learned)

    def _decoded(self, images: Sequence[Any]) -> list[Any]:
        load = super().fetch_images  # type: ignore[misc]
        return [decoded(image, load) for image in images]

    def _stock(self, count: int, images: Any, *args: Any, **kwargs: Any) -> Any:
        self.vlcache.processed += count
        return super().__call__(images, *args, **kwargs)  # type: ignore[misc]


def _revive(stock: type, attributes: dict[str, Any]) -> Any:
    """A copy, for `pickle` and `copy`: the classes of the fast path are made when they are needed."""
    fast: Any = _fast_classes()[stock]
    image_processor = fast.__new__(fast)
    image_processor.__dict__.update(attributes)
    return image_processor


def _plain_request(kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for torch tensors on the CPU, as nearly all do."""
    tensors, device = kwargs.get("return_tensors"), kwargs.get("device")
    return getattr(tensors, "value", tensors) in (None, "pt") and str(device or "cpu") == "cpu"


def _fast_class(stock: type) -> type:
    fast = type(stock.__name__, (FastImageProcessing, stock), {"__module__": __name__, "__doc__": stock.__doc__})
    fast.__qualname__ = f"FastImageProcessing[{stock.__name__}]"
    return fast


@functools.cache
def _fast_classes() -> dict[type, type]:
    """The image processors of the supported models: one needs torchvision, one does not."""
    classes = []
    for module, name in (
        ("image_processing_qwen2_vl", "Qwen2VLImageProcessor"),
        ("image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
    ):
        try:
            classes.append(getattr(importlib.import_module(f"transformers.models.qwen2_vl.{module}"), name))
        except ImportError:
            continue
    return {stock: _fast_class(stock) for stock in classes}


def attach_processor(processor: Any, vlcache_config: VLCacheConfig | dict[str, Any] | None = None) -> Any:
    """Gives a Qwen2.5-VL or Qwen3-VL processor the fast path, in place.

    What it returns as `pixel_values` then is a `LazyPixels`: to the models of this library a handle, to everybody else
    a tensor that is computed when it is used. An image is recognised by the digest of its encoded bytes (path, URL,
    base64, bytes) or of its pixels (PIL image, array) together with every setting of the processor.

    Args:
        processor (`ProcessorMixin`): the processor.
        vlcache_config (`VLCacheConfig` or `dict`, *optional*):
            Where it remembers images; best that of the model. `cache_dir`, `namespace` and what concerns the store
            count.

    Returns:
        The processor.

    Raises:
        `TypeError`: it is a processor of another kind.
    """
    image_processor: Any = getattr(processor, "image_processor", None)
    fast = _fast_classes()
    stock = next((base for base in type(image_processor).__mro__ if base in fast), None)
    if stock is None or type(image_processor) not in (stock, fast[stock]):
        raise TypeError(
            f"`attach_processor` takes processors of Qwen2.5-VL and Qwen3-VL, got {type(processor).__name__} with "
            f"{type(image_processor).__name__}."
        )
    image_processor.__class__ = fast[stock]
    image_processor.vlcache = ProcessorCache(VLCacheConfig.from_any(vlcache_config))
    return processor


class VLCacheProcessor:
    """`AutoProcessor` with the fast path."""

    def __init__(self) -> None:
        raise TypeError("Use `VLCacheProcessor.from_pretrained(...)`, or `attach_processor(processor)`.")

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: Any,
        *args: Any,
        vlcache_config: VLCacheConfig | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `AutoProcessor.from_pretrained`, whose arguments it takes.

        Args:
            vlcache_config (`VLCacheConfig` or `dict`, *optional*): see `attach_processor`.
        """
        processor = AutoProcessor.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        return attach_processor(processor, vlcache_config)
