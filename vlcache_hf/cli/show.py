"""`vlcache info` and `vlcache ls`: what is there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from .common import bar, common_options, plural, print_json, settings
from .entries import Details, Found, describe, orphans, scan, temporary_files
from .units import printable, size_text, time_json, time_text

KINDS = ("kv", "vit")
# digits of the digests in a table: enough to tell entries apart, --json has them in full
_DIGITS = 8
_MODEL_WIDTH = 40


def tally(entries: Sequence[Found]) -> dict[str, Any]:
    """Counts entries by kind; the entries of an image under a model share their group."""
    kinds = {}
    for kind in KINDS:
        chosen = [entry for entry in entries if entry.kind == kind]
        kinds[kind] = {
            "entries": len(chosen),
            "images": len({entry.group for entry in chosen}),
            "bytes": sum(entry.nbytes for entry in chosen),
        }
    used = [entry.used for entry in entries]
    return {
        "entries": len(entries),
        "bytes": sum(entry.nbytes for entry in entries),
        "oldest_use": time_json(min(used, default=None)),
        "newest_use": time_json(max(used, default=None)),
        "kinds": kinds,
    }


@click.command()
@common_options
def info(cache_dir: Path, as_json: bool) -> None:
    """Where the cache is, how much it holds, and of which models.

    Example: vlcache info --json
    """
    from ..store.paths import free_bytes

    described = describe(cache_dir, bar(scan(cache_dir), desc="reading headers", unit="entry"))
    entries = [entry for entry, _ in described]
    by_model: dict[str, list[Found]] = defaultdict(list)
    for entry, header in described:
        if header.problem is None:
            by_model[header.model].append(entry)
    models = [{"model": model, **tally(of_model)} for model, of_model in by_model.items()]
    models.sort(key=lambda model: -model["bytes"])
    temporary, left_behind = temporary_files(cache_dir), orphans(cache_dir)
    document = {
        "cache_dir": str(cache_dir),
        "exists": cache_dir.is_dir(),
        "max_disk_bytes": settings().max_disk_bytes,
        "free_bytes": free_bytes(cache_dir),
        **tally(entries),
        "unreadable_entries": sum(header.problem is not None for _, header in described),
        "temporary": {
            "files": len(temporary),
            "bytes": sum(nbytes for _, nbytes, _ in temporary),
            "orphans": len(left_behind),
            "orphan_bytes": sum(nbytes for _, nbytes, _ in left_behind),
        },
        "models": models,
    }
    if as_json:
        print_json(document)
    else:
        _print_info(document, entries)
        _print_models(by_model)


def _print_info(document: dict[str, Any], entries: Sequence[Found]) -> None:
    cap = document["max_disk_bytes"]
    kinds = ", ".join(
        f"{plural(kind['entries'], f'{name} entry')} of {plural(kind['images'], 'image')} ({size_text(kind['bytes'])})"
        for name, kind in document["kinds"].items()
    )
    temporary = document["temporary"]
    lines = [
        ("cache", document["cache_dir"] + ("" if document["exists"] else " (does not exist yet)")),
        ("used", size_text(document["bytes"]) + (", no cap" if cap is None else f" of {size_text(cap)}")),
        ("disk", f"{size_text(document['free_bytes'])} free"),
        ("entries", kinds),
    ]
    if entries:
        used = sorted(entry.used for entry in entries)
        lines.append(("last use", f"{time_text(used[0])} (oldest) to {time_text(used[-1])} (newest)"))
    if temporary["files"]:
        text = f"{plural(temporary['files'], 'file')}, {size_text(temporary['bytes'])}"
        if temporary["orphans"]:
            text += f"; {temporary['orphans']} left behind by killed writers: vlcache prune --orphans"
        lines.append(("temporary", text))
    if document["unreadable_entries"]:
        lines.append(("unreadable", f"{plural(document['unreadable_entries'], 'entry')}: vlcache verify"))
    for label, text in lines:
        click.echo(f"{label:<12}{text}")


def _print_models(by_model: dict[str, list[Found]]) -> None:
    if not by_model:
        return
    click.echo(f"\n{'MODEL':<{_MODEL_WIDTH}} {'KV':>7} {'IMAGES':>7} {'VIT':>7} {'BYTES':>10}  LAST USE")
    for model, entries in sorted(by_model.items(), key=lambda item: -sum(entry.nbytes for entry in item[1])):
        count = tally(entries)
        kv, vit = count["kinds"]["kv"], count["kinds"]["vit"]
        click.echo(
            f"{printable(model, _MODEL_WIDTH):<{_MODEL_WIDTH}} {kv['entries']:>7} {kv['images']:>7} "
            f"{vit['entries']:>7} {size_text(count['bytes']):>10}  {time_text(max(entry.used for entry in entries))}"
        )


@click.command()
@common_options
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="Show N entries at most.")
@click.option(
    "--sort",
    type=click.Choice(["used", "size"]),
    default="used",
    show_default=True,
    help="Most recently used first, or largest first.",
)
def ls(cache_dir: Path, as_json: bool, limit: int | None, sort: str) -> None:
    """One row for each entry.

    `kv` entries hold keys and values of an image in one context, `vit` entries what the vision tower made of it.

    Example: vlcache ls --sort size --limit 10
    """
    entries = scan(cache_dir)
    entries.sort(key=lambda entry: (-(entry.used if sort == "used" else entry.nbytes), entry.key))
    shown = entries[:limit]
    rows = describe(cache_dir, bar(shown, desc="reading headers", unit="entry"))
    if as_json:
        print_json({"total": len(entries), "entries": [_row_json(entry, header) for entry, header in rows]})
        return
    if rows:
        click.echo(
            f"KIND {'GROUP/NAME':<{2 * _DIGITS + 1}} {'TOKENS':>7} {'BYTES':>10}  {'LAST USE':<16} MODEL",
        )
    for entry, header in rows:
        what = printable(header.model, _MODEL_WIDTH) if header.problem is None else "unreadable: vlcache verify"
        click.echo(
            f"{entry.kind:<4} {entry.group[:_DIGITS]}/{entry.name[:_DIGITS]} "
            f"{'-' if header.tokens is None else header.tokens:>7} {size_text(entry.nbytes):>10}  "
            f"{time_text(entry.used)} {what}"
        )
    if len(rows) < len(entries) or not rows:
        click.echo(f"{len(rows)} of {plural(len(entries), 'entry')}")


def _row_json(entry: Found, header: Details) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "group": entry.group,
        "name": entry.name,
        "path": entry.key,
        "bytes": entry.nbytes,
        "last_use": time_json(entry.used),
        "model": header.model,
        "tokens": header.tokens,
        "grid": header.grid,
        "stored_by": header.stored_by,
        "problem": header.problem,
    }
