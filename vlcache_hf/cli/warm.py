"""`vlcache warm`: computes a folder of images ahead of the requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import Misuse, bar, common_options, note, plural, print_json, settings
from .models import DTYPES, images_option, load_model, model_option
from .server import remote_url
from .units import Size, printable, size_text

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@dataclass
class Totals:
    """What became of the images."""

    stored: int = 0
    present: int = 0
    failed: list[tuple[Path, str]] = field(default_factory=list)
    nbytes: int = 0
    features_only: str | None = None

    def fail(self, path: Path, why: str) -> None:
        # one line: errors of other libraries may be pages long
        why = printable(next(iter(why.strip().splitlines()), ""))
        self.failed.append((path, why))
        note(f"failed: {printable(str(path))}: {why}")


@dataclass
class Warmer:
    """A model with its processor and the conversation that the images come in.

    Args:
        model: one of our models.
        processor: its processor, which pads on the left.
        prompt (`str`): text behind the image; changes nothing of what is stored.
        system (`str`, *optional*): the system turn, which what is stored depends on.
    """

    model: Any
    processor: Any
    prompt: str
    system: str | None
    totals: Totals = field(default_factory=Totals)

    def take(self, paths: Sequence[Path]) -> None:
        """Sees to it that the images of some files are stored."""
        pictures = []
        for path in paths:
            try:
                pictures.append((path, _open(path)))
            except Exception as error:  # Pillow raises what it likes at broken files
                self.totals.fail(path, f"{type(error).__name__}: {error}")
        if pictures:
            self._compute(pictures)

    def _compute(self, pictures: Sequence[tuple[Path, Image]]) -> None:
        before = self.model.vlcache.last_request
        try:
            self._generate([picture for _, picture in pictures])
        except Exception as error:  # an image that the processor refuses, or that does not fit into memory
            if len(pictures) == 1:
                self.totals.fail(pictures[0][0], f"{type(error).__name__}: {error}")
                return
            for one in pictures:
                self._compute([one])
            return
        record = self.model.vlcache.last_request
        if record is None or record is before or len(record.images) != len(pictures):
            for path, _ in pictures:
                self.totals.fail(path, "the model did not use its cache, see the warnings above")
            return
        self.totals.nbytes += record.bytes_written
        kept: set[str] = set()
        for (path, _), image in zip(pictures, record.images):
            if self._count(path, image, record, image.key in kept):
                kept.add(image.key)

    def _generate(self, pictures: Sequence[Image]) -> None:
        before: list[dict[str, Any]] = [] if self.system is None else [_turn("system", _text(self.system))]
        conversations = [
            [*before, _turn("user", {"type": "image", "image": picture}, _text(self.prompt))] for picture in pictures
        ]
        inputs = self.processor.apply_chat_template(
            conversations,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
        self.model.generate(**inputs.to(self.model.device), max_new_tokens=1)

    def _count(self, path: Path, image: Any, record: Any, repeated: bool) -> bool:
        """Adds one image to the totals; returns whether it is in the cache now."""
        present, stored = image.kv == "exact", image.stored
        if record.in_full is not None:
            # models whose layers have no KV per token: the encoder output is all that is kept of an image
            self.totals.features_only = record.in_full
            present, stored = image.encoder == "hit", record.bytes_written > 0
        if present or repeated:
            self.totals.present += 1
        elif stored:
            self.totals.stored += 1
        else:
            self.totals.fail(path, "computed, but not stored: larger than --max-bytes, a full or read-only disk")
        return present or stored


def _turn(role: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _open(path: Path) -> Image:
    from PIL import Image

    image = Image.open(path)
    image.load()  # a truncated file shows only here
    return image  # no copy, which may lose the orientation: requests bring images as they were opened


def _batches(paths: Sequence[Path], size: int) -> Iterator[Sequence[Path]]:
    for start in range(0, len(paths), size):
        yield paths[start : start + size]


@click.command()
@common_options
@model_option
@images_option
@click.option("--prompt", default="Describe the image.", show_default=True, help="Text behind the image.")
@click.option("--system", help="The system turn that requests will have: another one is another context.")
@click.option("--namespace", help="The namespace of the entries.  [default: $VLCACHE_NAMESPACE]")
@click.option("--max-bytes", type=Size(), help="Cap on the cache.  [default: $VLCACHE_MAX_DISK_BYTES, else 64GiB]")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="That of the requests.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Images at a time.")
def warm(
    cache_dir: Path,
    as_json: bool,
    model_id: str,
    folder: Path,
    prompt: str,
    system: str | None,
    namespace: str | None,
    max_bytes: int | None,
    dtype: str,
    device: str,
    batch_size: int,
) -> None:
    """Compute a folder of images for a model, so that the first request finds them.

    Each image stands before the text, so that what is stored serves any question about it, asked with the same system
    turn, dtype and versions. A second run skips what is there. Exit status 1 when an image failed.

    Example: vlcache warm --model Qwen/Qwen3-VL-8B-Instruct --images photos/
    """
    from ..runtime import open_store

    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not paths:
        raise Misuse(f"--images {str(folder)!r} holds no images ({', '.join(SUFFIXES)}). Give a folder that does.")
    config = settings(
        cache_dir=cache_dir,
        namespace=namespace,
        max_disk_bytes=max_bytes,
        remote=remote_url(None, cache_dir),  # from the environment: its password belongs on no command line
        reuse="exact",  # an image that is there in another context is to be stored in this one too
        min_tokens=1,  # whoever asks for an image has it stored; another machine may have another threshold
        schedule=0.0,  # which leaves nothing for a schedule to decide
        write_behind=False,  # a full queue would drop entries, and here nobody waits for an answer
        max_ram_bytes=0,
        read_only=False,
    )
    try:
        open_store(config)
    except (ImportError, ValueError) as error:  # of the server
        raise Misuse(str(error)) from None
    model, processor = load_model(model_id, dtype, device, config)
    warmer, start = Warmer(model, processor, prompt, system), time.perf_counter()
    try:
        with bar(total=len(paths), desc="warming", unit="image") as progress:
            for batch in _batches(paths, batch_size):
                warmer.take(batch)
                progress.update(len(batch))
    finally:
        model.vlcache.flush()
    _report(warmer.totals, model_id, config, time.perf_counter() - start, as_json)
    if warmer.totals.failed:
        sys.exit(1)


def _report(totals: Totals, model_id: str, config: Any, seconds: float, as_json: bool) -> None:
    if totals.features_only is not None:
        note(f"Only the output of the vision tower is kept for this model: {totals.features_only}.")
    if config.max_disk_bytes is not None and totals.nbytes > config.max_disk_bytes:
        note(
            f"Warning: the images take {size_text(totals.nbytes)}, more than the cap of "
            f"{size_text(config.max_disk_bytes)}: the first of them are gone again. Raise --max-bytes."
        )
    if as_json:
        print_json(
            {
                "model": model_id,
                "cache_dir": str(config.cache_dir),
                "stored": totals.stored,
                "present": totals.present,
                "failed": [{"path": str(path), "problem": why} for path, why in totals.failed],
                "bytes_written": totals.nbytes,
                "seconds": round(seconds, 3),
            }
        )
        return
    click.echo(
        f"{plural(totals.stored, 'image')} stored, {totals.present} present, {len(totals.failed)} failed; "
        f"{size_text(totals.nbytes)} written in {seconds:.1f} s"
    )
