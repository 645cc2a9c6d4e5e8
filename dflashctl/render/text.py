"""The one place where hostile text is escaped for the terminal, and where times and sizes become words.

Whatever comes out of a container (log lines, process names, tags in a damaged record, error texts) may hold
ANSI sequences, carriage returns or direction overrides. `line` and `block` make them visible, so that the
terminal does not obey them. Rich markup is never parsed: the consoles of `render.table` have it off.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

from dflashctl.render.secrets import masked

COMMIT_CHARS = 7


def _visible(char: str) -> str:
    if char.isprintable() or unicodedata.category(char) == "Zs":
        return char
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def line(value: object) -> str:
    """One line: every control, format, surrogate and line-separating character is shown as an escape.

    A tab becomes one space, so that columns stay columns.
    """
    text = masked(str(value))
    if text.isprintable():
        return text
    text = text.replace("\t", " ")
    named = {"\n": "\\n", "\r": "\\r"}
    return "".join(named.get(char) or _visible(char) for char in text)


def block(value: object) -> str:
    """Several lines: as `line`, but newlines stay and tabs become columns of eight."""
    lines = masked(str(value)).replace("\r\n", "\n").split("\n")
    return "\n".join(line(each.expandtabs(8)) for each in lines)


def clip(value: object, width: int) -> str:
    """`line`, cut to `width` characters with an ellipsis."""
    text = line(value)
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def duration(seconds: float | None) -> str:
    """52 ms, 3.1 s, 34 s, 4m12s, 2h05m, 3d04h. None is "-"; a negative one (the clock went back) is 0 s."""
    if seconds is None:
        return "-"
    seconds = max(float(seconds), 0.0)
    if seconds == 0:
        return "0 s"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{second:02d}s"
    hours, minute = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minute:02d}m"
    days, hour = divmod(hours, 24)
    return f"{days}d{hour:02d}h"


def age(seconds: float | None) -> str:
    """A stretch of waiting: whole seconds up to ten minutes (251 s compares better with a median of 3.6 s
    than 4m11s does), then as `duration`."""
    if seconds is None:
        return "-"
    if 9.95 <= seconds < 600:
        return f"{round(seconds)} s"
    return duration(seconds)


def size(count: float | None) -> str:
    """900 B, 12 kB, 3.4 MiB, 2.3 GiB. None is "-"."""
    if count is None:
        return "-"
    value = float(count)
    if abs(value) < 1000:
        return f"{value:.0f} B"
    if abs(value) < 2**20:
        kilo = value / 1000
        return f"{kilo:.1f} kB" if abs(kilo) < 9.95 else f"{kilo:,.0f} kB"
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if abs(value) >= 2**exponent:
            scaled = value / 2**exponent
            return f"{scaled:.1f} {unit}" if abs(scaled) < 99.95 else f"{scaled:,.0f} {unit}"
    raise AssertionError(count)


def count(number: float | None) -> str:
    """Thousands with commas: 49,152. None is "-"; a fraction is rounded."""
    return "-" if number is None else f"{round(number):,}"


def plural(number: int, noun: str, plural_noun: str = "") -> str:
    """1 run, 3 runs, 1,024 files."""
    return f"{number:,} {noun if number == 1 else plural_noun or noun + 's'}"


def commit(git: Mapping[str, Any] | None, changed: str = "changed") -> str:
    """`1c9e4d0, changed`: the commit, and whether deployed files differ from it; "" without one."""
    git = git or {}
    found = str(git.get("commit") or "")[:COMMIT_CHARS]
    return f"{found}, {changed}" if found and git.get("dirty") is True else found


def ranges(numbers: list[int]) -> str:
    """GPU indices as people write them: 0-7, 0-3,6, "-" for none."""
    ordered = sorted(set(numbers))
    parts: list[str] = []
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or ordered[end] != ordered[end - 1] + 1:
            first, last = ordered[start], ordered[end - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = end
    return ",".join(parts) or "-"
