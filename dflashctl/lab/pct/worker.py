"""pct's "worker": the part of a command that Proxmox runs as a task (docs/pct.md#worker).

A child in its own session does the work. What it prints, on either stream, comes out on our stdout; only the
error that ended it goes to stderr. INT, QUIT and TERM are passed on to its process group as TERM, from the
fourth on as KILL.
"""

from __future__ import annotations

import os
import select
import signal

from dflashctl.lab.pct.errors import Die
from dflashctl.lab.pct.output import err, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def run(work: Callable[[], None]) -> bool:
    """Run `work` as a task and return whether it ended well. Its error is printed here, in one line."""
    out_read, out_write = os.pipe()
    end_read, end_write = os.pipe()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        os.close(out_read)
        os.close(end_read)
        _child(work, out_write, end_write)
    os.close(out_write)
    os.close(end_write)
    received = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal received
        try:
            os.killpg(child, signal.SIGTERM if received < 3 else signal.SIGKILL)
        except ProcessLookupError:
            pass
        received += 1

    for number in _SIGNALS:
        signal.signal(number, forward)
    _copy(out_read, child)
    verdict = os.read(end_read, 65536)
    os.waitpid(child, 0)
    if verdict == b"OK":
        return True
    if verdict.startswith(b"TASK ERROR: "):
        write(2, verdict[12:].removesuffix(b"\n") + b"\n")
    else:  # it was killed before it could say anything
        err("got unexpected control message:  \n")
    return False


def _copy(source: int, child: int) -> None:
    while True:
        if not select.select([source], [], [], 1.0)[0]:
            # A process that the work left behind may hold the pipe open.
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
            continue
        data = os.read(source, 4096)
        if not data:
            return
        write(1, data)


def _child(work: Callable[[], None], out: int, end: int) -> NoReturn:
    code = 255
    try:
        os.setsid()
        for number in _SIGNALS:
            signal.signal(number, _interrupted)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        work()
        os.write(end, b"OK")
        code = 0
    except Die as error:
        os.write(end, _one_line(error.text))
    except BaseException as error:
        os.write(end, _one_line(f"pct stand-in: {type(error).__name__}: {error}"))
    finally:
        os._exit(code)
    raise AssertionError("unreachable")


def _one_line(text: str) -> bytes:
    """The error as it comes through the task's control pipe: one line, and cut short by one byte for every
    byte that its characters need beyond one each (the real tool writes length-in-characters bytes)."""
    line = f"TASK ERROR: {text.removesuffix(chr(10)).replace(chr(10), ' ')}\n"
    return line.encode("utf-8", "surrogateescape")[: len(line)]


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise Die("received interrupt\n")
