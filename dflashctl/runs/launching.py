"""The acts of a launch: start once, wait for the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflashctl.errors import Unreachable
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine
from dflashctl.runs.launch import LaunchPlan

SETTLE_S = 0.3
"""How long the far side looks on after the start, for a program that dies at once."""

START_TIMEOUT_S = 60.0
"""Lock, supervisor's word and settling have deadlines of their own inside; their sum is below this."""

WAIT_SLICE_S = 25.0
LOST_FOR_S = 300.0
RETRY_S = 5.0

log = logging.getLogger("dflashctl.launch")


def start(engine: Engine, plan: LaunchPlan, secrets: Mapping[str, str]) -> dict[str, Any]:
    """The answer of the operation `launch`. When contact is lost in the middle, asks once more with the same
    run id: that finds the first attempt, it never starts a second. Raises what the operation raises."""
    request = plan.request(secrets, SETTLE_S)
    try:
        return call(engine, "launch", request, timeout_s=START_TIMEOUT_S)
    except Unreachable as error:
        log.debug("launch: %s; asking again for run %s", error, plan.run_id)
    engine.close()
    try:
        return call(engine, "launch", request, timeout_s=START_TIMEOUT_S)
    except Unreachable as error:
        tag = plan.record["tag"]
        raise Unreachable(
            f"{error.what}; whether run {plan.run_id} was started is not known",
            where=error.where,
            next=f"dflashctl status {tag}; launching {tag} again cannot start a second one while it lives",
        ) from error


@dataclass(frozen=True)
class End:
    """exit.json, or why there is none although nothing lives."""

    exit: dict[str, Any] | None
    problem: str | None
    log_tail: str


def wait(engine: Engine, state_dir: str, run_id: str) -> End:
    """Until the run has ended, however long. Lost contact is borne for LOST_FOR_S, then raised."""
    request = {"state_dir": state_dir, "id": run_id, "wait_s": WAIT_SLICE_S}
    lost_since: float | None = None
    while True:
        try:
            answer = call(engine, "wait_end", request, timeout_s=WAIT_SLICE_S + 30)
        except Unreachable as error:
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since > LOST_FOR_S:
                hint = "the run goes on; dflashctl status"
                raise Unreachable(error.what, where=error.where, next=hint) from error
            engine.close()
            time.sleep(RETRY_S)
            continue
        lost_since = None
        if not answer["live"]:
            return End(answer["exit"], answer["problem"], answer["log_tail"])
