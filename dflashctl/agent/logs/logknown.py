"""Rows of the table of known failures against a log, fast: 1 GB of ordinary log in a few seconds.

Two ideas, both exact. Lines of a log differ mostly in their numbers, so each line is looked at as its *shape*
(digits as 0, a carriage return as a line's end), and a shape that no row can match is never looked at again.
And a pattern is tried branch by branch, because a regular expression that begins with plain text is searched
for at the speed of memory, while one that begins with a choice is not.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterator, List, Optional, Pattern, Set, Tuple

SHAPES_BYTES = 16 * 2**20
"""So much of shapes that match nothing is remembered; then they are forgotten, and learnt again."""

_SHAPE = bytes(48 if 48 <= byte <= 57 else 10 if byte == 13 else byte for byte in range(256))


class Known:
    """A compiled row of the table of known failures."""

    def __init__(self, row: Dict[str, Any]) -> None:
        text = str(row["pattern"])
        self.name = str(row["name"])
        self.pattern: Pattern[bytes] = re.compile(text.encode("ascii"))
        unless = row.get("unless")
        self.unless: Optional[Pattern[bytes]] = re.compile(str(unless).encode("ascii")) if unless else None
        self.shapes: List[Pattern[bytes]] = [
            re.compile(branch.encode("ascii"), re.M) for branch in branches(shape_pattern(text))
        ]

    def finds(self, line: bytes) -> bool:
        return self.pattern.search(line) is not None and not (
            self.unless is not None and self.unless.search(line)
        )


class Matcher:
    """All rows, and the shapes that none of them matches."""

    def __init__(self, rows: List[Known]) -> None:
        self.rows = rows
        self._clean: Set[bytes] = set()
        self._clean_bytes = 0

    def lines(self, data: bytes) -> Iterator[Tuple[Known, int, int]]:
        """(row, begin, end) of each line that a row matches, lines in order; a line counts once a row."""
        if not self.rows or not data:
            return
        shape = data.translate(_SHAPE)
        pieces = shape.split(b"\n")
        fresh = set(pieces) - self._clean
        suspects = self._suspects(fresh) if fresh else {}
        for piece in fresh:
            if piece not in suspects:
                self._clean_bytes += len(piece) + 64
                self._clean.add(piece)
        if self._clean_bytes > SHAPES_BYTES:
            self._clean.clear()
            self._clean_bytes = 0
        if not suspects:
            return
        seen: Set[str] = set()
        position, begin, end = 0, 0, -1
        for piece in pieces:
            for row in suspects.get(piece, ()):
                # A progress bar may write a whole block without a newline: its line is looked for, and read
                # by each row, once, and not once for each of its states.
                if position > end:
                    begin, end = line_around(data, position)
                    seen = set()
                if row.name in seen:
                    continue
                seen.add(row.name)
                if row.finds(data[begin:end]):
                    yield row, begin, end
            position += len(piece) + 1

    def _suspects(self, fresh: Set[bytes]) -> Dict[bytes, List[Known]]:
        """Shape -> the rows that may match a line of it."""
        text = b"\n".join(fresh)
        found: Dict[bytes, List[Known]] = {}
        for row in self.rows:
            for branch in row.shapes:
                if not branch.pattern:
                    for piece in fresh:
                        found.setdefault(piece, []).append(row)
                    continue
                for hit in branch.finditer(text):
                    begin, end = line_around(text, hit.start())
                    rows = found.setdefault(text[begin:end], [])
                    if row not in rows:
                        rows.append(row)
        return found


def line_around(data: bytes, at: int) -> Tuple[int, int]:
    begin = data.rfind(b"\n", 0, at) + 1
    end = data.find(b"\n", at)
    return begin, len(data) if end < 0 else end


def shape_pattern(pattern: str) -> str:
    """A pattern that finds the shape of every line that `pattern` finds (and maybe more).

    Digits that stand for themselves become 0. A pattern whose digits may mean something else (a count in
    braces, a code or a group after a backslash) is answered with one that finds everything.
    """
    if re.search(r"\{\d|\\[0-9xuUN]|\(\?P=|\(\?\(", pattern):
        return ""
    return re.sub(r"\d", "0", pattern)


def branches(pattern: str) -> List[str]:
    """`a|b(c|d)` -> `a`, `b(c|d)`: the choices at the top."""
    found, depth, in_class, current, position = [], 0, False, "", 0
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            current += pattern[position : position + 2]
            position += 2
            continue
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "|" and depth == 0:
            found.append(current)
            current = ""
            position += 1
            continue
        current += char
        position += 1
    return [*found, current]
