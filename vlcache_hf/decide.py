"""Hit, reused or miss: what is done with every image of a prompt (design section 2, "Terms")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .encoder import EncodedImages
from .features import entry_fields, has_grid
from .options import Options
from .plan import Runs, policy_runs
from .prompt import Prompt
from .records import ImageRecord
from .state import ImageUse, layer_names
from .store import StoredEntry

KIND = "kv"


@dataclass(frozen=True)
class KVShape:
    """What one token of a stored image looks like.

    Args:
        layers (`int`): decoder layers.
        heads (`int`): KV heads.
        head_dim (`int`): size of a head.
        dtype (`torch.dtype`): compute dtype, for estimates of size.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    def nbytes(self, tokens: int) -> int:
        """Bytes of an entry: 2 x layers x kv_heads x head_dim x T x itemsize."""
        return 2 * self.layers * self.heads * self.head_dim * tokens * self.dtype.itemsize

    def fits(self, entry: StoredEntry, tokens: int) -> bool:
        names = {name for layer in range(self.layers) for name in layer_names(layer)}
        # dtypes are compared with the computed rows: under autocast keys and values may have different ones
        shape = (tokens, self.heads, self.head_dim)
        return set(entry.keys()) == names and all(tuple(entry.shape(name)) == shape for name in names)


@dataclass(frozen=True)
class _Found:
    entry: StoredEntry
    name: str


def decide(
    prompt: Prompt, encoded: EncodedImages, options: Options, shape: KVShape, avoid: set[tuple[str, str]]
) -> list[ImageUse]:
    """Looks every image of a prompt up.

    Args:
        prompt (`Prompt`): the batch.
        encoded (`EncodedImages`): its images.
        options (`Options`): store, schedule and settings.
        shape (`KVShape`): what entries must look like.
        avoid (`set[tuple[str, str]]`): `(group, context)` of entries that could not be read in this request.

    Returns:
        `list[ImageUse]`: one per image, in prompt order.
    """
    sources = encoded.images
    contexts = prompt.contexts([source.key for source in sources])
    uses: list[ImageUse] = []
    tainted_row = -1  # images come row by row: the last row in which a lossy reuse stands
    captured: set[tuple[str, str]] = set()
    look_up = _LookUp(options, shape, avoid)
    for image, source, context in zip(prompt.images, sources, contexts):
        key, grid = source.key, source.grid
        group = encoded.keys.kv_group(key, prompt.layout(image))
        record = ImageRecord(image.row, image.length, layers=shape.layers, key=key)
        use = ImageUse(image, group, context, grid, "miss", ((((0, image.length),),) * shape.layers), record)
        uses.append(use)
        tainted = tainted_row == image.row
        found = look_up(group, context, image.length, grid)
        if found is not None and not image.asked:
            _hit(use, "exact", found, ((),) * shape.layers)
        elif found is None and not image.asked and options.lossy_allowed:
            names = (name for name in options.store.names(KIND, group) if name != context)
            other = next((hit for name in names if (hit := look_up(group, name, image.length, grid))), None)
            if other is not None and (tainted or not _met_before(encoded, options, group, context)):
                _hit(use, "reused", other, _recompute(options, image.length))
                tainted_row = image.row
        if use.kind == "miss":
            use.capture = (
                found is None
                and not tainted
                and (group, context) not in captured
                and options.store.accepts(shape.nbytes(image.length))
            )
            if use.capture:
                captured.add((group, context))
        record.kv = use.kind
        record.recomputed = sum(b - a for runs in use.recompute for a, b in runs)
    return uses


def _hit(use: ImageUse, kind: str, found: _Found, recompute: tuple[Runs, ...]) -> None:
    use.kind, use.entry, use.entry_name, use.recompute = kind, found.entry, found.name, recompute


def _recompute(options: Options, tokens: int) -> tuple[Runs, ...]:
    counts: Sequence[int] = options.schedule.tokens(tokens)
    return tuple(policy_runs(options.config.policy, count, tokens) for count in counts)


class _LookUp:
    """Opens each entry once per request, however many beams and rows share it."""

    def __init__(self, options: Options, shape: KVShape, avoid: set[tuple[str, str]]) -> None:
        self._options, self._shape = options, shape
        self._found: dict[tuple[str, str], _Found | None] = {key: None for key in avoid}

    def __call__(self, group: str, name: str, tokens: int, grid: tuple[int, ...]) -> _Found | None:
        if (group, name) not in self._found:
            entry = self._options.store.get(KIND, group, name)
            if entry is not None and not (has_grid(entry, grid) and self._shape.fits(entry, tokens)):
                self._options.store.discard(KIND, group, name)
                entry = None
            self._found[group, name] = None if entry is None else _Found(entry, name)
        return self._found[group, name]


def _met_before(encoded: EncodedImages, options: Options, group: str, context: str) -> bool:
    """Whether an earlier request reused the image in this very context: then it is worth computing once in full."""
    if options.config.read_only or (group, context) in encoded.contexts_met:
        return False
    return options.store.marked(f"{group}/{context}")


def remember(uses: Sequence[ImageUse], encoded: EncodedImages, options: Options) -> None:
    """Marks the contexts that were met with a lossy reuse, for promotion at their next meeting."""
    for use in uses:
        if use.kind == "reused" and (use.group, use.context) not in encoded.contexts_met:
            encoded.contexts_met.add((use.group, use.context))
            if not options.config.read_only:
                options.store.mark(f"{use.group}/{use.context}")


def store_captured(uses: Sequence[ImageUse], options: Options) -> int:
    """Writes the KV of captured images; returns the bytes written."""
    written = 0
    for use in uses:
        if not use.capture or len(use.captured) != use.record.layers:
            continue
        tensors = {
            name: tensor for layer, pair in enumerate(use.captured) for name, tensor in zip(layer_names(layer), pair)
        }
        size = options.store.put(
            KIND,
            use.group,
            use.context,
            tensors,
            entry_fields(use.grid, use.image.length, options),
            max_in_group=options.config.contexts_per_image,
        )
        use.record.stored = size > 0
        use.captured.clear()
        written += size
    return written
