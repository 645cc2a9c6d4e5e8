"""Search a run's log over there; only the lines that match travel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflashctl.remote.agent_call import Event, call
from dflashctl.remote.engine import Engine
from dflashctl.render.secrets import hide
from dflashctl.runs import known
from dflashctl.runs.facts import listed, text, whole

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    run: dict[str, Any]
    matches: int
    sent: int
    size: int
    since_known: bool


def search(
    engine: Engine,
    *,
    tag: str | None,
    on_line: Callable[[int, str], None],
    grep: str | None = None,
    ignore_case: bool = False,
    errors: bool = False,
    since_s: float | None = None,
    last: int = 0,
) -> Found:
    """`on_line` gets the number and text (unescaped) of each match, in order. Raises NotFound, UsageError."""
    run: dict[str, Any] = {}

    def receive(event: Event) -> None:
        if isinstance(event.get("run"), dict):
            hide(event["run"].get("secrets"))
            run.update(event["run"])
        for each in listed(event.get("lines")):
            if isinstance(each, list) and len(each) == 2:
                on_line(whole(each[0]) or 0, text(each[1]))

    request = {
        "state_dir": engine.host.state_dir,
        "tag": tag,
        "grep": grep,
        "ignore_case": ignore_case,
        "errors": errors,
        "known": known.patterns() if errors else [],
        "since_s": since_s,
        "last": last,
    }
    answer = call(engine, "search_log", request, timeout_s=TIMEOUT_S, on_event=receive)
    return Found(
        run,
        whole(answer.get("matches")) or 0,
        whole(answer.get("sent")) or 0,
        whole(answer.get("size")) or 0,
        answer.get("since_known") is True,
    )
