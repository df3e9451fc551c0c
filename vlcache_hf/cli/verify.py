"""`vlcache verify`: whether what is stored is still what was stored."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import bar, common_options, plural, print_json
from .entries import Found, check, scan
from .remove import remove, report_left
from .server import Seen, exit_if, look, server_option
from .units import printable, size_text

if TYPE_CHECKING:
    from ..store.remote_admin import Listed, RemoteAdmin


@dataclass
class Folder:
    """What was found in the directory."""

    total: int
    good: int = 0
    bad: list[tuple[Found, str]] = field(default_factory=list)
    unreadable: list[tuple[Found, str]] = field(default_factory=list)
    deleted: int = 0
    left: list[Found] = field(default_factory=list)


@dataclass
class Shared:
    """What was found on the server."""

    seen: Seen
    good: int = 0
    nbytes: int = 0
    bad: list[tuple[Listed, str]] = field(default_factory=list)
    deleted: int = 0


@click.command()
@common_options
@server_option
@click.option("--delete", is_flag=True, help="Delete what is bad. Without it, it is only reported.")
def verify(cache_dir: Path, as_json: bool, server: RemoteAdmin | None, delete: bool) -> None:
    """Check the header of every entry, and every block against its checksum; those of the server are fetched for it.

    Exit status 1 when something is bad, also when it was deleted, or the server does not answer. What cannot be read
    now (permissions, I/O errors) is reported too, and never deleted.

    Example: vlcache verify --delete
    """
    folder = _check_folder(cache_dir, delete)
    if not as_json:
        _print_folder(folder, delete)
    report_left(folder.left, cache_dir)
    shared = None if server is None else _check_server(server, delete)
    if as_json:
        document = {
            "cache_dir": str(cache_dir),
            "checked": folder.good + len(folder.bad),
            "checked_bytes": folder.total,
            "good": folder.good,
            "bad": [{"path": entry.key, "problem": problem} for entry, problem in folder.bad],
            "unreadable": [{"path": entry.key, "problem": problem} for entry, problem in folder.unreadable],
            "deleted": folder.deleted,
            "remote": None if shared is None else _server_json(shared),
        }
        print_json(document)
    elif shared is not None:
        _print_server(shared, delete)
    exit_if(shared.seen.problem if shared is not None else None)
    if folder.bad or folder.unreadable or (shared is not None and shared.bad):
        sys.exit(1)


def _check_folder(root: Path, delete: bool) -> Folder:
    from ..store.entry import BadEntryError

    entries = sorted(scan(root), key=lambda entry: entry.key)
    found = Folder(sum(entry.nbytes for entry in entries))
    with _bytes_bar(found.total, "verifying") as progress:
        done = 0
        for entry in entries:
            try:
                check(root, entry, progress.update)
                found.good += 1
            except FileNotFoundError:
                pass  # evicted meanwhile
            except BadEntryError as error:
                found.bad.append((entry, str(error)))
            except (OSError, RuntimeError) as error:
                found.unreadable.append((entry, str(error)))
            done += entry.nbytes
            progress.update(done - progress.n)  # headers, and what stands behind the first bad block
            progress.set_postfix(bad=len(found.bad), refresh=False)
    gone, found.left = remove(root, [entry for entry, _ in found.bad] if delete else [])
    found.deleted = len(gone)
    return found


def _check_server(server: RemoteAdmin, delete: bool) -> Shared:
    from ..store.entry import BadEntryError
    from ..store.remote_admin import RemoteError

    seen = look(server)
    found = Shared(seen)
    try:
        with _bytes_bar(sum(entry.nbytes for entry in seen.listed), "verifying the server") as progress:
            done = 0
            for entry in seen.listed:
                try:
                    if server.check(entry, progress.update):
                        found.good += 1
                        found.nbytes += entry.nbytes
                except BadEntryError as error:
                    found.bad.append((entry, str(error)))
                    if delete:
                        server.discard(entry)
                        found.deleted += 1
                done += entry.nbytes
                progress.update(done - progress.n)
                progress.set_postfix(bad=len(found.bad), refresh=False)
    except RemoteError as error:
        seen.problem = str(error)
    return found


def _bytes_bar(total: int, what: str) -> Any:
    return bar(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024)


def _print_folder(found: Folder, delete: bool) -> None:
    for label, problems in (("bad", found.bad), ("unreadable", found.unreadable)):
        for entry, problem in problems:
            click.echo(f"{label}: {entry.key}: {printable(problem)}")
    click.echo(f"{plural(found.good, 'good entry')}, {len(found.bad)} bad, {size_text(found.total)}")
    _print_fate(bool(found.bad), found.deleted, delete)


def _print_server(found: Shared, delete: bool) -> None:
    click.echo(f"\n{found.seen.address}")
    for entry, problem in found.bad:
        click.echo(f"bad: {entry.key}: {printable(problem)}")
    click.echo(f"{plural(found.good, 'good entry')}, {len(found.bad)} bad, {size_text(found.nbytes)}")
    _print_fate(bool(found.bad), found.deleted, delete)


def _print_fate(any_bad: bool, deleted: int, delete: bool) -> None:
    if any_bad and not delete:
        click.echo("The library deletes bad entries when it meets them; `vlcache verify --delete` does so now.")
    elif delete:
        click.echo(f"{deleted} deleted")


def _server_json(found: Shared) -> dict[str, Any]:
    return {
        "address": found.seen.address,
        "checked": found.good + len(found.bad),
        "checked_bytes": found.nbytes,
        "good": found.good,
        "bad": [{"key": entry.key, "problem": problem} for entry, problem in found.bad],
        "deleted": found.deleted,
        "problem": found.seen.problem,
    }
