"""Writing to the caller. Bytes, unbuffered: what pct prints must be in order with what its children print."""

from __future__ import annotations

import os


def write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def out(text: str) -> None:
    write(1, encode(text))


def err(text: str) -> None:
    write(2, encode(text))


def encode(text: str) -> bytes:
    """As Perl prints text: one byte a character while all of them fit, else UTF-8."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")
