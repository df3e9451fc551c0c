"""Counts and tables of entries, wherever they are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from ..store.paths import KINDS
from .common import plural
from .entries import Details, Found
from .units import printable, size_text, time_json, time_text

if TYPE_CHECKING:
    from ..store.remote_admin import Listed

AnyEntry: TypeAlias = "Found | Listed"

# digits of the digests in a table: enough to tell entries apart, --json has them in full
_DIGITS = 8
_MODEL_WIDTH = 40


def tally(entries: Sequence[AnyEntry]) -> dict[str, Any]:
    """Counts entries by kind; the entries of an image under a model share their group."""
    kinds = {}
    for kind in KINDS:
        chosen = [entry for entry in entries if entry.kind == kind]
        kinds[kind] = {
            "entries": len(chosen),
            "images": len({entry.group for entry in chosen}),
            "bytes": sum(entry.nbytes for entry in chosen),
        }
    used = _uses(entries)
    return {
        "entries": len(entries),
        "bytes": sum(entry.nbytes for entry in entries),
        "oldest_use": time_json(min(used, default=None)),
        "newest_use": time_json(max(used, default=None)),
        "kinds": kinds,
    }


def by_model(described: Sequence[tuple[AnyEntry, Details]]) -> dict[str, list[AnyEntry]]:
    """The entries of each model, the one with the most bytes first. Entries that cannot be read are left out."""
    models: dict[str, list[AnyEntry]] = {}
    for entry, header in described:
        if header.problem is None:
            models.setdefault(header.model, []).append(entry)
    return dict(sorted(models.items(), key=lambda item: -sum(entry.nbytes for entry in item[1])))


def print_lines(document: Mapping[str, Any], entries: Sequence[AnyEntry]) -> None:
    """The lines of `vlcache info` that are the same for a folder and a server."""
    kinds = ", ".join(
        f"{plural(kind['entries'], f'{name} entry')} of {plural(kind['images'], 'image')} ({size_text(kind['bytes'])})"
        for name, kind in document["kinds"].items()
    )
    print_line("entries", kinds)
    used = _uses(entries)
    if used:
        print_line("last use", f"{time_text(min(used))} (oldest) to {time_text(max(used))} (newest)")


def print_line(label: str, text: str) -> None:
    click.echo(f"{label:<12}{text}")


def print_models(models: Mapping[str, Sequence[AnyEntry]]) -> None:
    """A row for each model."""
    if not models:
        return
    click.echo(f"\n{'MODEL':<{_MODEL_WIDTH}} {'KV':>7} {'IMAGES':>7} {'VIT':>7} {'BYTES':>10}  LAST USE")
    for model, entries in models.items():
        count = tally(entries)
        kv, vit = count["kinds"]["kv"], count["kinds"]["vit"]
        click.echo(
            f"{printable(model, _MODEL_WIDTH):<{_MODEL_WIDTH}} {kv['entries']:>7} {kv['images']:>7} "
            f"{vit['entries']:>7} {size_text(count['bytes']):>10}  {time_text(max(_uses(entries), default=None))}"
        )


def print_rows(
    described: Sequence[tuple[AnyEntry, Details]], total: int, expiries: Sequence[str] | None = None
) -> None:
    """A row for each entry.

    Args:
        described (`Sequence[tuple[AnyEntry, Details]]`): the entries that are shown.
        total (`int`): how many there are.
        expiries (`Sequence[str]`, *optional*): when each of them expires.
    """
    cells = [""] * len(described) if expiries is None else [f" {text:<8}" for text in expiries]
    extra, width = ("", _MODEL_WIDTH) if expiries is None else (f" {'EXPIRES':<8}", _MODEL_WIDTH - 9)
    if described:
        click.echo(
            f"KIND {'GROUP/NAME':<{2 * _DIGITS + 1}} {'TOKENS':>7} {'BYTES':>10}  {'LAST USE':<16}{extra} MODEL",
        )
    for (entry, header), cell in zip(described, cells):
        what = printable(header.model, width) if header.problem is None else "unreadable: vlcache verify"
        click.echo(
            f"{entry.kind:<4} {entry.group[:_DIGITS]}/{entry.name[:_DIGITS]} "
            f"{'-' if header.tokens is None else header.tokens:>7} {size_text(entry.nbytes):>10}  "
            f"{time_text(entry.used):<16}{cell} {what}"
        )
    if len(described) < total or not described:
        click.echo(f"{len(described)} of {plural(total, 'entry')}")


def row_json(entry: AnyEntry, header: Details) -> dict[str, Any]:
    """What `--json` says of an entry, besides where it is."""
    return {
        "kind": entry.kind,
        "group": entry.group,
        "name": entry.name,
        "bytes": entry.nbytes,
        "last_use": time_json(entry.used),
        "model": header.model,
        "tokens": header.tokens,
        "grid": header.grid,
        "stored_by": header.stored_by,
        "problem": header.problem,
    }


def _uses(entries: Sequence[AnyEntry]) -> list[float]:
    return [entry.used for entry in entries if entry.used is not None]
