"""How a run ends: what to do next with its family, and who caused the end. Pure."""

from __future__ import annotations

from typing import Any, Dict, List, Optional


def next_step(
    now: float,
    *,
    leader_ended: Optional[float],
    failed: bool,
    kill_at: Optional[float],
    termed: Optional[float],
    members: int,
    grace_s: float,
) -> str:
    """What a run needs now: "wait" | "term_leader" | "term_family" | "kill" | "done". Times are monotonic;
    kill_at is the end of the grace of a stop, None when nobody asked for one.

    A stop is TERM to the leader alone (torchrun passes it on; its ranks must not get two), the grace, then
    KILL. What the leader leaves behind gets the grace to end by itself after a clean exit, TERM at once
    after a failure (ranks would wait in a collective for a peer that is gone), and KILL a grace later.
    """
    if leader_ended is None:
        if kill_at is None:
            return "wait"
        if now >= kill_at:
            return "kill"
        return "term_leader" if termed is None else "wait"
    if members == 0:
        return "done"
    if kill_at is not None and now >= kill_at:
        return "kill"  # the grace of a stop is one grace, not one for each generation
    if termed is None or termed < leader_ended:
        due = failed or kill_at is not None or now - leader_ended >= grace_s
        return "term_family" if due else "wait"
    return "kill" if now - termed >= grace_s else "wait"


def kill_time(events: List[Dict[str, Any]], grace_s: float) -> Optional[float]:
    """When the grace of the most impatient kill_requested is over (monotonic); None without one."""
    found = []
    for event in events:
        asked, grace = event.get("mono"), event.get("grace_s", grace_s)
        if event.get("event") == "kill_requested" and isinstance(asked, (int, float)):
            found.append(asked + (grace if isinstance(grace, (int, float)) else grace_s))
    return min(found) if found else None


def killer(events: List[Dict[str, Any]], *, before: Optional[float]) -> Optional[Dict[str, Any]]:
    """Who asked for the end: the last kill_requested that came before the leader's end (monotonic)."""
    for event in reversed(events):
        asked = event.get("mono")
        if event.get("event") != "kill_requested" or not isinstance(asked, (int, float)):
            continue
        if before is None or asked <= before:
            return {"who": str(event.get("who", "")), "reason": str(event.get("reason", ""))}
    return None


def exit_body(
    *,
    code: Optional[int],
    signal: Optional[int],
    oom: bool,
    started_at: float,
    ended_at: float,
    wall_s: float,
    peak_rss_bytes: int,
    killed_by: Optional[Dict[str, Any]],
    oom_kills: Optional[Dict[str, Optional[int]]] = None,
    why: str = "",
) -> Dict[str, Any]:
    """The content of exit.json. `why` is given when the program never started; `oom_kills`
    (agent/processes/oom.py) are those during the run, None from who was not there to count."""
    if why:
        cause = "spawn_failed"
    elif killed_by is not None:
        cause = "killed"
    else:
        cause = "exited" if signal is None else "signalled"
    body: Dict[str, Any] = {
        "code": code,
        "signal": signal,
        "oom": oom,
        "started_at": started_at,
        "ended_at": ended_at,
        "wall_s": round(wall_s, 3),
        "peak_rss_bytes": peak_rss_bytes,
        "cause": cause,
        "killed_by": killed_by,
    }
    if oom_kills is not None:
        body["oom_kills"] = oom_kills
    if why:
        body["why"] = why
    return body
