"""Stretches of time as people type them."""

from __future__ import annotations

import re

from dflashctl.errors import UsageError

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)")


def parse_duration(text: str, *, option: str) -> float:
    """`90`, `90s`, `10m`, `1.5h`, `2d`, `1h30m` in seconds. Raises UsageError, which names `option`."""
    words = text.strip()
    parts = PART.findall(words)
    if not parts or "".join(number + unit for number, unit in parts) != words:
        raise UsageError(
            f"{option}: not a length of time: {text!r}", next="write it like 90s, 10m, 2h, 1d or 1h30m"
        )
    return sum(float(number) * UNITS_S[unit] for number, unit in parts)
