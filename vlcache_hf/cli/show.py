"""`vlcache info` and `vlcache ls`: what is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import bar, common_options, plural, print_json, settings
from .entries import describe, orphans, scan, temporary_files
from .server import Seen, exit_if, look, server_option
from .tables import by_model, print_line, print_lines, print_models, print_rows, row_json, tally
from .units import duration_text, size_text

if TYPE_CHECKING:
    from ..store.remote_admin import RemoteAdmin


@click.command()
@common_options
@server_option
def info(cache_dir: Path, as_json: bool, server: RemoteAdmin | None) -> None:
    """Where the cache is, how much it holds, and of which models: the directory, then the server.

    Exit status 1 when the server does not answer.

    Example: vlcache info --json
    """
    from ..store.paths import free_bytes

    described = describe(cache_dir, bar(scan(cache_dir), desc="reading headers", unit="entry"))
    entries = [entry for entry, _ in described]
    models = by_model(described)
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
        "models": [{"model": model, **tally(of_model)} for model, of_model in models.items()],
    }
    if not as_json:
        _print_folder(document)
        print_lines(document, entries)
        _print_trouble(document)
        print_models(models)
    seen = None if server is None else look(server)
    if as_json:
        print_json({**document, "remote": None if seen is None else _server_json(seen)})
    elif seen is not None and seen.problem is None:
        _print_server(seen)
    exit_if(seen.problem if seen is not None else None)


def _server_json(seen: Seen) -> dict[str, Any]:
    if seen.problem is not None:
        return {"address": seen.address, "problem": seen.problem}
    left = [entry.ttl_s for entry in seen.listed if entry.ttl_s is not None]
    return {
        "address": seen.address,
        **tally(seen.listed),
        "next_expiry_s": min(left, default=None),
        "last_expiry_s": max(left, default=None),
        "unreadable_entries": sum(header.problem is not None for _, header in seen.entries),
        "models": [{"model": model, **tally(entries)} for model, entries in by_model(seen.entries).items()],
        "problem": None,
    }


def _print_folder(document: dict[str, Any]) -> None:
    cap = document["max_disk_bytes"]
    print_line("cache", document["cache_dir"] + ("" if document["exists"] else " (does not exist yet)"))
    print_line("used", size_text(document["bytes"]) + (", no cap" if cap is None else f" of {size_text(cap)}"))
    print_line("disk", f"{size_text(document['free_bytes'])} free")


def _print_trouble(document: dict[str, Any]) -> None:
    temporary = document.get("temporary", {"files": 0})
    if temporary["files"]:
        text = f"{plural(temporary['files'], 'file')}, {size_text(temporary['bytes'])}"
        if temporary["orphans"]:
            text += f"; {temporary['orphans']} left behind by killed writers: vlcache prune --orphans"
        print_line("temporary", text)
    if document["unreadable_entries"]:
        print_line("unreadable", f"{plural(document['unreadable_entries'], 'entry')}: vlcache verify")


def _print_server(seen: Seen) -> None:
    document = _server_json(seen)
    click.echo()
    print_line("server", seen.address)
    print_line("used", size_text(document["bytes"]))
    print_lines(document, seen.listed)
    if document["next_expiry_s"] is not None:
        first, last = duration_text(document["next_expiry_s"]), duration_text(document["last_expiry_s"])
        print_line("expire", f"in {first} (first) to {last} (last), unless they are used before")
    _print_trouble(document)
    print_models(by_model(seen.entries))


@click.command()
@common_options
@server_option
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="Show N entries at most, of each place.")
@click.option(
    "--sort",
    type=click.Choice(["used", "size"]),
    default="used",
    show_default=True,
    help="Most recently used first, or largest first.",
)
def ls(cache_dir: Path, as_json: bool, server: RemoteAdmin | None, limit: int | None, sort: str) -> None:
    """One row for each entry: of the directory, then of the server, where entries expire.

    `kv` entries hold keys and values of an image in one context, `vit` entries what the vision tower made of it. Exit
    status 1 when the server does not answer.

    Example: vlcache ls --sort size --limit 10
    """
    entries = scan(cache_dir)
    entries.sort(key=lambda entry: (-(entry.used if sort == "used" else entry.nbytes), entry.key))
    rows = describe(cache_dir, bar(entries[:limit], desc="reading headers", unit="entry"))
    if not as_json:
        print_rows(rows, len(entries))
    seen = None if server is None else look(server)
    if seen is not None:
        seen.entries.sort(
            key=lambda row: (-((row[0].used or 0.0) if sort == "used" else row[0].nbytes), row[0].key),
        )
    if as_json:
        print_json(
            {
                "total": len(entries),
                "entries": [{**row_json(*row), "path": row[0].key} for row in rows],
                "remote": None if seen is None else _server_rows_json(seen, limit),
            }
        )
    elif seen is not None and seen.problem is None:
        click.echo(f"\n{seen.address}")
        shown = seen.entries[:limit]
        expiries = ["never" if entry.ttl_s is None else duration_text(entry.ttl_s) for entry, _ in shown]
        print_rows(shown, len(seen.entries), expiries)
    exit_if(seen.problem if seen is not None else None)


def _server_rows_json(seen: Seen, limit: int | None) -> dict[str, Any]:
    if seen.problem is not None:
        return {"address": seen.address, "problem": seen.problem}
    rows = [
        {**row_json(entry, header), "key": entry.key, "expires_in_s": entry.ttl_s}
        for entry, header in seen.entries[:limit]
    ]
    return {"address": seen.address, "total": len(seen.entries), "entries": rows, "problem": None}
