"""Being told to stop: the first SIGTERM, SIGINT or SIGHUP saves, a second one kills.

Python runs a signal's handler in the main thread between two of its steps, so not while that waits for a GPU
or a disk. What must hold even then hangs on the descriptor that the C level writes every signal to at once,
read by a thread of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import FrameType

# A signal that comes sooner is the first one's echo: a terminal and a launcher both send it
SECOND_AFTER_S = 2.0
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """From its making on, the first signal is kept for `take`, and one that comes 2 s later ends the process.

    Main thread only. The exit status is 128 + the signal's number both ways: 143, 130, 129.
    SIGHUP, of a terminal that closes, stays ignored where it is (nohup).
    """

    def __init__(self) -> None:
        self._asked: tuple[str, int] | None = None
        self._taken = False
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer  # kept open
        for number in NUMBERS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._first)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()

    def _first(self, number: int, frame: FrameType | None) -> None:
        if not self._taken:
            self._asked = signal.Signals(number).name, 128 + number

    def take(self) -> tuple[str, int] | None:
        """The first signal's name and exit code, once."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self._taken = True
        return asked


def _watch(reader: socket.socket) -> None:
    first: float | None = None
    while True:
        for number in reader.recv(64):
            if number not in NUMBERS:
                continue
            now = time.monotonic()
            first = now if first is None else first
            if now - first >= SECOND_AFTER_S:
                name = signal.Signals(number).name
                os.write(2, f"a second {name}: ended without waiting\n".encode())
                os._exit(128 + number)
