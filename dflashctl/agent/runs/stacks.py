"""Operations `stacks` and `host_stacks`: where every process of a run stands in its code, looked at twice.

Three ways, tried by the laptop in this order, each for the processes that the one before left without an
answer:

  py-spy inside     reads the process from outside; needs ptrace, and py-spy beside the Python
  py-spy outside    the same from the host, where ptrace is permitted; finds the process by its NSpid
  faulthandler      the process itself writes its stacks when it gets SIGUSR1. That signal ends a program that
                    did not ask for it, so it is sent only where the file `stacks-<pid>.txt` in the run's
                    folder says that it did, and the kernel says that the signal is caught.

Request of `stacks`: state_dir, tag | id, method ("py-spy" | "faulthandler"), python (of the host's entry),
again_s (between the two looks), only (identities, else the whole family). Answer: {"id", "tag", "pidns",
"left_out", "processes": [{pid, start, comm, cmdline, state, wchan, threads: [names], looks: [look, look]}]};
a look is {"text"} or {"problem"}. Request of `host_stacks`: wanted [{pidns, pid, start}], again_s. Answer:
{"looks": {"<pid>:<start>": [look, look]}, "problem"}.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from .. import AgentError
from ..processes import proc
from ..processes.signals import send_signal
from ..records.pick import one_run
from ..records.runfolder import RunFolder

PROCESSES = 64
AT_ONCE = 8
PY_SPY_S = 10.0
"""For one process. A process in state D answers nobody."""
WRITES_S = 2.0
"""So long a process has to write its stacks."""
TEXT_BYTES = 256 * 2**10
AGAIN_LIMIT_S = 60.0

Look = Dict[str, str]
Pids = List[Tuple[proc.Identity, int]]
"""(identity as the run knows it, pid to ask)."""


def stacks(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """See the module's text. Raises AgentError("not_found") for a run without processes."""
    run = one_run(request)
    only = [proc.as_identity(each) for each in request.get("only") or []]
    family = [one for one in run.family() if not one.dead]
    if only:
        family = [one for one in family if one.identity in only]
    if not family and not only:
        name = str((run.record().value or {}).get("tag") or run.id)
        raise AgentError(
            "not_found", "run %s has no process any more" % name, run.path, "dflashctl logs %s" % name
        )
    shown = _first(family, run)
    pids = [(one.identity, one.pid) for one in shown]
    if request.get("method") == "faulthandler":
        looks = twice(lambda: by_signal(run, pids), request)
    else:
        program = find_py_spy(str(request.get("python") or ""))
        looks = twice(lambda: by_py_spy(program, pids), request)
    return {
        "id": run.id,
        "tag": (run.record().value or {}).get("tag"),
        "pidns": proc.pid_namespace(),
        "left_out": len(family) - len(shown),
        "processes": [{**_described(one), "looks": looks[one.identity]} for one in shown],
    }


def host_stacks(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """The same processes from outside. The answer's "problem" says why nothing could be asked."""
    program = find_py_spy(sys.executable)
    if program is None:
        return {"looks": {}, "problem": "py-spy is not installed on the host"}
    pids = find_outside([dict(each) for each in request.get("wanted") or []])
    looks = twice(lambda: by_py_spy(program, pids), request)
    return {"looks": {"%d:%d" % identity: found for identity, found in looks.items()}, "problem": ""}


def twice(look: Callable[[], Dict[proc.Identity, Look]], request: Dict[str, Any]) -> Dict[Any, List[Look]]:
    """Two looks, `again_s` apart from start to start."""
    begun = time.monotonic()
    first = second = look()
    if any("text" in each for each in first.values()):
        again_s = min(max(float(request.get("again_s", 3.0)), 0.0), AGAIN_LIMIT_S)
        time.sleep(max(begun + again_s - time.monotonic(), 0.0))
        second = look()
    return {identity: [first[identity], second.get(identity, first[identity])] for identity in first}


def _first(family: List[proc.Process], run: RunFolder) -> List[proc.Process]:
    """The leader, then the largest; by pid."""
    _, known = run.identities()
    leader = known[0] if known else None
    ranked = sorted(family, key=lambda one: (one.identity != leader, -one.rss_bytes))
    return sorted(ranked[:PROCESSES], key=lambda one: one.pid)


def _described(process: proc.Process) -> Dict[str, Any]:
    threads = proc.thread_states(process.pid)
    return {
        "pid": process.pid,
        "start": process.start,
        "comm": process.comm,
        "cmdline": proc.cmdline(process.pid),
        "state": process.state,
        "wchan": proc.wchan(process.pid),
        "threads": [thread["comm"] for thread in threads[:512]],
    }


# --- py-spy ----------------------------------------------------------------------------------------------


def find_py_spy(python: str) -> Optional[str]:
    """Beside a Python (as venvs have it), or on PATH."""
    folders = [os.path.dirname(each) for each in (python, os.path.realpath(python), sys.executable) if each]
    path = os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/local/bin", "/usr/bin"])
    return shutil.which("py-spy", path=path)


def by_py_spy(program: Optional[str], pids: Pids) -> Dict[proc.Identity, Look]:
    """One look at each, a few at once."""
    if program is None:
        return {identity: {"problem": "py-spy is not installed there"} for identity, _ in pids}
    found: Dict[proc.Identity, Look] = {}
    for begin in range(0, len(pids), AT_ONCE):
        part = [(identity, _dump(program, pid)) for identity, pid in pids[begin : begin + AT_ONCE]]
        for identity, started in part:
            found[identity] = _dumped(started)
    return found


def _dump(program: str, pid: int) -> Any:
    argv = [program, "dump", "--json", "--pid", str(pid)]
    env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "RUST_BACKTRACE": "0"}
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd="/"
        )
    except OSError as error:
        return "cannot start %s: %s" % (program, error)


