"""GPUs as the machine that owns them sees them: nvidia-smi's text, and who its processes are. No judgement.

nvidia-smi prints the pids of the machine that the driver runs on, so each is looked up here: NSpid of
/proc/PID/status gives its pid in the container, and the inode of its pid namespace says which container.
"""

from __future__ import annotations

import subprocess
import time
from typing import Any, Dict, List, Optional

from .. import AgentError
from ..processes import proc
from ..records.runfolder import read_json
from . import reservations

# The last field of each may hold commas itself.
GPU_FIELDS = (
    "index,uuid,memory.used,memory.total,utilization.gpu,temperature.gpu,power.draw,mig.mode.current,name"
)
MIG_FIELD = "mig.mode.current"
"""Drivers before MIG (450) refuse the whole query for it."""
APP_FIELDS = "pid,used_memory,gpu_uuid,process_name"
REAP_S = 1.0


def host_facts(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """request: samples (1), interval_s (0.25), smi_timeout_s (20), nvidia_smi ("nvidia-smi").

    Answers {"at", "boot_id", "pidns", "samples": [reading], "apps": reading, "processes": {pid: {...}|null},
    "fields": columns of what was asked, "reservations": [entry of reservations.read], "reservations_problem":
    text|null}; a reading is {"exit", "stdout", "stderr", "problem": null | "missing" | "timeout" | text}.
    """
    program = str(request.get("nvidia_smi") or "nvidia-smi")
    timeout_s = float(request.get("smi_timeout_s", 20.0))
    count = max(1, int(request.get("samples", 1)))
    columns = GPU_FIELDS.split(",")
    apps = begin([program, "--query-compute-apps=" + APP_FIELDS, "--format=csv,noheader,nounits"])
    began = time.monotonic()
    samples = []
    for number in range(count):
        if number:
            time.sleep(float(request.get("interval_s", 0.25)))
        samples.append(_sample(program, columns, timeout_s))
        if MIG_FIELD in columns and _refuses(samples[-1], MIG_FIELD):
            columns.remove(MIG_FIELD)
            samples[-1] = _sample(program, columns, timeout_s)
        if samples[-1]["problem"]:
            break  # one deadline is enough to know that it hangs
    # Asked at the same time as the first sample: a driver that hangs is waited for once, not twice.
    app_reading = end(apps, max(began + timeout_s - time.monotonic(), REAP_S))
    return {
        "at": time.time(),
        "boot_id": proc.boot_id(),
        "pidns": proc.pid_namespace(),
        "fields": {"gpu": columns, "apps": APP_FIELDS.split(",")},
        "samples": samples,
        "apps": app_reading,
        "processes": {str(pid): look_up(pid) for pid in app_pids(app_reading["stdout"])},
        **_reservations(),
    }


def _sample(program: str, columns: List[str], timeout_s: float) -> Dict[str, Any]:
    argv = [program, "--query-gpu=" + ",".join(columns), "--format=csv,noheader,nounits"]
    return end(begin(argv), timeout_s)


def _refuses(reading: Dict[str, Any], field: str) -> bool:
    """`Field "foo" is not a valid field to query.`, on stdout, exit code 2."""
    return bool(reading["exit"]) and field in reading["stdout"]


def _reservations() -> Dict[str, Any]:
    try:
        path = reservations.path_of(reservations.FILE)
    except AgentError:  # no folder of our own: then nobody has written anything there
        return {"reservations": [], "reservations_problem": None}
    return {"reservations": reservations.read(path), "reservations_problem": read_json(path).problem}


def begin(argv: List[str]) -> Any:
    """A started process, or the reason why there is none."""
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
        )
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return str(error)


def end(started: Any, timeout_s: float) -> Dict[str, Any]:
    """Its output. One that hangs in the driver (state D) survives KILL: it is left behind, not waited for."""
    if isinstance(started, str):
        return {"exit": None, "stdout": "", "stderr": "", "problem": started}
    try:
        out, err = started.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        started.kill()
        try:
            started.communicate(timeout=REAP_S)
        except subprocess.TimeoutExpired:
            pass
        return {"exit": None, "stdout": "", "stderr": "", "problem": "timeout"}
    return {
        "exit": started.returncode,
        "stdout": out.decode("utf-8", "replace"),
        "stderr": err.decode("utf-8", "replace"),
        "problem": None,
    }


def app_pids(text: str) -> List[int]:
    """First column of query-compute-apps; lines that are messages have none."""
    found = []
    for line in text.splitlines():
        cell = line.partition(",")[0].strip()
        if cell.isdecimal() and int(cell) not in found:
            found.append(int(cell))
    return found


def look_up(pid: int) -> Optional[Dict[str, Any]]:
    """Who a process of this machine is; None when it is gone (or hidden)."""
    process = proc.read_process(pid)
    if process is None:
        return None
    uid = proc.uid(pid)
    return {
        "pid": pid,
        "start": process.start,
        "started_at": proc.started_at(process.start),
        "state": process.state,
        "nspid": proc.ns_pids(pid) or [pid],
        "pidns": proc.pid_namespace(pid),
        "cgroup": _cgroup(pid),
        "uid": uid,
        "user": user_name(uid),
        "comm": process.comm,
        "cmdline": proc.cmdline(pid),
    }


def _cgroup(pid: int) -> str:
    try:
        with open("/proc/%d/cgroup" % pid, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def user_name(uid: Optional[int]) -> str:
    """The name of a uid here; the number when it has none (a container's uid seen from the host)."""
    if uid is None:
        return "?"
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)
