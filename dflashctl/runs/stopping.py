"""The acts of a kill: end each run, then look at its GPUs until they are free or somebody else's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflashctl.gpus.facts import read_facts
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine
from dflashctl.runs import lastseen
from dflashctl.runs.stop import Freed, check_freed

SLACK_S = 40.0
"""Beyond the grace: KILL's own deadline, the supervisor's last word, the way there and back."""

FREE_WITHIN_S = 10.0
"""The driver gives memory back some seconds after the last process has gone."""

LOOK_EVERY_S = 0.5
DEFAULT_GRACE_S = 15.0


def stop(
    engine: Engine,
    name: str,
    *,
    who: str,
    reason: str,
    grace_s: float,
    on_event: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The answer of the operation `stop` for a tag or id."""
    state_dir = engine.host.state_dir
    request = {"state_dir": state_dir, "name": name, "who": who, "reason": reason, "grace_s": grace_s}
    answer = call(engine, "stop", request, timeout_s=grace_s + SLACK_S, on_event=on_event)
    if not answer["survivors"]:
        lastseen.forget(engine.host, answer["id"])
    return answer


def prove_freed(engine: Engine, gpus: Sequence[Mapping[str, Any]], killed: Sequence[str]) -> list[Freed]:
    """The GPUs of the killed runs as the driver's machine sees them."""
    until = time.monotonic() + FREE_WITHIN_S
    while True:
        freed = check_freed(gpus, read_facts(engine).box, killed)
        if not any(one.settling for one in freed) or time.monotonic() >= until:
            return freed
        time.sleep(LOOK_EVERY_S)
