"""What launch, kill and gpu need to know of the inside, in one look; and the GPUs' learnt idle state.

The idle state is kept beside the runs, in `<state_dir>/gpu_idle.json`, so that everybody who uses the box
sees the same. It is written on demand (`gpu --learn-idle`) and never by itself: memory that a dead process
left behind must not be learnt as normal.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, Optional

from .. import AgentError
from ..processes import kin, proc
from ..records.runfolder import RunFolder, list_runs, new_id, read_json, read_ours, write_json
from ..releases.release import current_release, read_manifest

BASELINES = "gpu_idle.json"


def inside_facts(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """request: state_dir, code_root|null, script|absent (agent/releases/script.py). What launch, kill and gpu
    need to know of the inside, in one look.

    Answers {"at", "boot_id", "init_start", "pidns", "uid", "release": hash|null (of a script: by what is in
    its place now, whoever put it there), "release_info": its git, deployed_at and by, "baselines": {uuid:
    {"memory_mib", "learnt_at"}}, "problems", "next_id" (for a run that is to be launched), "runs": [{"id",
    "tag", "recipe", "created_at", "live", "gpus", "log", "grace_s", "leader", "family": [member]}] (not over
    yet)}.
    A member is {"pid", "start", "nspid": innermost pid, "pidns", "state"}; the supervisor is among them.
    """
    state_dir = str(request["state_dir"])
    processes = proc.table()
    tagged = kin.tagged(processes)
    runs, problems = [], []
    everything = list_runs(state_dir)
    for run in everything:
        if run.has("exit.json"):
            continue
        record = run.record()
        if record.value is None:
            problems.append(record.problem or "%s: no record.json" % run.path)
        supervisor, _ = run.identities()
        top = proc.living(supervisor, processes)
        family = [one for one in run.family(processes, tagged) if not one.dead]
        if top is None and not family:
            continue
        body = record.value or {}
        runs.append(
            {
                "id": run.id,
                "tag": body.get("tag"),
                "recipe": body.get("recipe"),
                "created_at": body.get("created_at"),
                "live": top is not None,
                "gpus": body.get("gpus") or [],
                "log": body.get("log"),
                "grace_s": body.get("grace_s"),
                "leader": (run.supervisor().value or {}).get("leader"),
                "family": [_member(one) for one in family + ([top] if top else [])],
            }
        )
    code_root = str(request.get("code_root") or "")
    release = _release(code_root, request.get("script"))
    facts: Dict[str, Any] = {
        "at": time.time(),
        "pidns": proc.pid_namespace(),
        "uid": os.getuid(),
        "release": release,
        "release_info": release_info(code_root, release),
        "runs": runs,
        "baselines": baselines(state_dir),
        "problems": problems,
        # By the clock of this place: those of several laptops differ, and ids are the order of the runs.
        "next_id": new_id(after=everything[0].id if everything else ""),
    }
    facts.update(proc.here())
    return facts


def _release(code_root: str, script: Optional[Dict[str, str]]) -> Optional[str]:
    """What a run that is launched now runs."""
    if not script:
        return current_release(code_root) if code_root else None
    from ..releases.script import current  # a run's supervisor needs none of what it imports

    try:
        return current(script)
    except AgentError:  # a folder, a link to itself: no code that could be named
        return None


def run_of_pid(state_dir: str, pid: int, processes: proc.Table) -> Optional[RunFolder]:
    """The run whose family (or supervisor) this process is; None for a stranger."""
    tagged = kin.tagged(processes)
    for run in list_runs(state_dir):
        top = proc.living(run.identities()[0], processes)
        if top is not None and top.pid == pid:
            return run
        if any(one.pid == pid for one in run.family(processes, tagged)):
            return run
    return None


def _member(process: proc.Process) -> Dict[str, Any]:
    """The same process as the host can recognise it: pid namespace and innermost pid."""
    return {
        "pid": process.pid,
        "start": process.start,
        "nspid": (proc.ns_pids(process.pid) or [process.pid])[-1],
        "pidns": proc.pid_namespace(process.pid),
        "state": process.state,
    }


def release_info(code_root: str, release: Optional[str]) -> Dict[str, Any]:
    """What the run's record says about its code; {} when unknown."""
    manifest = read_manifest(code_root, release).value if release else None
    return {key: (manifest or {}).get(key) for key in ("git", "recipe", "deployed_at", "deployed_by")}


def baselines(state_dir: str) -> Dict[str, Any]:
    """{uuid: {"memory_mib", "learnt_at"}}: what idle GPUs of this box show."""
    found = (read_json(os.path.join(state_dir, BASELINES)).value or {}).get("gpus")
    return found if isinstance(found, dict) else {}


def learn_idle(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """Keep request["gpus"] {uuid: memory_mib} as the idle state of those GPUs; others keep theirs. Raises
    AgentError("locked") where a later dflashctl has learnt it."""
    state_dir = str(request["state_dir"])
    path = os.path.join(state_dir, BASELINES)
    body, known = read_ours(path), baselines(state_dir)
    now = time.time()
    for uuid, memory_mib in dict(request["gpus"]).items():
        known[str(uuid)] = {"memory_mib": int(memory_mib), "learnt_at": now}
    os.makedirs(state_dir, exist_ok=True)
    write_json(path, dict(body, gpus=known))
    return {"gpus": known}
