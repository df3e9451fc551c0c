"""Hit, reused or miss: what is done with every image of a prompt (design section 2, "Terms")."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .encoder import EncodedImages
from .features import SourceImage, entry_fields, has_grid
from .image_use import ImageUse
from .options import Options
from .plan import Runs
from .policies import EncoderOnly, checked_runs
from .precision import KVShape, stored_error
from .prompt import Prompt, PromptImage
from .records import ImageRecord
from .store import StoredEntry
from .watch import with_probe

KIND = "kv"


@dataclass(frozen=True)
class _Found:
    entry: StoredEntry
    name: str


def decide(
    prompt: Prompt,
    encoded: EncodedImages,
    options: Options,
    shape: KVShape,
    avoid: set[tuple[str, str]],
    refused: frozenset[tuple[str, str]] = frozenset(),
) -> list[ImageUse]:
    """Looks every image of a prompt up.

    Args:
        prompt (`Prompt`): the batch.
        encoded (`EncodedImages`): its images.
        options (`Options`): store, schedule and settings.
        shape (`KVShape`): what entries must look like.
        avoid (`set[tuple[str, str]]`): `(group, context)` of entries that could not be read in this request.
        refused (`frozenset[tuple[str, str]]`, *optional*):
            `(group, context)` in which nothing of another context may be reused: there it differs too much.

    Returns:
        `list[ImageUse]`: one per image, in prompt order.
    """
    decision = _Decision(prompt, encoded, options, shape, avoid, refused)
    uses = decision.uses()
    while decision.rows_to_promote - decision.in_full:
        decision.in_full |= decision.rows_to_promote
        uses = decision.uses()
    return uses


class _Decision:
    """One pass, or two: behind KV stored in 8 bits nothing is stored, so a row in which an image has been met behind
    it before is decided once more with all its exact hits computed in full."""

    def __init__(
        self,
        prompt: Prompt,
        encoded: EncodedImages,
        options: Options,
        shape: KVShape,
        avoid: set[tuple[str, str]],
        refused: frozenset[tuple[str, str]],
    ) -> None:
        self._refused = refused
        self._prompt, self._encoded, self._options, self._shape = prompt, encoded, options, shape
        self._look_up = _LookUp(options, shape, avoid)
        self._images_in = Counter(image.row for image in prompt.images)
        self._contexts = prompt.contexts([source.key for source in encoded.images])
        self.in_full: set[int] = set()
        self.rows_to_promote: set[int] = set()

    def uses(self) -> list[ImageUse]:
        uses: list[ImageUse] = []
        captured: set[tuple[str, str]] = set()
        tainting: ImageUse | None = None  # images come row by row: the last one with a loss
        for image, source, context in zip(self._prompt.images, self._encoded.images, self._contexts):
            use = self._miss(image, source, context)
            uses.append(use)
            if tainting is not None and tainting.image.row != image.row:
                tainting = None
            found = self._choose(use, tainting)
            if use.lossy:
                tainting = use
            at = (use.group, context)
            stores = use.kind == "miss" and found is None and tainting is None and at not in captured
            if stores and not isinstance(self._options.policy, EncoderOnly):
                use.capture = self._encoded.admission.stores(use.group, image.length, self._shape.nbytes(image.length))
                captured |= {at} if use.capture else set()
            use.record.kv = use.kind
            use.count_recomputed()
        return uses

    def _miss(self, image: PromptImage, source: SourceImage, context: str) -> ImageUse:
        group = self._encoded.keys.kv_group(source.key, self._prompt.layout(image), self._shape.storage)
        layers = self._shape.layers
        record = ImageRecord(image.row, image.length, layers=layers, key=source.key)
        everything = (((0, image.length),),) * layers
        return ImageUse(image, group, context, source.grid, "miss", everything, record, self._shape)

    def _choose(self, use: ImageUse, tainting: ImageUse | None) -> _Found | None:
        """Makes a hit of what can be one; returns the entry of the image's own context, used or not."""
        image, options = use.image, self._options
        if not self._encoded.admission.large_enough(image.length) or isinstance(options.policy, EncoderOnly):
            return None
        found = self._look_up(use.group, use.context, image.length, use.grid)
        if image.asked:
            return found
        if found is not None:
            if self._shape.exact or image.row not in self.in_full:
                _hit(use, "exact", found, ((),) * self._shape.layers)
            return found
        if tainting is not None and tainting.kind == "exact" and self._met_before(use):
            self.rows_to_promote.add(image.row)
        if self._lossy_allowed(image.row) and (use.group, use.context) not in self._refused:
            names = (name for name in options.store.names(KIND, use.group) if name != use.context)
            hits = (self._look_up(use.group, name, image.length, use.grid) for name in names)
            other = next((hit for hit in hits if hit is not None), None)
            if other is not None and (tainting is not None or not self._met_before(use)):
                _hit(use, "reused", other, _recompute(options, image.length))
        return None

    def _lossy_allowed(self, row: int) -> bool:
        """Whether an image of a row may be reused from another context. Not by default where the row has several: KV
        says which of them an image is, and reuse then mixes them up (measured in benchmarks/accuracy)."""
        return self._options.lossy_allowed and (self._options.config.lossy_multi_image or self._images_in[row] == 1)

    def _met_before(self, use: ImageUse) -> bool:
        """Whether an earlier request met the image in this very context, with a loss: then it is worth computing once
        in full."""
        if self._options.config.read_only or (use.group, use.context) in self._encoded.contexts_met:
            return False
        return self._options.store.marked(f"{use.group}/{use.context}")


