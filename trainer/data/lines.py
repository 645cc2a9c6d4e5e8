"""Lines of a JSONL file by byte ranges, so that many processes share one file, and a record from each line.

A line belongs to the range in which it begins. A line over the limit is passed over in pieces and never held
in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trainer.words import printable

PIECE = 1 << 20
SAID = 500  # letters of why a row is bad
BOM = b"\xef\xbb\xbf"  # some editors put it before UTF-8; it is no part of the text


def file_digest(path: Path) -> str:
    """sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class BadRow(Exception):
    """One row of the input cannot be used; the text says why, in words that can be shown though they quote
    the row.
    """

    def __init__(self, why: str) -> None:
        said = printable(why)
        super().__init__(said if len(said) <= SAID else f"{said[:SAID]}...")


@dataclass(frozen=True)
class Line:
    """One line. `raw` has no line end; None when the line is longer than the limit."""

    raw: bytes | None
    size: int  # bytes, its end included
    ended: bool  # False for a last line without a line end: it may have been cut off


def lines_in(path: Path, start: int, stop: int, limit: int) -> Iterator[Line]:
    """The lines that begin in bytes [start, stop) of the file, in order; `limit` is in bytes.

    A byte order mark at the file's beginning is counted in its line's size and left out of it.
    """
    with path.open("rb") as file:
        if start > 0:
            file.seek(start - 1)
            _pass_over(file)
        mark = BOM if start == 0 else b""
        while file.tell() < stop:
            raw = file.readline(limit + 1)
            if not raw:
                return
            if raw.endswith(b"\n"):
                yield Line(raw[:-1].removeprefix(mark), len(raw), True)
            elif len(raw) <= limit:
                yield Line(raw.removeprefix(mark), len(raw), False)
            else:
                rest, ended = _pass_over(file)
                yield Line(None, len(raw) + rest, ended)
            mark = b""


def _pass_over(file: IO[bytes]) -> tuple[int, bool]:
    """Read to the end of the present line: its remaining bytes, and whether it had a line end."""
    size = 0
    while piece := file.readline(PIECE):
        size += len(piece)
        if piece.endswith(b"\n"):
            return size, True
    return size, False


def record(line: Line, limit: int) -> dict[str, Any] | None:
    """The JSON object of a line; None for a blank line.

    Raises:
        BadRow: too long, not UTF-8, not JSON, or something else than an object.
    """
    if line.raw is not None and not line.raw.strip():
        return None
    try:
        value = json.loads(whole_text(line, limit))
    except json.JSONDecodeError as error:
        cut = "" if line.ended else "; it is the last line and has no line end: the file may be cut off"
        raise BadRow(f"not JSON: {error.msg} at character {error.pos + 1}{cut}") from None
    except RecursionError:
        raise BadRow("not JSON that can be read: nested too deeply") from None
    except ValueError as error:  # a number of more than 4,300 digits
        raise BadRow(f"not JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise BadRow(f"not a JSON object but {_kind(value)}")
    return value


def whole_text(line: Line, limit: int) -> str:
    """The line as it stands.

    Raises:
        BadRow: too long, or not UTF-8.
    """
    if line.raw is None:
        raise BadRow(f"{line.size / 1e6:,.1f} MB long, more than the limit of {limit / 1e6:,.1f} MB")
    try:
        return line.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8: byte 0x{line.raw[error.start]:02x} at byte {error.start + 1}") from None


def _kind(value: Any) -> str:
    names = {list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
