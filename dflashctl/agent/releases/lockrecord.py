"""What the file of a deploy's lock says of its holder: the same for the lock on the host and the one inside.
The lock itself is a flock on that file, which the kernel frees with its holder."""

from __future__ import annotations

import fcntl
import json
import os
import time
from typing import Any, Dict, Optional

Record = Dict[str, Any]


def read(path: str) -> Optional[Record]:
    """What the lock file says, whether or not the lock is held; None when there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):  # held, but its holder has not written yet
        return None
    return value if isinstance(value, dict) else None


def write(descriptor: int, record: Record) -> None:
    """Enter the holder; for who holds the lock."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(record).encode(), 0)


def holder(path: str) -> Optional[Record]:
    """Who holds the lock now, with `held_s`; None when nobody does. {} for a holder without a name yet."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        found = read(path) or {}
        if isinstance(found.get("at"), (int, float)):
            found["held_s"] = max(time.time() - found["at"], 0.0)
        return found
    finally:
        os.close(descriptor)
    return None


def held_words(record: Record) -> str:
    """anna@laptop (warm 12345678) is deploying here since 12 s ago."""
    who = record.get("who") or "somebody"
    what = " (%s)" % record["what"] if record.get("what") else ""
    at = record.get("at")
    since = " since %.0f s ago" % max(time.time() - at, 0) if isinstance(at, (int, float)) else ""
    return "%s%s is deploying here%s" % (who, what, since)
