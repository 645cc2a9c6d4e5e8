"""Stretches of time as people type them."""

from __future__ import annotations

import re

from dflashctl.errors import UsageError

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}


def parse_duration(text: str, *, option: str = "") -> float:
    """`90`, `90s`, `10m`, `1.5h`, `2d` in seconds. Raises UsageError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text.strip())
    if match is None:
        raise UsageError(f"{option or 'duration'}: cannot read {text!r}", next="write 90s, 10m or 2h")
    return float(match[1]) * UNITS_S[match[2]]
