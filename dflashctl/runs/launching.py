"""The acts of a launch: look at both sides, start once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from dflashctl.errors import DflashError, Locked, Unreachable
from dflashctl.gpus.facts import CALL_TIMEOUT_S, SMI_TIMEOUT_S, Facts, judge_facts, unreadable
from dflashctl.gpus.idle import Box
from dflashctl.remote.agent_call import call
from dflashctl.remote.conversation import Conversation
from dflashctl.remote.engine import Engine
from dflashctl.runs.launch import LaunchPlan

SETTLE_S = 0.3
"""How long the far side looks on after the start, for a program that dies at once."""

START_TIMEOUT_S = 60.0
"""Lock, supervisor's word and settling have deadlines of their own inside; their sum is below this."""

GPU_LOCK_S = 60.0
"""How long another launch on the same machine is waited for."""

log = logging.getLogger("dflashctl.launch")


class Attempt:
    """One try to launch: both sides are asked, and stay on the line until it is decided.

    On the host a lock is held from the look at the GPUs to the started record (agent/gpus/gpudesk.py);
    inside, the same command that tells the facts starts the run. `samples` 0: no GPU wanted, the host is not
    asked. `script`: of a recipe with `deploy.to`. Raises, on entering or later, what the two operations
    raise.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        samples: int,
        script: Mapping[str, str] | None = None,
        on_wait: Callable[[str], None] = lambda holder: None,
    ) -> None:
        self._engine = engine
        self._stack = ExitStack()
        host = engine.host
        self._inside = Conversation(
            engine,
            "launch_desk",
            {"state_dir": host.state_dir, "code_root": host.code_root, "script": script},
            where="inside",
            timeout_s=GPU_LOCK_S + CALL_TIMEOUT_S + START_TIMEOUT_S,
        )
        self._gpus = samples and Conversation(
            engine,
            "gpu_desk",
            {"samples": samples, "smi_timeout_s": SMI_TIMEOUT_S, "wait_s": GPU_LOCK_S},
            where="host",
            timeout_s=GPU_LOCK_S + CALL_TIMEOUT_S + START_TIMEOUT_S,
            on_event=lambda event: on_wait(str(event["waiting"])) if "waiting" in event else None,
        )

    def __enter__(self) -> Self:
        self._stack.enter_context(self._inside)
        if self._gpus:
            self._stack.enter_context(self._gpus)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def facts(self) -> Facts:
        """Both sides. A host that cannot say who holds its GPUs leaves a Box whose `problem` says so."""
        inside = self._inside.event("inside", CALL_TIMEOUT_S)
        if not self._gpus:
            return Facts(inside, Box(()), {})
        try:
            outside = self._gpus.event("facts", GPU_LOCK_S + CALL_TIMEOUT_S)
        except Locked:
            raise
        except DflashError as error:
            outside = unreadable(error.what)
        return Facts(inside, judge_facts(self._engine.host, outside, inside), outside)

    def start(self, plan: LaunchPlan, secrets: Mapping[str, str]) -> dict[str, Any]:
        """The answer of the operation `launch`. When contact is lost in the middle, asks once more with the
        same run id: that finds the first attempt, it never starts a second. Raises what the operation raises.
        """
        request = plan.request(secrets, SETTLE_S)
        if self._gpus:
            uuids = [gpu["uuid"] for gpu in plan.record["gpus"]]
            more = {"container": self._engine.host.container, "by": plan.record["created_by"]}
            self._gpus.say(do="take", run=plan.run_id, tag=plan.record["tag"], uuids=uuids, **more)
        self._inside.say(do="launch", request=request)
        try:
            answer = self._inside.result(START_TIMEOUT_S)
        except Unreachable as error:
            log.debug("launch: %s; asking again for run %s", error, plan.run_id)
            self._engine.close()
            return ask_again(self._engine, plan, request)
        except DflashError:
            if self._gpus:
                self._gpus.say(do="drop")
            raise
        if self._gpus:
            self._gpus.say(do="started" if answer["outcome"] != "failed" else "drop")
        return answer


def ask_again(engine: Engine, plan: LaunchPlan, request: dict[str, Any]) -> dict[str, Any]:
    """What became of an uncertain launch."""
    try:
        return call(engine, "launch", request, timeout_s=START_TIMEOUT_S)
    except Unreachable as error:
        tag = plan.record["tag"]
        raise Unreachable(
            f"{error.what}; whether run {plan.run_id} was started is not known",
            where=error.where,
            next=f"dflashctl status {tag}; launching {tag} again cannot start a second one while it lives",
        ) from error
