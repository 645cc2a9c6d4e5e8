"""How a run ended, in words. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflashctl.render.text import duration

if TYPE_CHECKING:
    from dflashctl.runs.news import News


@dataclass(frozen=True)
class End:
    """exit.json, or why there is none although nothing lives; `wedged`: it has not ended, and it is."""

    exit: dict[str, Any] | None
    problem: str | None
    log_tail: str
    root_cause: str | None = None
    wedged: News | None = None


def failed(ended: Mapping[str, Any] | None, root_cause: str | None = None) -> bool:
    """Anything but an end of its own with code 0 that left no root cause."""
    well = ended is not None and ended.get("cause") == "exited" and ended.get("code") == 0
    return not well or bool(root_cause)


def ended_as(ended: Mapping[str, Any] | None, root_cause: str | None = None) -> str:
    """The state of a run that is over, in the words of `status`: `finished`, `killed`, `failed`, or `lost`
    where nobody recorded its end."""
    if ended is None:
        return "lost"
    if ended.get("cause") == "killed":
        return "killed"
    return "failed" if failed(ended, root_cause) else "finished"


def end_words(ended: Mapping[str, Any], root_cause: str | None = None) -> str:
    """`failed after 3.1 s: exit code 1`, `was killed by ada@laptop (too slow) after 2m03s`."""
    wall_s = ended.get("wall_s")
    after = f" after {duration(wall_s)}" if isinstance(wall_s, (int, float)) else ""
    cause = ended.get("cause")
    if cause == "killed":
        by = ended.get("killed_by") or {}
        reason = f" ({by['reason']})" if by.get("reason") else ""
        return f"was killed by {by.get('who') or 'somebody'}{reason}{after}"
    if cause == "spawn_failed":
        return f"did not start: {ended.get('why') or 'no reason given'}"
    if cause == "signalled":
        oom = ": out of memory" if ended.get("oom") else ""
        return f"died of {signal_name(ended.get('signal'))}{after}{oom}"
    oom = ", out of memory" if ended.get("oom") else ""
    if ended.get("code") == 0 and root_cause:
        return f"failed: exit code 0{after}, but the program left a root cause: {root_cause.splitlines()[0]}"
    word = "exit code 0" if ended.get("code") == 0 else f"failed: exit code {ended.get('code')}"
    return f"{word}{after}{oom}"


def signal_name(number: Any) -> str:
    """SIGKILL for 9; `signal 64` for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
