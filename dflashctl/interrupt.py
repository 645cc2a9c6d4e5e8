"""Ctrl-C, heard wherever it comes: also within an import, a class being built, a destructor.

Nothing but modules built into Python is imported at the top of this file: the import of the command line, a
tenth of a second or more, is long enough for a person to press Ctrl-C.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # built in, as `signal` is not
import _thread
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

AGAIN_S = 0.05
_heard = False


def listen() -> None:
    """Remember a Ctrl-C from now on, besides raising it. One that is ignored (a background job) stays so."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _hear)
    sys.unraisablehook = _not_raised


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
