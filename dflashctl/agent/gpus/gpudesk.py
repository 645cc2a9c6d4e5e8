"""The GPUs of this machine, looked at and given to a run under one lock: of two launches at once, wherever
their containers and laptops are, the second sees what the first has taken.

The caller keeps talking on stdin after the request (talk.py):

    {"do": "take", "run", "tag", "uuids", "container", "by"}    a launch with these begins now
    {"do": "started"}                                           it has begun
    {"do": "drop"}                                              it has not, and will not

When stdin ends after "take" without a word of how it came out, the desk looks for the run's supervisor for a
while: a laptop that is switched off in that moment leaves a run with its GPUs.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

from .. import AgentError
from ..processes.flock import exclusive
from ..records.runfolder import read_ours
from ..records.talk import CallerGone, Talk
from .hostfacts import host_facts
from .reservations import FILE, LOCK, add, path_of

WAIT_S = 60.0
"""For the lock. A launch holds it for about two seconds, at the most as long as its deadlines add up to."""

STARTED_S = 2.0
UNCERTAIN_S = 25.0
"""How long an uncertain launch is looked for: a supervisor needs 20 s at the very most (spawn.py)."""

KEYS = ("run", "tag", "uuids", "container", "by")


def gpu_desk(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """request: as host_facts, wait_s. Events: {"waiting": holder}, {"facts": answer of host_facts}.

    Answers {"taken": bool}. Raises AgentError: locked (another launch holds the lock for too long, or a later
    dflashctl has given GPUs away, and which cannot be read).
    """
    lock, entries = path_of(LOCK), path_of(FILE)
    what = "another launch holds the lock on this machine's GPUs"
    with exclusive(lock, float(request.get("wait_s", WAIT_S)), what, lambda who: _waiting(emit, who)):
        read_ours(entries)
        emit({"facts": host_facts(request, emit)})
        return {"taken": _serve(Talk(), entries)}


def _serve(talk: Talk, entries: str) -> bool:
    taken: Optional[Dict[str, Any]] = None
    within_s = UNCERTAIN_S
    try:
        while True:
            order = talk.order()
            if order.get("do") == "take":
                taken = {key: order.get(key) for key in KEYS}
            elif order.get("do") == "drop":
                return False
            elif order.get("do") == "started":
                within_s = STARTED_S
                break
            else:
                raise AgentError("bug", "no such order: %r" % order)
    except CallerGone:
        pass
    return taken is not None and add(entries, taken, within_s)


def _waiting(emit: Any, holder: str) -> None:
    emit({"waiting": holder})
    if getattr(emit, "gone", False):
        raise AgentError("unreachable", "the caller is gone; it waits no longer")
