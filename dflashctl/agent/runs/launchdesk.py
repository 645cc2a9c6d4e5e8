"""A launch in one call: say what is here, hear what to start, start it.

The start-up of `pct` costs most of a second each time, and what to start depends on the answer.
"""

from __future__ import annotations

from typing import Any, Dict

from .. import AgentError
from ..gpus.insidefacts import inside_facts
from ..records.talk import CallerGone, Talk
from .launch import launch


def launch_desk(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """request: as inside_facts. Event: {"inside": its answer}. Then, on stdin, {"do": "launch", "request": as
    launch}, whose answer this one is. Raises AgentError: what these raise; unreachable when nothing came."""
    emit({"inside": inside_facts(request, emit)})
    try:
        order = Talk().order()
    except CallerGone as gone:
        raise AgentError("unreachable", "%s; nothing was started" % gone) from None
    if order.get("do") != "launch":
        raise AgentError("bug", "no such order: %r" % order.get("do"))
    return launch(dict(order["request"]), emit)