def _dumped(started: Any) -> Look:
    if isinstance(started, str):
        return {"problem": started}
    try:
        out, err = started.communicate(timeout=PY_SPY_S)
    except subprocess.TimeoutExpired:
        started.kill()
        try:
            started.communicate(timeout=1.0)
        except subprocess.TimeoutExpired:
            pass
        return {"problem": "py-spy did not end within %.0f s" % PY_SPY_S}
    if started.returncode == 0:
        if len(out) > TEXT_BYTES:
            return {"problem": "its stacks are longer than %d KiB" % (TEXT_BYTES // 1024)}
        return {"text": out.decode("utf-8", "replace")}
    return {"problem": why_not(err.decode("utf-8", "replace"))}


def why_not(said: str) -> str:
    """py-spy's complaint in one line."""
    lowered = said.lower()
    if "permission denied" in lowered or "operation not permitted" in lowered:
        return "py-spy is not permitted to look into it (ptrace)"
    if "python version" in lowered or "not a python" in lowered or "find a python" in lowered:
        return "it runs no Python that py-spy knows"
    if "no such process" in lowered or "process is running" in lowered:
        return "it has ended meanwhile"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return "py-spy: %s" % (lines[0][:300] if lines else "no word about why")


# --- from the host ---------------------------------------------------------------------------------------


def find_outside(wanted: List[Dict[str, Any]]) -> Pids:
    """The pids here of processes that are known by their own pid namespace, pid in it, and start."""
    by_start = {}  # type: Dict[int, List[Dict[str, Any]]]
    for each in wanted:
        by_start.setdefault(int(each["start"]), []).append(each)
    found: Pids = []
    for process in proc.table().values():
        for each in by_start.get(process.start, ()):
            inner = proc.ns_pids(process.pid)
            if inner and inner[-1] == each["pid"] and proc.pid_namespace(process.pid) == each["pidns"]:
                found.append(((int(each["pid"]), process.start), process.pid))
    return found


# --- faulthandler ----------------------------------------------------------------------------------------


def by_signal(run: RunFolder, pids: Iterable[Tuple[proc.Identity, int]]) -> Dict[proc.Identity, Look]:
    """Ask each process for its stacks; those that did not register for that are left in peace."""
    found: Dict[proc.Identity, Look] = {}
    asked = []
    for identity, pid in pids:
        path = run.file("stacks-%d.txt" % pid)
        if not os.path.exists(path):
            found[identity] = {"problem": "it did not register faulthandler (no %s)" % os.path.basename(path)}
        elif not catches(pid, signal.SIGUSR1):
            found[identity] = {"problem": "it does not catch SIGUSR1 now, which would end it"}
        else:
            before = _size(path)
            try:
                sent = send_signal(identity, signal.SIGUSR1)
            except (PermissionError, ValueError) as error:
                found[identity] = {"problem": "it may not be signalled: %s" % error}
                continue
            if sent:
                asked.append((identity, path, before))
            else:
                found[identity] = {"problem": "it has ended meanwhile"}
    for identity, path, before in asked:
        text = written(path, before)
        found[identity] = (
            {"text": text} if text else {"problem": "it wrote nothing within %.0f s (state D?)" % WRITES_S}
        )
    return found


def catches(pid: int, number: int) -> bool:
    """Has the process a handler for this signal? SigCgt of /proc/PID/status, a hexadecimal mask."""
    try:
        mask = int(proc.status_fields(pid).get("SigCgt", "0"), 16)
    except ValueError:
        return False
    return bool(mask >> (number - 1) & 1)


def written(path: str, before: int) -> str:
    """What was appended, once it has stopped growing."""
    until, size = time.monotonic() + WRITES_S, before
    while time.monotonic() < until:
        time.sleep(0.1)
        now = _size(path)
        if now > before and now == size:
            break
        size = now
    try:
        with open(path, "rb") as file:
            file.seek(before)
            return file.read(TEXT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
