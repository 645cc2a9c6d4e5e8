"""`python -m trainer`."""

from __future__ import annotations

import atexit
import os
import sys

from trainer import needs


def _command() -> None:
    """The command line; or exit code 2 in two lines, where this Python is too old or lacks the packages."""
    told = needs.older_python()
    if told is None:
        try:
            from trainer.cli import main
        except ModuleNotFoundError as error:
            told = needs.missing_package(error)
            if told is None:
                raise
        except KeyboardInterrupt:  # no command has begun that could tell it
            print("stopped", file=sys.stderr, flush=True)
            raise SystemExit(130) from None
        else:
            main()
            return
    print(f"error: {told[0]}\nnext: {told[1]}", file=sys.stderr, flush=True)
    raise SystemExit(needs.EXIT_CODE)


def run() -> None:
    """The command, and the end of its process without that of the interpreter: to take torch apart costs a
    second of a core. Threads are waited for, and what was registered for the end meanwhile is done.
    """
    ended: list[int] = []

    def leave() -> None:
        if not ended:  # a bug or a signal: as Python tells it
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):  # the interpreter tells it, by its exit code
            return
        os._exit(ended[0])

    atexit.register(leave)  # before the imports: the first to be registered is called last
    try:
        _command()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            ended.append(end.code or 0)
        raise


run()
