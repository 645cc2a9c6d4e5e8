"""The frame of the command line: verbs by name, errors as messages, exit codes.

A verb is a module of this package that exports `app: typer.Typer`. One `@app.command()` makes a single verb
(`dflashctl deploy`); several make subcommands (`dflashctl lab up`). VERBS names each module with its line of
help, and the module is imported only when its verb is used, so `dflashctl --help` loads none of them; a verb
in turn imports what it needs inside its functions. Verbs raise DflashError, print on stdout what was asked
for and on stderr everything else, and leave exit codes to this module (`raise typer.Exit(code)` where an
outcome that is no error has one).
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dflashctl import __version__
from dflashctl.errors import DflashError, ExitCode
from dflashctl.interrupt import interrupted
from dflashctl.render import hints
from dflashctl.render.secrets import begin

DAILY: dict[str, str] = {
    "deploy": "Ship the recipe's code and prove inside that it arrived",
    "launch": "Start a tagged run in the background, once its GPUs are free",
    "status": "Say what every run is doing, with the evidence",
    "kill": "End a run with its whole family and prove its GPUs free",
    "logs": "Show a run's log",
    "runs": "List past and present runs and what was learnt",
    "gpu": "Show the GPUs and who holds them",
}
OTHERS: dict[str, str] = {
    "rollback": "Make an older release current again",
    "releases": "List the releases that are there",
    "diff": "Compare the files here with a release that is there",
    "lock": "The deploy lock: show, break",
    "stacks": "Show where every process of a run stands in its code",
    "explain": "Look for known failures in a run's log, and say what helps",
    "report": "Print a run as one Markdown document for a colleague",
    "pull": "Bring home a run's checkpoints, metrics or log",
    "notify": "Tell when a run has finished, failed, is wedged or lost",
    "doctor": "Look at all that a run needs; say how to mend it",
    "inspect": "Show what torch is set to and why; compare two hosts or runs",
    "probe": "Try a framework's faults, or a file of yours, on an idle GPU",
    "lab": "The embedded test host: up, down, status",
    "host": "The machines of hosts.yaml: list, trust",
    "recipe": "The recipes: list, show",
    "schema": "JSON schemas of hosts.yaml and recipes, for editors",
}
VERBS = DAILY | OTHERS

COMPLETION_VARIABLE = "_DFLASHCTL_COMPLETE"


class LazyGroup(TyperGroup):
    """Lists VERBS, the daily ones first; loads a verb's module when it is called (or completed)."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        wide = max(map(len, VERBS))  # the lines of both sections begin below each other
        for heading, verbs in (("Every day", DAILY), ("The others", OTHERS)):
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(wide), line) for name, line in verbs.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, (load_verb(name) if name in VERBS else command), rest


def load_verb(name: str) -> Any:
    """The real command behind a name of VERBS."""
    app = importlib.import_module(f"dflashctl.cli.{name}").app
    app.rich_markup_mode = None  # see build()
    command: Any = typer.main.get_command(app)
    command.name = name
    for each in getattr(command, "commands", {}).values():
        each.short_help = (each.help or "").split("\n\n")[0]  # the whole of it: typer's own is cut off
    # The root has these two.
    command.params = [
        each for each in command.params if each.name not in ("install_completion", "show_completion")
    ]
    return command


