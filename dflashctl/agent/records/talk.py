"""Orders on stdin, for an operation to which its caller goes on talking (main.READ_ON).

An order is one line of JSON, sometimes followed by bytes. An empty line is a sign of life, due at least every
SILENCE_S / 3: a caller that says nothing any more is gone, like one whose stdin has ended.
"""

from __future__ import annotations

import json
import os
import select
from typing import Any, Dict, Iterator

from .. import AgentError

STDIN = 0
SILENCE_S = 60.0
CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 22
"""A launch's order holds its recipe."""


class CallerGone(Exception):
    """stdin ended or fell silent."""


class Talk:
    """Lines and bytes from the caller, read straight from the descriptor: the request's reader holds none
    back, because the caller says nothing before it has heard of us."""

    def __init__(self, descriptor: int = STDIN, silence_s: float = SILENCE_S) -> None:
        self._descriptor = descriptor
        self._silence_s = silence_s
        self._buffer = b""

    def _more(self, limit: int = CHUNK_BYTES) -> bytes:
        if not select.select([self._descriptor], [], [], self._silence_s)[0]:
            raise CallerGone("nothing was heard from the caller for %.0f s" % self._silence_s)
        data = os.read(self._descriptor, limit)
        if not data:
            raise CallerGone("the caller is gone")
        return data

    def order(self) -> Dict[str, Any]:
        """The next line that is no mere sign of life."""
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                if len(self._buffer) > MAX_LINE_BYTES:
                    raise AgentError("bug", "an order of more than %d bytes" % MAX_LINE_BYTES)
                self._buffer += self._more()
                continue
            self._buffer = rest
            if line.strip():
                order = json.loads(line.decode("utf-8"))
                if isinstance(order, dict):
                    return order

    def bytes(self, size: int) -> Iterator[bytes]:
        """The next `size` bytes, in pieces."""
        while size:
            data, self._buffer = (self._buffer, b"") if self._buffer else (self._more(), b"")
            if len(data) > size:
                data, self._buffer = data[:size], data[size:]
            size -= len(data)
            yield data
