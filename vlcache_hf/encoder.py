"""The encoder output of a request, read from the store or computed when - and only when - it is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .hooks import HookChangesValues
from .keys import ModelKeys, pixel_digest
from .options import Options
from .records import ImageRecord, RequestRecord
from .store import Entry, StoreReadError

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


def grid_fields(grid: Sequence[int]) -> dict[str, str]:
    """What an entry says of its image beside its key, compared when it is found: a second lock on the door."""
    return {"grid": "x".join(map(str, grid))}


@dataclass
class _Image:
    """A distinct image of a request; its repetitions and its beams share it."""

    key: str
    grid: tuple[int, ...]
    tokens: int
    patches: slice
    features: ImageFeatures | None = None
    entry: Entry | None = None
    source: str = "skipped"
    looked_up: bool = False


@dataclass
class _Shared:
    """What all expanded views of one request's images hold together."""

    pixels: torch.Tensor
    grids: torch.Tensor
    images: list[_Image]
    tower: VisionTower
    options: Options
    levels: int
    pending: dict[int, ImageFeatures] = field(default_factory=dict)
    altered: bool = False


class EncodedImages:
    """Stands in for the vision tower's output in `mm_encoder_outputs["image"]`.

    Reading `pooler_output` or `deepstack_features`, as the stock model does, brings the features of all images; the
    packed prefill asks for the rows it needs and for nothing on an exact hit.

    Args:
        owner (`VLCacheRuntime`): of the model that this was made for; to other models it is foreign features.
        keys (`ModelKeys`): state of the model.
        pixels (`torch.Tensor` of shape `(patches, patch_values)`): the request's `pixel_values`.
        grids (`torch.Tensor` of shape `(images, 3)`): its `image_grid_thw`.
        merge (`int`): patches per image token.
        tower (`Callable`): runs the vision tower on given patches and grids; the third argument asks it to raise
            `HookChangesValues` when a forward hook changes values.
        options (`Options`): store and settings of the request.
        levels (`int`): number of DeepStack levels.
    """

    # not a tensor container: accelerate's hooks must neither walk into it nor move it
    last_hidden_state = hidden_states = attentions = None

    def __init__(
        self,
        owner: Any,
        keys: ModelKeys,
        pixels: torch.Tensor,
        grids: torch.Tensor,
        merge: int,
        tower: VisionTower,
        options: Options,
        levels: int,
    ) -> None:
        record = RequestRecord()
        distinct: dict[str, int] = {}
        images: list[_Image] = []
        order, start = [], 0
        for grid in grids.tolist():
            patches = slice(start, start + grid[0] * grid[1] * grid[2])
            start = patches.stop
            with record.timed("hashing"):
                key = keys.image(pixel_digest(pixels[patches], grid))
            if key not in distinct:
                distinct[key] = len(images)
                images.append(_Image(key, tuple(grid), (patches.stop - patches.start) // merge, patches))
            order.append(distinct[key])
        self.owner = owner
        self.keys = keys
        self.contexts_met: set[tuple[str, str]] = set()
        self.planned: Any = None
        self.record = record
        self._done = False
        self._shared = _Shared(pixels, grids, images, tower, options, levels)
        self._order = order

    def __deepcopy__(self, memo: dict[int, Any]) -> EncodedImages:
        return self  # candidate generators copy their inputs; the content never changes

    def __len__(self) -> int:
        return len(self._order)

    @property
    def options(self) -> Options:
        return self._shared.options

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each image, in prompt order."""
        return [self._shared.images[i].tokens for i in self._order]

    @property
    def grids(self) -> list[tuple[int, ...]]:
        return [self._shared.images[i].grid for i in self._order]

    @property
    def image_keys(self) -> list[str]:
        return [self._shared.images[i].key for i in self._order]

    @property
    def altered(self) -> bool:
        """Whether forward hooks changed the features, so that they belong to this request only."""
        return self._shared.altered

    def source(self, index: int) -> str:
        """Where the features of an image came from so far: `"hit"`, `"miss"` or `"skipped"`."""
        return self._shared.images[self._order[index]].source

    def expanded(self, order: Sequence[int]) -> EncodedImages:
        """The same images in another order, with repetitions, as beams need them; features are shared."""
        other = object.__new__(EncodedImages)
        other.__dict__.update(self.__dict__)
        other._order = [self._order[i] for i in order]
        return other

    def begin(self) -> None:
        """Starts the record of one forward; what was measured since the last one, hashing first of all, stays in."""
        if self._done:
            self.record = RequestRecord()
        self._done = True

    def take_planned(self) -> Any:
        """A plan made ahead of the forward, once."""
        planned, self.planned = self.planned, None
        return planned

    def note_in_full(self) -> None:
        """Fills the record of a request whose language model computed everything."""
        self.record.images = [
            ImageRecord(row=0, tokens=tokens, encoder=self.source(index), recomputed=tokens, layers=1, key=key)
            for index, (tokens, key) in enumerate(zip(self.lengths, self.image_keys))
        ]

    def materialized(self, output_class: type) -> Any:
        """The features of all images as the stock model's own output class."""
        pooled, levels = self.pooler_output, self.deepstack_features
        return output_class(pooler_output=pooled, **({"deepstack_features": levels} if levels else {}))

    # --- features

    def rows(self, index: int, start: int, stop: int) -> ImageFeatures:
        """Features of the tokens `[start, stop)` of an image.

        Raises:
            `StoreReadError`: the stored features cannot be read; asking again computes them.
        """
        image = self._shared.images[self._order[index]]
        if image.features is None and image.entry is not None:
            return self._read(image, start, stop)
        self.ensure([index])
        assert image.features is not None
        return image.features.rows(start, stop)

    def look_up(self, indices: Sequence[int]) -> None:
        """Finds stored features and runs the vision tower once for all images that have none."""
        missing: list[int] = []
        for i in dict.fromkeys(self._order[index] for index in indices):
            image = self._shared.images[i]
            if image.features is not None or image.entry is not None:
                continue
            if not image.looked_up:
                image.looked_up = True
                image.entry = self._find(image)
            if image.entry is not None:
                image.source = "hit"
            else:
                missing.append(i)
        if missing:
            self._compute(missing)

    def ensure(self, indices: Sequence[int]) -> None:
        """Brings the features of images into memory, from the store or the vision tower."""
        self.look_up(indices)
        again = []
        for index in indices:
            image = self._shared.images[self._order[index]]
            if image.features is None:
                try:
                    image.features = self._read(image, 0, image.tokens)
                except StoreReadError:
                    again.append(index)
        if again:
            self.look_up(again)

    def _find(self, image: _Image) -> Entry | None:
        entry = self._shared.options.store.get(KIND, image.key, image.key)
        if entry is None:
            return None
        names = {"pooled", *(f"deepstack.{level}" for level in range(self._shared.levels))}
        fits = (
            entry.fields == grid_fields(image.grid)
            and set(entry.keys()) == names
            and all(len(entry.shape(name)) == 2 and entry.shape(name)[0] == image.tokens for name in names)
        )
        if not fits:
            self._shared.options.store.discard(KIND, image.key, image.key)
            return None
        return entry

    def _read(self, image: _Image, start: int, stop: int) -> ImageFeatures:
        assert image.entry is not None
        device = self._shared.pixels.device
        try:
            with self.record.timed("loading"):
                parts = [
                    image.entry.rows(name, start, stop)
                    for name in ("pooled", *(f"deepstack.{level}" for level in range(self._shared.levels)))
                ]
        except StoreReadError:
            image.entry, image.source = None, "skipped"
            self._shared.options.store.discard(KIND, image.key, image.key)
            raise
        self.record.bytes_read += sum(part.numel() * part.element_size() for part in parts)
        # a clone: what lies in the mapping must not change under the caller, nor be changed by it
        parts = [part.clone() if device.type == "cpu" else part.to(device) for part in parts]
        return ImageFeatures(parts[0], parts[1:])

    def _compute(self, missing: list[int]) -> None:
        shared = self._shared
        slices = [shared.images[i].patches for i in missing]
        pixels = shared.pixels
        if sum(part.stop - part.start for part in slices) != len(pixels):
            pixels = torch.cat([pixels[part] for part in slices])
        grids = torch.tensor([shared.images[i].grid for i in missing], device=shared.grids.device)
        try:
            with self.record.timed("vision"):
                output = shared.tower(pixels, grids.to(shared.grids.dtype), not shared.altered)
        except HookChangesValues:
            # as stock would have them, for this request only: no entry is used, and nothing is stored
            shared.altered = True
            shared.pending.clear()
            for image in shared.images:
                image.features = image.entry = None
            self._compute(list(range(len(shared.images))))
            return
        levels = getattr(output, "deepstack_features", None) or []
        for position, i in enumerate(missing):
            features = ImageFeatures(output.pooler_output[position], [level[position] for level in levels])
            shared.images[i].features = features
            shared.images[i].source = "miss"
            if not shared.altered:
                shared.pending[i] = features

    def write_pending(self) -> int:
        """Stores the features that the vision tower made for this request; returns the bytes written."""
        written, store = 0, self._shared.options.store
        for i, features in self._shared.pending.items():
            key, tensors = self._shared.images[i].key, features.tensors()
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            if store.accepts(nbytes):
                host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
                written += store.put(KIND, key, key, host, grid_fields(self._shared.images[i].grid))
        self._shared.pending.clear()
        return written

    # --- what the stock model reads

    def _all(self) -> list[ImageFeatures]:
        self.ensure(range(len(self)))
        features = [self._shared.images[i].features for i in self._order]
        return [f for f in features if f is not None]

    @property
    def pooler_output(self) -> tuple[torch.Tensor, ...]:
        return tuple(features.pooled for features in self._all())

    def to_tuple(self) -> tuple[Any, ...]:
        """What a `ModelOutput` with these features would give."""
        levels = self.deepstack_features
        return (self.pooler_output, levels) if levels else (self.pooler_output,)

    @property
    def deepstack_features(self) -> list[tuple[torch.Tensor, ...]]:
        features = self._all()
        return [tuple(f.deepstack[level] for f in features) for level in range(self._shared.levels)]
