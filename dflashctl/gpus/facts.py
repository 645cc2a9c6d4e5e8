"""Read both sides of the truth about GPUs, at the same time over one connection, and judge them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from dflashctl.config.hosts import Host
from dflashctl.errors import DflashError
from dflashctl.gpus import smi
from dflashctl.gpus.holders import holders
from dflashctl.gpus.idle import Box, judge_box, reservations
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine

SMI_TIMEOUT_S = 20.0
"""A box whose driver is not kept loaded needs seconds for eight GPUs."""

CALL_TIMEOUT_S = 45.0
JOIN_SLACK_S = 5.0


@dataclass(frozen=True)
class Facts:
    """The inside (runs, release), the box with its verdicts, and the raw answer behind it."""

    inside: dict[str, Any]
    box: Box
    host: dict[str, Any]


def read_facts(engine: Engine, *, samples: int = 1) -> Facts:
    """Both calls in parallel. Raises what the inside call raises; a host side that fails leaves a Box whose
    `problem` says so, because launching without GPUs and killing must work without it."""
    answers: list[dict[str, Any]] = []
    bugs: list[Exception] = []

    def outside() -> None:
        try:
            answers.append(ask_host(engine, samples))
        except Exception as error:
            bugs.append(error)

    # A daemon: Ctrl-C must not wait for a driver that hangs.
    thread = threading.Thread(target=outside, name="host-facts", daemon=True)
    thread.start()
    inside = ask_inside(engine)
    thread.join(CALL_TIMEOUT_S + samples + JOIN_SLACK_S)
    if bugs:
        raise bugs[0]
    host = answers[0] if answers else unreadable("the host did not answer in time")
    return Facts(inside, judge_facts(engine.host, host, inside), host)


def ask_inside(engine: Engine) -> dict[str, Any]:
    """The operation inside_facts."""
    request = {"state_dir": engine.host.state_dir, "code_root": engine.host.code_root}
    return call(engine, "inside_facts", request, timeout_s=CALL_TIMEOUT_S)


def ask_host(engine: Engine, samples: int) -> dict[str, Any]:
    """The operation host_facts; a failure becomes its answer."""
    request = {"samples": samples, "smi_timeout_s": SMI_TIMEOUT_S}
    try:
        return call(engine, "host_facts", request, where="host", timeout_s=CALL_TIMEOUT_S + samples)
    except DflashError as error:
        return unreadable(error.what)


def unreadable(why: str) -> dict[str, Any]:
    """The answer of host_facts when nothing could be asked."""
    reading = {"exit": None, "stdout": "", "stderr": "", "problem": why}
    return {"samples": [reading], "apps": reading, "processes": {}, "pidns": None}


def judge_facts(host: Host, outside: dict[str, Any], inside: dict[str, Any]) -> Box:
    """Both answers as a Box. Pure."""
    reading = smi.read(outside)
    held = holders(reading.apps, outside, inside, container=host.container)
    box = judge_box(
        reading,
        held,
        rule=host.gpus.idle,
        baselines=inside.get("baselines") or {},
        expect=host.gpus.expect,
        reserved=reservations(inside, outside, container=host.container),
    )
    unread = outside.get("reservations_problem")
    more = (f"which GPUs are given away is not known: {unread}",) if unread else ()
    return replace(box, at=outside.get("at"), warnings=box.warnings + more)
