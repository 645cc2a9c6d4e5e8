"""One process inside that belongs to no run: say who it is, and end exactly the one that was shown."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Dict

from .. import AgentError
from ..gpus.hostfacts import user_name
from ..gpus.insidefacts import run_of_pid
from ..processes import kin, proc
from ..processes.signals import tell_to_end

KILL_S = 5.0
POLL_S = 0.05


def look_process(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """request: pid, state_dir. Answers {"process": proc.describe, "user", "started_at", "age_s", "pidns",
    "nspid"}.

    Raises AgentError: not_found, locked (it belongs to a run: end that), usage (init, or this very call).
    """
    pid, processes = int(request["pid"]), proc.table()
    process = processes.get(pid)
    if process is None:
        raise AgentError("not_found", "no process %d inside" % pid, next="dflashctl gpu")
    if pid == 1 or pid in kin.ancestors(os.getpid(), processes):
        raise AgentError("usage", "pid %d is the container's init or this call itself" % pid)
    owner = run_of_pid(str(request["state_dir"]), pid, processes)
    if owner is not None:
        tag = (owner.record().value or {}).get("tag") or owner.id
        what = "pid %d belongs to run %s" % (pid, owner.id)
        raise AgentError("locked", what, next="dflashctl kill %s" % tag)
    told = proc.describe(process)
    started_at = proc.started_at(process.start)
    told.update(
        user=user_name(told["uid"]),
        started_at=started_at,
        age_s=None if started_at is None else max(time.time() - started_at, 0.0),
        pidns=proc.pid_namespace(pid),
        nspid=(proc.ns_pids(pid) or [pid])[-1],
    )
    return {"process": told}


def stop_process(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """request: pid, start (of look_process), grace_s, state_dir. TERM, the grace, KILL, to it alone.

    Answers {"outcome": "killed" | "already_gone" | "survivor", "signalled", "process"}.
    """
    identity = (int(request["pid"]), int(request["start"]))
    if proc.living(identity) is None:
        return {"outcome": "already_gone", "signalled": [], "process": None}
    look_process(request, emit)  # once more: it may have become a run's, or be ourselves
    signalled = []
    for number, within_s in ((signal.SIGTERM, float(request["grace_s"])), (signal.SIGKILL, KILL_S)):
        try:
            if tell_to_end(identity, number):
                signalled.append(number.name)
        except PermissionError as error:
            raise AgentError("not_ours", "pid %d: %s" % (identity[0], error)) from None
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if proc.living(identity) is None:
                return {"outcome": "killed", "signalled": signalled, "process": None}
            time.sleep(POLL_S)
    left = proc.living(identity)
    outcome = "killed" if left is None else "survivor"
    return {"outcome": outcome, "signalled": signalled, "process": proc.describe(left) if left else None}
