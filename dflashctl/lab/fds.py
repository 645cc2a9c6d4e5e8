"""Waiting on descriptors, by poll: select's limit of 1024 descriptors is a trap for a server with many
channels."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable


def wait_readable(fd: int, timeout_s: float) -> bool:
    """Whether fd becomes readable, or ends, in that time."""
    return bool(ready([fd], timeout_s))


def ready(fds: Iterable[int], timeout_s: float) -> list[int]:
    """Those of fds that can be read, or have ended, at the latest after timeout_s."""
    return _poll(fds, select.POLLIN, timeout_s)


def wait_writable(fd: int, timeout_s: float) -> bool:
    """Whether fd takes data, or has lost its reader, in that time."""
    return bool(_poll([fd], select.POLLOUT, timeout_s))


def _poll(fds: Iterable[int], what: int, timeout_s: float) -> list[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, what)
    return [fd for fd, _ in poll.poll(round(timeout_s * 1000))]


def read_line(fd: int, limit: int = 1 << 22) -> bytes:
    """One line; what comes after it must not be under way yet. Shorter than a line: the other side is
    gone."""
    line = b""
    while not line.endswith(b"\n") and len(line) < limit:
        part = os.read(fd, 65536)
        if not part:
            break
        line += part
    return line
