"""The operator's command `vlcache`: looks after a cache, from outside the processes that use it.

What goes to stdout is the answer, with `--json` one JSON document and nothing else. Progress, warnings and errors go
to stderr. Exit status: 0, 1 when something is wrong with the cache, its server or the images, 2 when the command was.

The modules import what is heavy inside the commands; what time `--help` takes is that of the package itself.
"""

from __future__ import annotations

import click

from ..version import __version__
from .audit import audit
from .calibrate import calibrate
from .maintain import clear, prune
from .show import info, ls
from .verify import verify
from .warm import warm

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vlcache")
def main() -> None:
    """Look after an image cache of vlcache-hf: its directory, and the server behind it if there is one.

    `info`, `ls` and `verify` change nothing: they work on a read-only directory, and leave the order in which entries
    are evicted or expire as it is. No command ever unpickles anything.
    """


for command in (info, ls, verify, prune, clear, warm, audit, calibrate):
    main.add_command(command)