def build() -> Any:
    """The root command, with a stand-in for each verb that knows its name and line of help alone."""
    app = typer.Typer(
        cls=LazyGroup,
        name="dflashctl",
        help="Ship, launch, watch and kill training runs in a container on your own GPU box.",
        no_args_is_help=True,
        # Plain text: rich's help costs a third of the time budget, and brackets stay brackets.
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root(
        version: Annotated[
            bool,
            typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
        ] = False,
    ) -> None: ...

    for name, line in VERBS.items():
        app.command(name, help=line)(_stand_in)
    return typer.main.get_command(app)


def _stand_in() -> None: ...


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dflashctl {__version__}")
        raise typer.Exit()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: run the command line and end the process with its exit code.

    A command lives for a second or two and makes little garbage: collecting it seldom, and not taking the
    interpreter apart at the end, saves a third of the time that the start and end of a command cost.
    """
    import gc

    gc.set_threshold(100_000, 50, 50)
    _open_streams()
    code = run(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            _quiet(stream)
    os._exit(code)


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns its exit code and lets no exception out but SystemExit."""
    words = list(argv)
    begin()
    hints.begin()
    if "--json" in words:
        from dflashctl.render import json

        json.begin()
    try:
        code = _invoke(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _interrupted(words)
    except BrokenPipeError:
        # The reader of our output (`| head`) has seen enough. Python would complain again at exit.
        _quiet(sys.stdout)
        return ExitCode.OK
    except DflashError as error:
        _log(error, words)
        _say(hints.complete(f"error: {error}"))
        _document(words, error.exit_code, error.what, error.where, hints.complete(error.next))
        return int(error.exit_code)
    except Exception as error:
        if interrupted(error):
            return _interrupted(words)
        where = _log(error, words)
        if isinstance(error, OSError) and (around := _surroundings(error)):
            _say(f"error: {around}")
            _document(words, ExitCode.USAGE, around)
            return ExitCode.USAGE
        first_line = (str(error).splitlines() or [""])[0]
        what = f"a bug in dflashctl: {type(error).__name__}: {first_line}"
        _say(f"{what} ({where})")
        _document(words, ExitCode.BUG, what, where)
        return ExitCode.BUG


def _interrupted(words: list[str]) -> int:
    _say("interrupted")
    _document(words, ExitCode.INTERRUPTED, "interrupted")
    return ExitCode.INTERRUPTED


def _document(words: list[str], code: ExitCode, what: str, where: str = "", next: str = "") -> None:
    """With --json an error is a document, too, unless the command printed one before it ended badly."""
    if "--json" not in words:
        return
    from dflashctl.render import json

    try:
        if not json.begun():
            json.emit(
                "dflashctl.error/1", {"error": what, "where": where, "next": next, "exit_code": int(code)}
            )
    except (OSError, ValueError):
        _quiet(sys.stdout)


def _invoke(words: list[str]) -> int:
    command = build()
    if COMPLETION_VARIABLE in os.environ:
        command.main(args=words, prog_name="dflashctl")
    try:
        with command.make_context("dflashctl", list(words)) as context:
            result = command.invoke(context)
        return result if isinstance(result, int) and not isinstance(result, bool) else ExitCode.OK
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except _click_exception() as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # nothing is wrong: it shows the help
            with contextlib.suppress(OSError):
                error.show()
            return ExitCode.USAGE
        from dflashctl.cli import usage

        what, where, next_step = usage.describe(error, words, VERBS)
        _say(f"error: {DflashError(what, where=where, next=next_step)}")
        _document(words, ExitCode.USAGE, what, where, next_step)
        return ExitCode.USAGE


def _click_exception() -> Any:
    """typer's base of usage errors. Newer typers carry a click of their own, so it is found through
    BadParameter."""
    return next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _open_streams() -> None:
    """Streams that the shell closed (`>&-`) lead to nowhere, before a socket can take their numbers; a
    character that the terminal's encoding lacks is shown as an escape."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _surroundings(error: OSError) -> str:
    """What is wrong around the program, when that and no bug made a call of the system fail."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        return f"cannot write {error.filename or 'the output'}: {error.strerror}"
    from pathlib import Path

    try:
        Path.cwd()
    except OSError:
        return "the working folder is not there any more\nnext: cd to one that is"
    return ""


def _say(message: str) -> None:
    from dflashctl.render.text import block

    try:
        print(block(message), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _quiet(sys.stderr)


def _quiet(stream: Any) -> None:
    """Point a broken stream at /dev/null, so that nothing more can fail on it."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass


def _log(error: BaseException, words: Sequence[str]) -> str:
    from dflashctl.cli.errorlog import record

    return record(error, words)
