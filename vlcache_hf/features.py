"""Features of a request's images, read from the store or computed when - and only when - they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .admission import Admission
from .hooks import HookChangesValues
from .lazy import LazyPixels
from .options import Options
from .records import RequestRecord
from .store import StoredEntry, StoreReadError
from .transfer import HostCopies
from .version import __version__

KIND = "vit"
VisionTower = Callable[[torch.Tensor, torch.Tensor, bool], Any]


@dataclass
class ImageFeatures:
    """Encoder output of one image.

    Args:
        pooled (`torch.Tensor` of shape `(T, hidden)`): one row per image token.
        deepstack (`list[torch.Tensor]`): one tensor of the same shape per DeepStack level (empty without DeepStack).
    """

    pooled: torch.Tensor
    deepstack: list[torch.Tensor]

    def rows(self, start: int, stop: int) -> ImageFeatures:
        return ImageFeatures(self.pooled[start:stop], [level[start:stop] for level in self.deepstack])

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"pooled": self.pooled, **{f"deepstack.{i}": level for i, level in enumerate(self.deepstack)}}


def entry_fields(grid: Sequence[int], tokens: int, options: Options) -> dict[str, str]:
    """What an entry says of its image beside its key. Only the grid is ever compared; the rest is for people.

    Args:
        grid (sequence of three `int`): the image's `image_grid_thw` row.
        tokens (`int`): number of its tokens.
        options (`Options`): settings of the request that stores it.
    """
    return {
        "grid": _grid(grid),
        "tokens": str(tokens),
        "model": options.model,
        "stored_by": f"vlcache_hf {__version__}",
    }


def has_grid(entry: StoredEntry, grid: Sequence[int]) -> bool:
    """Whether an entry was made from an image of this grid: a second lock on the door."""
    return entry.fields.get("grid") == _grid(grid)


def _grid(grid: Sequence[int]) -> str:
    return "x".join(map(str, grid))


@dataclass
class SourceImage:
    """A distinct image of a request; its repetitions and its beams share it.

    Args:
        key (`str`): key of what it shows under the model.
        grid (`tuple[int, ...]`): its `image_grid_thw` row.
        tokens (`int`): number of its tokens.
        patches (`slice`): its rows of `pixel_values`.
        index (`int`): which of the request's images it is, the first time.
        source (`str`): where its features came from so far: `"hit"`, `"miss"` or `"skipped"`.
    """

    key: str
    grid: tuple[int, ...]
    tokens: int
    patches: slice
    index: int = 0
    source: str = "skipped"
    features: ImageFeatures | None = None
    entry: StoredEntry | None = None
    looked_up: bool = False


@dataclass
class FeatureSource:
    """The distinct images of a request and their features.

    Args:
        pixels (`torch.Tensor` of shape `(patches, patch_values)`): the request's `pixel_values`.
        grids (`torch.Tensor` of shape `(images, 3)`): its `image_grid_thw`.
        images (`list[SourceImage]`): the distinct images.
        tower (`Callable`): runs the vision tower on given patches and grids; the third argument asks it to raise
            `HookChangesValues` when a forward hook changes values.
        options (`Options`): store and settings of the request.
        admission (`Admission`): which images are looked up and stored.
        levels (`int`): number of DeepStack levels.
        altered (`bool`): whether forward hooks changed the features, so that they belong to this request only.
    """

    pixels: torch.Tensor
    grids: torch.Tensor
    images: list[SourceImage]
    tower: VisionTower
    options: Options
    admission: Admission
    levels: int
    altered: bool = False
    _pending: list[SourceImage] = field(default_factory=list)

    def rows(self, index: int, start: int, stop: int, record: RequestRecord) -> ImageFeatures:
        """Features of the tokens `[start, stop)` of an image.

        Raises:
            `StoreReadError`: the stored features cannot be read; asking again computes them.
        """
        image = self.images[index]
        if image.features is None and image.entry is not None:
            return self._read(image, start, stop, record)
        self.ensure([index], record)
        assert image.features is not None
        return image.features.rows(start, stop)

    def look_up(self, indices: Iterable[int], record: RequestRecord) -> None:
        """Finds stored features and runs the vision tower once for all images that have none."""
        missing: list[SourceImage] = []
        for index in dict.fromkeys(indices):
            image = self.images[index]
            if image.features is not None or image.entry is not None:
                continue
            if not image.looked_up:
                image.looked_up = True
                image.entry = self._find(image) if self.admission.large_enough(image.tokens) else None
            if image.entry is not None:
                image.source = "hit"
            else:
                missing.append(image)
        if missing:
            self._compute(missing, record)

    def ensure(self, indices: Sequence[int], record: RequestRecord) -> None:
        """Brings the features of images into memory, from the store or the vision tower."""
        self.look_up(indices, record)
        again = []
        for index in indices:
            image = self.images[index]
            if image.features is None:
                try:
                    image.features = self._read(image, 0, image.tokens, record)
                except StoreReadError:
                    again.append(index)
        if again:
            self.look_up(again, record)

    def write_pending(self) -> int:
        """Stores the features that the vision tower made for this request; returns the bytes written."""
        written, store, copies = 0, self.options.store, HostCopies()
        copied: list[tuple[SourceImage, dict[str, torch.Tensor]]] = []
        for image in self._pending:
            assert image.features is not None
            tensors = {name: tensor.detach() for name, tensor in image.features.tensors().items()}
            if self.admission.stores(image.key, image.tokens, sum(tensor.nbytes for tensor in tensors.values())):
                on_cpu = {name: t if t.device.type == "cpu" else copies.copy(t) for name, t in tensors.items()}
                copied.append((image, on_cpu))
        copies.wait()
        for image, on_cpu in copied:
            fields = entry_fields(image.grid, image.tokens, self.options)
            written += store.put(KIND, image.key, image.key, on_cpu, fields)
        self._pending.clear()
        return written

    def _names(self) -> list[str]:
        return ["pooled", *(f"deepstack.{level}" for level in range(self.levels))]

    def _find(self, image: SourceImage) -> StoredEntry | None:
        entry = self.options.store.get(KIND, image.key, image.key)
        if entry is None:
            return None
        names = self._names()
        fits = (
            has_grid(entry, image.grid)
            and set(entry.keys()) == set(names)
            and all(len(entry.shape(name)) == 2 and entry.shape(name)[0] == image.tokens for name in names)
        )
        if not fits:
            self.options.store.discard(KIND, image.key, image.key)
            return None
        return entry

    def _read(self, image: SourceImage, start: int, stop: int, record: RequestRecord) -> ImageFeatures:
        assert image.entry is not None
        device = self.pixels.device
        try:
            with record.timed("loading"):
                parts = [image.entry.rows(name, start, stop) for name in self._names()]
        except StoreReadError:
            image.entry, image.source = None, "skipped"
            self.options.store.discard(KIND, image.key, image.key)
            raise
        record.bytes_read += sum(part.nbytes for part in parts)
        # a clone: what lies in the mapping must not change under the caller, nor be changed by it
        parts = [part.clone() if device.type == "cpu" else part.to(device) for part in parts]
        return ImageFeatures(parts[0], parts[1:])

    def _compute(self, missing: list[SourceImage], record: RequestRecord) -> None:
        pixels = self._patches(missing)
        grids = torch.tensor([image.grid for image in missing], dtype=self.grids.dtype, device=self.grids.device)
        try:
            if not self.altered and self._changed(missing):
                raise HookChangesValues
            with record.timed("vision"):
                output = self.tower(pixels, grids, not self.altered)
        except HookChangesValues:
            # as stock would have them, for this request only: no entry is used, and nothing is stored. The same where
            # pixels are not those that their record promised: the keys of this request belong to others
            self.altered = True
            self._pending.clear()
            for image in self.images:
                image.features = image.entry = None
            self._compute(self.images, record)
            return
        levels = getattr(output, "deepstack_features", None) or []
        for position, image in enumerate(missing):
            image.features = ImageFeatures(output.pooler_output[position], [level[position] for level in levels])
            image.source = "miss"
        if not self.altered:
            self._pending += missing

    def _patches(self, images: Sequence[SourceImage]) -> torch.Tensor:
        """Patches of some images; of pixels that are still to be computed only these are."""
        pixels = self.pixels
        if isinstance(pixels, LazyPixels) and pixels.grids is not None:
            return torch.cat([pixels.patches(image.index) for image in images])
        if sum(image.patches.stop - image.patches.start for image in images) == len(pixels):
            return pixels
        return torch.cat([pixels[image.patches] for image in images])

    def _changed(self, images: Sequence[SourceImage]) -> bool:
        pixels = self.pixels
        return isinstance(pixels, LazyPixels) and any(pixels.changed(image.index) for image in images)
