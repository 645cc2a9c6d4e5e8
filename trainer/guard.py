"""The edge of every command: its failure becomes one message and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from trainer import failures, needs
from trainer.errors import ConfigError, OutOfMemory, Stopped, TrainerError
from trainer.failures import KnownFailure
from trainer.machine import prepare_environment
from trainer.shortage import OF_ANY, Relief, of_command
from trainer.writing import of_the_disk

INTERRUPTED = 130


def guarded(
    work: Callable[[], None],
    known_of: Callable[[BaseException], tuple[KnownFailure, ...]] = failures.of_error,
    interrupted: str = "stopped",
    relief: Relief = OF_ANY,
) -> int:
    """Run `work`; the exit code. Only bugs keep a traceback. A failure that others have met before is told
    with what it means and what helps.

    Args:
        known_of: which known failures an error is; `RunFiles.fail` writes it down as the root cause, too.
        interrupted: what is said after Ctrl-C.
        relief: what is said when there is too little memory, and `work` itself knows nothing better.
    """
    try:
        work()
    except Stopped as error:  # being told to stop is no failure
        say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say(interrupted)
        return INTERRUPTED
    except Exception as error:
        known = known_of(error)
        told = error if isinstance(error, TrainerError) else _no_bug(error, relief)
        said = f"error: {told}" if told else traceback.format_exc().rstrip()
        known = () if isinstance(told, OutOfMemory) else known  # that says itself what helps
        say("\n".join([said, failures.words(known)] if known else [said]))
        return told.exit_code if told else 1
    return 0


def _no_bug(error: Exception, relief: Relief) -> TrainerError | None:
    return of_the_disk(error) or of_command(error, relief) or _of_a_package(error)


def _of_a_package(error: Exception) -> ConfigError | None:
    told = needs.missing_package(error)
    return ConfigError(told[0], next=told[1]) if told else None


def as_command(work: Callable[[], None], interrupted: str = "stopped", relief: Relief = OF_ANY) -> NoReturn:
    """`work` as a whole command, from the settings that count before torch is imported to its exit code."""
    prepare_environment()
    raise SystemExit(guarded(work, interrupted=interrupted, relief=relief))


def say(text: str) -> None:
    """On stderr; that nobody reads it any more changes no exit code."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
