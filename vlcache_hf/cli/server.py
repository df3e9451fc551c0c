"""The server that machines share, as the commands see it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .common import Misuse, bar, note, settings
from .entries import Details, details

if TYPE_CHECKING:
    from ..store.remote_admin import Listed, RemoteAdmin


def remote_url(given: str | None, cache_dir: Path) -> str | None:
    """The URL of the server, `None` when there is none.

    Args:
        given (`str`, *optional*): what `--remote` says; by default the library's settings hold.
        cache_dir (`Path`): what `--cache-dir` says.

    Raises:
        `Misuse`: it is no URL of a server.
    """
    chosen = click.get_current_context().get_parameter_source("cache_dir") != ParameterSource.DEFAULT
    if given is None and not chosen:
        return settings().remote  # a URL in $VLCACHE_DIR too
    return settings(cache_dir=cache_dir, remote=given).remote


def server_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--remote`. The command gets `server`, a `RemoteAdmin` or `None`."""

    @click.option(
        "--remote",
        metavar="URL",
        help="The server behind the directory; '' for none. Others on this machine can see a password that is given "
        "here.  [default: $VLCACHE_REMOTE, or a URL in $VLCACHE_DIR]",
    )
    @functools.wraps(command)
    def with_server(cache_dir: Path, remote: str | None, **options: Any) -> Any:
        return command(cache_dir=cache_dir, server=_open(remote_url(remote, cache_dir)), **options)

    return with_server


def _open(url: str | None) -> RemoteAdmin | None:
    from ..store.remote_admin import RemoteAdmin

    try:
        return None if url is None else RemoteAdmin(url)
    except (ImportError, ValueError) as error:
        raise Misuse(str(error)) from None


@dataclass
class Seen:
    """What a look at a server has shown.

    Args:
        address (`str`): the server, without password.
        entries (`list[tuple[Listed, Details]]`): what it holds.
        problem (`str`, *optional*): why that is not known.
    """

    address: str
    entries: list[tuple[Listed, Details]] = field(default_factory=list)
    problem: str | None = None

    @property
    def listed(self) -> list[Listed]:
        return [entry for entry, _ in self.entries]


def look(server: RemoteAdmin) -> Seen:
    """Asks a server for the descriptions of all its entries."""
    from ..store.remote_admin import RemoteError

    seen = Seen(server.address)
    try:
        for key in bar(server.keys(), desc="asking the server", unit="entry"):
            entry = server.look(*key)
            if entry is not None:  # it has not expired meanwhile
                seen.entries.append((entry, _details(entry)))
    except RemoteError as error:
        seen.entries, seen.problem = [], str(error)  # a part of them could be taken for all
    return seen


def _details(entry: Listed) -> Details:
    if entry.description is None:
        return Details(problem=entry.problem)
    tensors = entry.description.tensors
    return details(entry.description.fields, tensors[min(tensors)].shape if tensors else ())


def exit_if(trouble: str | None) -> None:
    """Ends the command with status 1 when a server made trouble; what is known has been shown before."""
    if trouble is not None:
        note(f"Error: {trouble}")
        sys.exit(1)