def _hit(use: ImageUse, kind: str, found: _Found, recompute: tuple[Runs, ...]) -> None:
    use.kind, use.entry, use.entry_name, use.recompute = kind, found.entry, found.name, recompute
    use.record.storage, use.record.storage_error = use.shape.storage, stored_error(found.entry.fields)


def guarded(options: Options, runs: tuple[Runs, ...], tokens: int) -> tuple[Runs, ...]:
    """What is recomputed of a reused image: what the policy says, and the guard's sample.

    Args:
        options (`Options`): guard and settings.
        runs (`tuple[Runs, ...]`): the policy's tokens at each layer.
        tokens (`int`): tokens of the image.
    """
    return runs if options.config.guard == "off" else with_probe(runs, tokens)


def _recompute(options: Options, tokens: int) -> tuple[Runs, ...]:
    return guarded(options, checked_runs(options.policy, options.schedule.tokens(tokens), tokens), tokens)


def _fits(entry: StoredEntry, shape: KVShape, tokens: int) -> bool:
    # dtypes are compared with the computed rows: under autocast keys and values may have different ones
    wanted = shape.shapes(tokens)
    return set(entry.keys()) == set(wanted) and all(tuple(entry.shape(name)) == wanted[name] for name in wanted)


class _LookUp:
    """Opens each entry once per request, however many beams and rows share it."""

    def __init__(self, options: Options, shape: KVShape, avoid: set[tuple[str, str]]) -> None:
        self._options, self._shape = options, shape
        self._found: dict[tuple[str, str], _Found | None] = {key: None for key in avoid}

    def __call__(self, group: str, name: str, tokens: int, grid: tuple[int, ...]) -> _Found | None:
        if (group, name) not in self._found:
            entry = self._options.store.get(KIND, group, name)
            if entry is not None and not (has_grid(entry, grid) and _fits(entry, self._shape, tokens)):
                self._options.store.discard(KIND, group, name)
                entry = None
            self._found[group, name] = None if entry is None else _Found(entry, name)
        return self._found[group, name]


def remember(uses: Sequence[ImageUse], encoded: EncodedImages, options: Options) -> None:
    """Marks the contexts that were met with a loss and have no entry, for promotion at their next meeting."""
    lossy_row = -1
    for use in uses:
        behind = lossy_row == use.image.row
        if use.lossy:
            lossy_row = use.image.row
        unstored = use.kind == "reused" or (use.kind == "miss" and behind and not use.image.asked)
        if unstored and (use.group, use.context) not in encoded.contexts_met:
            encoded.contexts_met.add((use.group, use.context))
            if not options.config.read_only:
                options.store.mark(f"{use.group}/{use.context}")


def store_captured(uses: Sequence[ImageUse], options: Options) -> int:
    """Writes the KV of captured images; returns the bytes written."""
    written = 0
    for use in uses:
        if not use.capture or len(use.captured) != len(use.shape.shapes(0)):
            continue
        use.copies.wait()
        fields = entry_fields(use.grid, use.image.length, options)
        if not use.shape.exact:
            use.record.storage, use.record.storage_error = use.shape.storage, use.error.value()
            fields |= {"storage": use.shape.storage, "error": f"{use.record.storage_error:.3e}"}
        size = options.store.put(
            KIND,
            use.group,
            use.context,
            dict(use.captured),
            fields,
            max_in_group=options.config.contexts_per_image,
        )
        use.record.stored = size > 0
        use.captured.clear()
        written += size
    return written
