"""Where the program begins: from its first line on Ctrl-C is answered with a word and exit code 130.

Importing the command line takes a tenth of a second or more; that is long enough for a person to press
Ctrl-C. So nothing but modules built into Python is imported at the top of this file.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # built in, as `signal` is not
import _thread
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
AGAIN_S = 0.05
USAGE = 2
OLDEST = (3, 11)
NO_WINDOWS = b"error: dflashctl does not run on Windows itself\nnext: install it in WSL, and run it there\n"
_heard = False


def main() -> None:
    """Entry point of the console script and of `python -m dflashctl`."""
    try:
        if os.name == "nt":  # no fcntl, no pwd: the first import would fail with a word that helps nobody
            os.write(2, NO_WINDOWS)
            os._exit(2)
        if sys.version_info < OLDEST:
            found, least = (".".join(map(str, each[:2])) for each in (sys.version_info, OLDEST))
            _refuse(f"is Python {found}; dflashctl needs {least} or newer")
        listen()
        sys.unraisablehook = _not_raised
        from dflashctl.cli.main import main as command_line

        command_line()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "dflashctl", *sys.modules, *sys.stdlib_module_names):
            raise
        _refuse(f"has no {package}")
    except BaseException as error:
        if not interrupted(error):
            raise
        os.write(2, b"interrupted\n")
        os._exit(INTERRUPTED)


def _refuse(what: str) -> None:
    """Ends the process: this interpreter cannot run dflashctl. It may be of another virtual environment."""
    hint = "start the dflashctl of the environment that it is installed in, or install it: pip install ."
    os.write(2, os.fsencode(f"error: {sys.executable} {what}\nnext: {hint}\n"))
    os._exit(USAGE)


def listen() -> None:
    """Remember a Ctrl-C, besides raising it. One that is ignored (a background job) stays so."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _hear)


def _hear(number: int, frame: FrameType | None) -> None:
    global _heard
    _heard = True
    raise KeyboardInterrupt


def interrupted(error: BaseException | None) -> bool:
    """Whether it is Ctrl-C, also when something wrapped it: Python itself makes a RuntimeError of what comes
    while a class is being built (`__set_name__`), and pydantic a SchemaError that does not even name its
    cause. So what follows a Ctrl-C counts as one."""
    if _heard:
        return True
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _not_raised(what: sys.UnraisableHookArgs) -> None:
    """A Ctrl-C that came in a destructor or a weak reference's callback would be reported and forgotten:
    it is sent again, from a thread, so that it does not end in here."""
    if isinstance(what.exc_value, KeyboardInterrupt):
        _thread.start_new_thread(_again, ())
    else:
        sys.__unraisablehook__(what)


def _again() -> None:
    time.sleep(AGAIN_S)
    _thread.interrupt_main()
