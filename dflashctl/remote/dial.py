"""A TCP connection with a deadline on all of it, the look-up of the name too."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any


def dial(host: str, port: int, timeout_s: float) -> socket.socket:
    """A TCP connection to the first address that answers; `timeout_s` for all of it, the name's look-up too.

    Raises OSError (socket.gaierror for a name that is not known, TimeoutError).
    """
    deadline = time.monotonic() + timeout_s
    error: OSError = TimeoutError(f"no answer within {timeout_s:g} s")
    for family, kind, protocol, _, address in _resolve(host, port, timeout_s):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(left)
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except TimeoutError:
            sock.close()
        except OSError as failure:
            sock.close()
            error = failure
    raise error


def _resolve(host: str, port: int, timeout_s: float) -> list[Any]:
    """getaddrinfo takes no deadline; a thread does."""
    box: list[Any] = []

    def look_up() -> None:
        try:
            box.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            box.append(error)

    thread = threading.Thread(target=look_up, name="resolve", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not box:
        raise TimeoutError(f"the name was not resolved within {timeout_s:g} s")
    if isinstance(box[0], OSError):
        raise box[0]
    return list(box[0])
