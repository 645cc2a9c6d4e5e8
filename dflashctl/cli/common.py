"""Options that several verbs share, as Annotated types: `def status(host: HostOption = None, ...)`."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer

from dflashctl.cli import offered
from dflashctl.render import hints


def set_up_verbose(wanted: bool) -> bool:
    """`-v`: every remote step, with its time, on stderr."""
    if wanted:
        from dflashctl.render.text import line

        class Escaped(logging.Formatter):
            def format(self, record: logging.LogRecord) -> str:
                return line(super().format(record))

        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(Escaped("%(relativeCreated)6d ms  %(message)s"))
        logger = logging.getLogger("dflashctl")
        logger.handlers = [handler]
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    return wanted


LOAD_AFTER_S = 0.3
"""By then the first remote command is on its way, and this side waits."""


def load_meanwhile(*modules: str) -> None:
    """Import what the end of a command needs while the other side works: rich alone takes 0.1 s."""
    import threading
    from importlib import import_module

    def load() -> None:
        for name in modules:
            import_module(name)

    timer = threading.Timer(LOAD_AFTER_S, load)
    timer.daemon = True
    timer.start()


def not_empty(name: str | None) -> str | None:
    """A callback of names. "" is most often a script's variable that is not set, and no wish for the run
    that a command takes when none is named."""
    if name == "":
        from dflashctl.errors import UsageError

        raise UsageError("the name is empty", next="name a run (dflashctl runs)")
    return name


def run_argument(help: str) -> Any:
    """The argument that names a run: completed by the tags that are there, and never empty."""
    return typer.Argument(help=help, show_default=False, autocompletion=offered.tags, callback=not_empty)


HostOption = Annotated[
    str | None,
    typer.Option(
        "--host",
        "-H",
        help="Host of hosts.yaml; several as a,b.",
        show_default=False,
        callback=hints.named,
        autocompletion=offered.hosts,
    ),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        help="Recipe's name or file.",
        show_default=False,
        callback=hints.named_recipe,
        autocompletion=offered.recipes,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show each remote step.", callback=set_up_verbose)
]
