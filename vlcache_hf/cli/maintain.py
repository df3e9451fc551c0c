"""`vlcache verify`, `vlcache prune` and `vlcache clear`: keeping a cache sound and small."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from .common import Misuse, bar, common_options, note, plural, print_json
from .entries import Found, check, orphans, scan
from .show import KINDS
from .units import Age, Size, printable, size_text, time_json, time_text


def remove(root: Path, entries: Sequence[Found], unused_only: bool = False) -> tuple[set[Found], list[Found]]:
    """Removes entries from disk and index, as the library would.

    Args:
        root (`Path`): the cache directory.
        entries (`Sequence[Found]`): what to remove.
        unused_only (`bool`): leave those alone that were used since they were found.

    Returns:
        `tuple[set[Found], list[Found]]`: those that are gone, and those that could not be removed.
    """
    from ..store import DiskStore

    store = DiskStore(root, None)
    gone: set[Found] = set()
    left: list[Found] = []
    for entry in bar(entries, desc="removing", unit="entry"):
        path = root / entry.key
        with contextlib.suppress(OSError):
            if unused_only and os.lstat(path).st_mtime != entry.used:
                continue
        store.discard(entry.kind, entry.group, entry.name)
        if os.path.lexists(path):
            left.append(entry)
        else:
            gone.add(entry)
    store.close()
    return gone, left


def _report_left(left: Sequence[Found], root: Path) -> None:
    if left:
        note(
            f"Error: {plural(len(left), 'entry')} could not be removed, for instance {str(root / left[0].key)!r}. "
            "Run as the owner of the directory, where it can be written."
        )


@click.command()
@common_options
@click.option("--delete", is_flag=True, help="Delete what is bad. Without it, it is only reported.")
def verify(cache_dir: Path, as_json: bool, delete: bool) -> None:
    """Check the header of every entry, and every block against its checksum.

    Exit status 1 when something is bad, also when it was deleted. What cannot be read now (permissions, I/O errors) is
    reported too, and never deleted.

    Example: vlcache verify --delete
    """
    from ..store.entry import BadEntryError

    entries = sorted(scan(cache_dir), key=lambda entry: entry.key)
    bad: list[tuple[Found, str]] = []
    unreadable: list[tuple[Found, str]] = []
    good = 0
    total = sum(entry.nbytes for entry in entries)
    with bar(total=total, desc="verifying", unit="B", unit_scale=True, unit_divisor=1024) as progress:
        done = 0
        for entry in entries:
            try:
                check(cache_dir, entry, progress.update)
                good += 1
            except FileNotFoundError:
                pass  # evicted meanwhile
            except BadEntryError as error:
                bad.append((entry, str(error)))
            except (OSError, RuntimeError) as error:
                unreadable.append((entry, str(error)))
            done += entry.nbytes
            progress.update(done - progress.n)  # headers, and what stands behind the first bad block
            progress.set_postfix(bad=len(bad), refresh=False)
    deleted, left = remove(cache_dir, [entry for entry, _ in bad] if delete else [])
    if as_json:
        print_json(
            {
                "cache_dir": str(cache_dir),
                "checked": good + len(bad),
                "checked_bytes": total,
                "good": good,
                "bad": [{"path": entry.key, "problem": problem} for entry, problem in bad],
                "unreadable": [{"path": entry.key, "problem": problem} for entry, problem in unreadable],
                "deleted": len(deleted),
            }
        )
    else:
        for label, problems in (("bad", bad), ("unreadable", unreadable)):
            for entry, problem in problems:
                click.echo(f"{label}: {entry.key}: {printable(problem)}")
        click.echo(f"{plural(good, 'good entry')}, {len(bad)} bad, {size_text(total)}")
        if bad and not delete:
            click.echo("The library deletes bad entries when it meets them; `vlcache verify --delete` does so now.")
        elif delete:
            click.echo(f"{len(deleted)} deleted")
    _report_left(left, cache_dir)
    if bad or unreadable:
        sys.exit(1)


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
    """Make a cache smaller, once; for a lasting cap set $VLCACHE_MAX_DISK_BYTES where the models run.

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
    _report_left(left, cache_dir)
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
@click.option("--kind", type=click.Choice(KINDS), help="Only keys and values, or only what the vision tower made.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(cache_dir: Path, as_json: bool, kind: str | None, yes: bool) -> None:
    """Remove all entries, of all models and namespaces. Other files in the directory stay.

    Example: vlcache clear --kind vit --yes
    """
    from ..store import DiskStore

    if as_json and not yes:
        raise Misuse("--json never asks. Give --yes with it to remove the entries.")
    entries = [entry for entry in scan(cache_dir) if kind in (None, entry.kind)]
    what = f"{plural(len(entries), f'{kind} entry' if kind else 'entry')}, {size_text(sum(e.nbytes for e in entries))}"
    if entries and not yes:
        click.confirm(f"Remove {what}, from {str(cache_dir)!r}?", abort=True, err=True)
    if kind is None:
        store = DiskStore(cache_dir, None)
        store.clear()  # with the marks of contexts that were met
        store.close()
    gone, left = remove(cache_dir, entries)
    if as_json:
        print_json(
            {
                "cache_dir": str(cache_dir),
                "removed_entries": len(gone),
                "removed_bytes": sum(entry.nbytes for entry in gone),
                "left_entries": len(left),
            }
        )
    else:
        click.echo(f"removed {plural(len(gone), 'entry')}, {size_text(sum(entry.nbytes for entry in gone))}")
    _report_left(left, cache_dir)
    if left:
        sys.exit(1)
