"""Noticing a peer that is gone without a word: a pulled cable sends no goodbye."""

from __future__ import annotations

import logging
import threading
import time

import paramiko

KEEPALIVE_EVERY_S = 5.0
DEAD_AFTER_S = 20.0
"""Without a sign of life for this long, the connection is given up."""

log = logging.getLogger("dflashctl.remote")


class Watch:
    """Notices a peer that is gone without a word, and closes the transport, which wakes every waiter."""

    def __init__(self, transport: paramiko.Transport, dead_after_s: float) -> None:
        self.verdict = ""
        self._transport = transport
        self._dead_after_s = dead_after_s
        self._last_sign = time.monotonic()
        self._stopped = threading.Event()
        for name, work in (("ssh-keepalive", self._ask), ("ssh-watch", self._judge)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def alive(self) -> None:
        """Something came from the other side."""
        self._last_sign = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()

    def _ask(self) -> None:
        """Any answer, a refusal too, is a sign of life. The wait for it has no end of its own: hence two
        threads."""
        every = min(KEEPALIVE_EVERY_S, self._dead_after_s / 3)
        while not self._stopped.wait(every) and self._transport.is_active():
            try:
                self._transport.global_request("keepalive@openssh.com", wait=True)
            except (paramiko.SSHException, EOFError, OSError):
                return
            if self._transport.is_active():
                self.alive()

    def _judge(self) -> None:
        while not self._stopped.wait(min(1.0, self._dead_after_s / 4)):
            if not self._transport.is_active():
                return
            silent = time.monotonic() - self._last_sign
            if silent > self._dead_after_s:
                self.verdict = f"no sign of life for {silent:.0f} s"
                log.debug("closing the connection: %s", self.verdict)
                self._transport.close()
                return
