"""`vlcache prune` and `vlcache clear`: keeping a cache small."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..store.paths import KINDS
from .common import Misuse, common_options, note, plural, print_json
from .entries import Found, orphans, scan
from .remove import remove, report_left
from .server import Seen, exit_if, look, server_option
from .tables import AnyEntry
from .units import Age, Size, printable, size_text, time_json, time_text

if TYPE_CHECKING:
    from ..store.remote_admin import RemoteAdmin


@click.command()
@common_options
@click.option("--max-bytes", type=Size(), help="Least recently used entries go until this is left, such as 10GiB.")
@click.option("--older-than", type=Age(), help="Entries that were not used for this long go, such as 30d.")
@click.option("--orphans", "with_orphans", is_flag=True, help="What killed writers left behind goes.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def prune(
    cache_dir: Path,
    as_json: bool,
    max_bytes: int | None,
    older_than: float | None,
    with_orphans: bool,
    dry_run: bool,
) -> None:
    """Make a cache directory smaller, once; for a lasting cap set $VLCACHE_MAX_DISK_BYTES where the models run.

    A server is not pruned: its entries expire, and its own `maxmemory` settings say how many it keeps.

    Example: vlcache prune --older-than 30d --max-bytes 10GiB --dry-run
    """
    if max_bytes is None and older_than is None and not with_orphans:
        raise Misuse("Nothing to prune by. Give --max-bytes 10GiB, --older-than 30d or --orphans.")
    entries = sorted(scan(cache_dir), key=lambda entry: entry.used)
    going: list[tuple[Found, str]] = []
    left_bytes = sum(entry.nbytes for entry in entries)
    oldest = time.time() - older_than if older_than is not None else 0.0
    for entry in entries:
        if entry.used < oldest:
            going.append((entry, "age"))
        elif max_bytes is not None and left_bytes > max_bytes:
            going.append((entry, "size"))
        else:
            break  # later ones were used later, and what is left fits
        left_bytes -= entry.nbytes
    rubbish = orphans(cache_dir) if with_orphans else []
    left: list[Found] = []
    gone = going
    if not dry_run:
        removed, left = remove(cache_dir, [entry for entry, _ in going], unused_only=True)
        gone = [(entry, why) for entry, why in going if entry in removed]
        for path, _, _ in rubbish:
            _remove_file(path)
    swept = [(path, size) for path, size, _ in rubbish if dry_run or not os.path.lexists(path)]
    freed = sum(entry.nbytes for entry, _ in gone) + sum(size for _, size in swept)
    if as_json:
        print_json(
            {
                "cache_dir": str(cache_dir),
                "dry_run": dry_run,
                "removed": [_gone_json(entry, why) for entry, why in gone],
                "removed_orphans": [{"path": f"tmp/{path.name}", "bytes": size} for path, size in swept],
                "removed_bytes": freed,
                "left_entries": len(entries) - len(gone),
                "left_bytes": sum(entry.nbytes for entry in entries) - sum(entry.nbytes for entry, _ in gone),
            }
        )
    else:
        verb = "would remove" if dry_run else "removed"
        for entry, why in gone:
            click.echo(f"{verb} ({why}): {entry.key}, {size_text(entry.nbytes)}, last used {time_text(entry.used)}")
        for path, size in swept:
            click.echo(f"{verb} (orphan): tmp/{printable(path.name)}, {size_text(size)}")
        click.echo(
            f"{verb} {plural(len(gone), 'entry')} and {plural(len(swept), 'orphan')}, {size_text(freed)}; "
            f"{plural(len(entries) - len(gone), 'entry')} left"
        )
    report_left(left, cache_dir)
    if left:
        sys.exit(1)


def _gone_json(entry: Found, why: str) -> dict[str, Any]:
    return {"path": entry.key, "bytes": entry.nbytes, "last_use": time_json(entry.used), "reason": why}


def _remove_file(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


@click.command()
@common_options
@server_option
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    help="Only KV, features, or what is known of files.",
)
@click.option("--server", "with_server", is_flag=True, help="Remove those of the server too: all machines lose them.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(
    cache_dir: Path, as_json: bool, server: RemoteAdmin | None, kind: str | None, with_server: bool, yes: bool
) -> None:
    """Remove all entries of the directory, of all models and namespaces. Other files in it stay.

    The server, which many machines may share, is left alone without --server. With it, all entries there go too,
    whichever machine has stored them; other keys on the server stay.

    Example: vlcache clear --kind vit --yes
    """
    from ..store import DiskStore

    if as_json and not yes:
        raise Misuse("--json never asks. Give --yes with it to remove the entries.")
    if with_server and server is None:
        raise Misuse("--server, but no server is known. Give --remote, or set VLCACHE_REMOTE.")
    entries = [entry for entry in scan(cache_dir) if kind in (None, entry.kind)]
    seen = look(server) if server is not None and with_server and not yes else None
    if not yes:
        _ask(cache_dir, entries, seen, kind)
    if kind is None:
        store = DiskStore(cache_dir, None)
        store.clear()  # with the marks of contexts that were met
        store.close()
    gone, left = remove(cache_dir, entries)
    if not as_json:
        click.echo(f"removed {plural(len(gone), 'entry')}, {size_text(sum(entry.nbytes for entry in gone))}")
    report_left(left, cache_dir)
    remote, problem = _clear_server(server, kind) if server is not None and with_server else (None, None)
    if as_json:
        print_json(
            {
                "cache_dir": str(cache_dir),
                "removed_entries": len(gone),
                "removed_bytes": sum(entry.nbytes for entry in gone),
                "left_entries": len(left),
                "remote": remote,
            }
        )
    elif remote is not None and problem is None:
        click.echo(f"removed {plural(remote['removed_entries'], 'entry')} from {remote['address']}")
    elif server is not None and not with_server:
        note(f"The server {server.address} still serves its entries; --server removes them, for all machines.")
    exit_if(problem)
    if left:
        sys.exit(1)


def _ask(cache_dir: Path, entries: Sequence[Found], seen: Seen | None, kind: str | None) -> None:
    places = []
    if entries:
        places.append(f"{_amount(entries, kind)}, from {str(cache_dir)!r}")
    if seen is not None:
        # asked even when the server did not say what it has: it may answer the next time
        amount = "all entries" if seen.problem is not None else _amount(seen.listed, kind)
        places.append(f"{amount}, from the server {seen.address} and so for all machines")
    if places:
        click.confirm(f"Remove {' and '.join(places)}?", abort=True, err=True)


def _amount(entries: Sequence[AnyEntry], kind: str | None) -> str:
    chosen = [entry for entry in entries if kind in (None, entry.kind)]
    return f"{plural(len(chosen), f'{kind} entry' if kind else 'entry')}, {size_text(sum(e.nbytes for e in chosen))}"


def _clear_server(server: RemoteAdmin, kind: str | None) -> tuple[dict[str, Any], str | None]:
    from ..store.remote_admin import RemoteError

    removed, problem = 0, None
    try:
        removed = server.clear(kind)
    except RemoteError as error:
        problem = str(error)
    return {"address": server.address, "removed_entries": removed, "problem": problem}, problem
