"""Which runs have which GPUs of this machine, also those of containers whose run folders nobody here sees.

A run has its GPUs from its start, long before it opens them. `<lock folder>/gpus.json` names, for each run
that was launched through this machine, its GPUs and its processes (supervisor, program) as this machine sees
them. An entry counts while one of these lives, so none has to be taken back. Written under the lock that is
held from the look at the GPUs to the started record (gpudesk.py).
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Optional

from ..processes import proc
from ..records.runfolder import read_json, read_ours, write_json
from ..releases.hostlock import lock_folder

FILE = "gpus.json"
LOCK = "gpus.lock"
POLL_S = 0.1


def path_of(name: str) -> str:
    """Raises AgentError where there is no place for it."""
    return os.path.join(lock_folder(), name)


def read(path: str) -> List[Dict[str, Any]]:
    """The entries that count: [{"run", "tag", "container", "uuids", "by", "at", "processes"}]."""
    entries = (read_json(path).value or {}).get("reservations")
    boot = proc.boot_id()
    return [
        entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict)
        and entry.get("boot_id") == boot
        and any(proc.living(proc.as_identity(one)) for one in entry.get("processes") or [])
    ]


def supervisor_of(run_id: str, processes: Optional[proc.Table] = None) -> Optional[proc.Process]:
    """A run's supervisor in whatever container of this machine, by its command line (spawn.supervisor_argv):
    run ids are unique."""
    for process in (proc.table() if processes is None else processes).values():
        words = proc.cmdline(process.pid)
        if (
            len(words) > 2
            and words[-2] == "supervise"
            and os.path.basename(words[-1]) == run_id
            and not process.dead
        ):
            return process
    return None


def processes_of(run_id: str, within_s: float) -> List[Dict[str, int]]:
    """Supervisor and program, waited for; [] when there is none."""
    until = time.monotonic() + within_s
    while True:
        processes = proc.table()
        supervisor = supervisor_of(run_id, processes)
        children = [one for one in processes.values() if supervisor and one.ppid == supervisor.pid]
        if supervisor is not None and (children or time.monotonic() >= until):
            return [proc.as_json(one.identity) for one in [supervisor, *children]]
        if time.monotonic() >= until:
            return []
        time.sleep(POLL_S)


def add(path: str, entry: Dict[str, Any], within_s: float) -> bool:
    """Write down that a run has its GPUs, once its processes are there; False when they do not come."""
    found = processes_of(str(entry["run"]), within_s)
    if not found:
        return False
    kept = [one for one in read(path) if one.get("run") != entry["run"]]
    body = dict(entry, processes=found, at=time.time(), boot_id=proc.boot_id())
    write_json(path, dict(read_ours(path), reservations=[*kept, body]), durable=False)
    return True
