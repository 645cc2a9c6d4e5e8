"""Where the program begins: from its first line on Ctrl-C is answered with a word and exit code 130.

Importing the command line takes a tenth of a second or more; that is long enough for a person to press
Ctrl-C. So nothing but modules built into Python, and interrupt.py, is imported at the top of this file.
"""

from __future__ import annotations

import os
import sys

from dflashctl.interrupt import interrupted, listen

INTERRUPTED = 130
USAGE = 2
OLDEST = (3, 11)
NO_WINDOWS = b"error: dflashctl does not run on Windows itself\nnext: install it in WSL, and run it there\n"


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
