"""What stands in for the vision tower's output on its way through `generate()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .admission import Admission
from .features import FeatureSource, ImageFeatures, SourceImage, VisionTower
from .keys import ModelKeys, pixel_digest
from .lazy import LazyPixels
from .options import Options
from .records import ImageRecord, RequestRecord


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
        images: list[SourceImage] = []
        order, start = [], 0
        lazy = pixels if isinstance(pixels, LazyPixels) and pixels.grids == grids.tolist() else None
        for index, grid in enumerate(grids.tolist()):
            patches = slice(start, start + grid[0] * grid[1] * grid[2])
            start = patches.stop
            with record.timed("hashing"):
                key = keys.image(pixel_digest(pixels[patches], grid) if lazy is None else lazy.digest(index))
            if key not in distinct:
                distinct[key] = len(images)
                images.append(SourceImage(key, tuple(grid), (patches.stop - patches.start) // merge, patches, index))
            order.append(distinct[key])
        self.owner = owner
        self.keys = keys
        self.options = options
        self.admission = Admission(options)
        self.contexts_met: set[tuple[str, str]] = set()
        self.planned: Any = None
        self.record = record
        self._done = False
        self._source = FeatureSource(pixels, grids, images, tower, options, self.admission, levels)
        self._order = order

    def __deepcopy__(self, memo: dict[int, Any]) -> EncodedImages:
        return self  # candidate generators copy their inputs; the content never changes

    def __len__(self) -> int:
        return len(self._order)

    @property
    def images(self) -> list[SourceImage]:
        """The images in prompt order; beams and repetitions share objects."""
        return [self._source.images[i] for i in self._order]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each image, in prompt order."""
        return [image.tokens for image in self.images]

    @property
    def altered(self) -> bool:
        """Whether forward hooks changed the features, so that they belong to this request only."""
        return self._source.altered

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
            ImageRecord(0, image.tokens, encoder=image.source, recomputed=image.tokens, layers=1, key=image.key)
            for image in self.images
        ]

    def materialized(self, output_class: type) -> Any:
        """The features of all images as the stock model's own output class."""
        pooled, levels = self.pooler_output, self.deepstack_features
        return output_class(pooler_output=pooled, **({"deepstack_features": levels} if levels else {}))

    def rows(self, index: int, start: int, stop: int) -> ImageFeatures:
        """Features of the tokens `[start, stop)` of an image.

        Raises:
            `StoreReadError`: the stored features cannot be read; asking again computes them.
        """
        return self._source.rows(self._order[index], start, stop, self.record)

    def look_up(self, indices: Sequence[int]) -> None:
        """Finds stored features and runs the vision tower once for all images that have none."""
        self._source.look_up([self._order[index] for index in indices], self.record)

    def write_pending(self) -> int:
        """Stores the features that the vision tower made for this request; returns the bytes written."""
        return self._source.write_pending()

    # --- what the stock model reads

    def _all(self) -> list[ImageFeatures]:
        self._source.ensure(self._order, self.record)
        return [image.features for image in self.images if image.features is not None]

    @property
    def pooler_output(self) -> tuple[torch.Tensor, ...]:
        return tuple(features.pooled for features in self._all())

    @property
    def deepstack_features(self) -> list[tuple[torch.Tensor, ...]]:
        features = self._all()
        return [tuple(f.deepstack[level] for f in features) for level in range(self._source.levels)]

    def to_tuple(self) -> tuple[Any, ...]:
        """What a `ModelOutput` with these features would give."""
        levels = self.deepstack_features
        return (self.pooler_output, levels) if levels else (self.pooler_output,)
