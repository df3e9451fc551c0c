"""What the commands share: options, errors, output."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ..config import VLCacheConfig

T = TypeVar("T")


class Misuse(click.ClickException):
    """The command was called with something that cannot be: one line on stderr, exit status 2."""

    exit_code = 2


def settings(**fields: Any) -> VLCacheConfig:
    """The library's settings with what the flags say; those that are `None` keep their default.

    Raises:
        `Misuse`: a flag or an environment variable has a value out of its range.
    """
    from ..config import VLCacheConfig

    try:
        return VLCacheConfig(**{name: value for name, value in fields.items() if value is not None})
    except ValueError as error:
        raise Misuse(str(error)) from None


def _directory(ctx: click.Context, param: click.Parameter, value: str | None) -> Path:
    from ..store import DiskStore

    given = os.fspath(settings(cache_dir=value).cache_dir) if value is None else value
    if not given:  # an unset variable in a script must not mean the current directory
        raise Misuse("--cache-dir is empty. Give a directory, or leave the option out.")
    if "://" in given:
        # not quoted: it may hold a password
        raise Misuse("--cache-dir is a URL, but means a directory. Give a server as --remote, or set VLCACHE_REMOTE.")
    path = DiskStore(given, None).cache_dir  # expands it as the library does, and touches nothing
    try:
        os.listdir(path)
    except FileNotFoundError:
        pass  # an empty cache
    except NotADirectoryError:
        raise Misuse(f"{str(path)!r} is not a directory. Give the cache directory with --cache-dir.") from None
    except OSError as error:
        raise Misuse(
            f"{str(path)!r} cannot be read ({error.strerror}). Run as its owner, or give another --cache-dir."
        ) from None
    return path


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that every command has."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout."),
        click.option(
            "--cache-dir",
            metavar="DIR",
            callback=_directory,
            help="The cache directory.  [default: $VLCACHE_DIR, else $HF_HOME/vlcache]",
        ),
    ):
        command = option(command)
    return command


def print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2))


def bar(items: Iterable[T] | None = None, **kwargs: Any) -> Any:
    """A progress bar on stderr; silent where stderr is no terminal, to keep logs readable."""
    from tqdm import tqdm

    return tqdm(items, disable=None, leave=False, dynamic_ncols=True, **kwargs)


def note(message: str) -> None:
    """A line on stderr, beside a progress bar that may be there."""
    from tqdm import tqdm

    with tqdm.external_write_mode():
        click.echo(message, err=True)


def plural(count: int, noun: str) -> str:
    """`1 entry`, `2 entries`."""
    many = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count:,} {noun if count == 1 else many}"
