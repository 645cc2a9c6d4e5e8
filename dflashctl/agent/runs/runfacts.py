"""What one run's folder, log and processes say now. Plain data for `observe` and `list_runs`, unjudged.

Absent is None, damaged is named under "problems"; numbers are passed on as found (the laptop checks them).
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any, Dict, List, Optional

from ..logs import logknown, logscan
from ..logs.ownlog import log_file
from ..processes import proc
from ..records.runfolder import RunFolder, number, objects

METRICS_TAIL_BYTES = 256 * 2**10
PROCESSES_SHOWN = 48
RECORD_KEYS = (
    "id", "tag", "recipe", "variant", "release", "git", "created_at", "created_by", "host", "command", "cwd",
    "log", "log_start", "gpus", "grace_s", "started_within_s", "observe", "secrets",
)  # fmt: skip
"""Not among them: env. It can be long, and `runs show` asks for it."""


def now() -> Dict[str, Any]:
    """The clocks and the identity of this place; every age is computed against these."""
    answer = {"wall": time.time(), "mono": time.monotonic()}
    answer.update(proc.here())
    return answer


def folder_facts(run: RunFolder, processes: Optional[proc.Table]) -> Dict[str, Any]:
    """Record, supervisor and ending: what a list of runs needs. A handful of small reads."""
    problems: List[str] = []

    def load(name: str) -> Optional[Dict[str, Any]]:
        loaded = run.read(name)
        if loaded.problem:
            problems.append(loaded.problem)
        return loaded.value

    record, supervisor = load("record.json"), load("supervisor.json")
    known = record or {}
    here = proc.here()
    recorded = supervisor or known
    identities = run.identities()
    leader = proc.as_identity((supervisor or {}).get("leader"))
    return {
        "id": run.id,
        "record": {key: known.get(key) for key in RECORD_KEYS} if record else None,
        "rebooted": bool(recorded)
        and (recorded.get("boot_id"), recorded.get("init_start")) != (here["boot_id"], here["init_start"]),
        "started_at": (supervisor or {}).get("started_at"),
        "supervisor_recorded": supervisor is not None,
        "supervisor_alive": proc.living(identities[0], processes) is not None,
        "leader_alive": bool(identities[1]) and proc.living(leader, processes) is not None,
        "exit": load("exit.json"),
        "root_cause": _pick(load("root_cause.json"), ("error", "where", "phase", "step", "known")),
        "summary": load("summary.json"),
        "problems": problems,
    }


def progress_facts(run: RunFolder) -> Dict[str, Any]:
    """Heartbeat, metrics and events of a run that may be alive."""
    loaded = run.read("heartbeat.json")
    return {
        "heartbeat": loaded.value,
        "heartbeat_problem": loaded.problem,
        "metrics": metrics_facts(tail_entries(run.file("metrics.jsonl"))),
        "events": {str(event.get("event")): event for event in told_events(run)},
    }


def told_events(run: RunFolder) -> List[Dict[str, Any]]:
    """What happened, without the copy of the record that `launched` keeps for `repair_runs`."""
    events = run.events()
    for event in events:
        event.pop("record", None)
    return events


def tail_entries(path: str, limit: int = METRICS_TAIL_BYTES) -> List[Dict[str, Any]]:
    """The last objects of a .jsonl file, oldest first."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - limit, 0))
            data = file.read(limit)
    except OSError:
        return []
    lines = data.split(b"\n")
    if size > limit:
        lines = lines[1:]
    return list(objects(line.decode("utf-8", "replace") for line in lines))


def metrics_facts(entries: List[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """Step times from the history of (step, wall): medians in seconds.

    median_step_s   per step, over all reports at hand
    gap_s           between two reports (a program may report each tenth step)
    recent_step_s   per step, over the last five reports
    """
    steps = [each for each in entries if None not in (number(each.get("step")), number(each.get("wall")))]
    if not steps:
        return None
    gaps, each_step = [], []
    for position in range(1, len(steps)):
        before, after = steps[position - 1], steps[position]
        passed, done = after["wall"] - before["wall"], after["step"] - before["step"]
        if done > 0 and passed > 0:
            gaps.append(passed)
            each_step.append(passed / done)
    return {
        "last": steps[-1],
        "reports": len(steps),
        "median_step_s": statistics.median(each_step) if each_step else None,
        "gap_s": statistics.median(gaps) if gaps else None,
        "recent_step_s": statistics.median(each_step[-5:]) if len(each_step) >= 10 else None,
    }


def log_size(run: RunFolder, record: Dict[str, Any]) -> Optional[int]:
    try:
        return os.stat(log_file(run, record)).st_size
    except OSError:
        return None


def log_facts(
    run: RunFolder,
    record: Dict[str, Any],
    known: List[logknown.Known],
    resume: Optional[Dict[str, Any]],
    size_before: Optional[int],
    scan_s: float,
) -> Dict[str, Any]:
    """Growth since `size_before`, and what logscan finds in this run's part."""
    path = log_file(run, record)
    answer: Dict[str, Any] = {"path": path, "exists": False}
    try:
        status = os.stat(path)
        observed = record.get("observe") or {}
        found = logscan.scan(
            path,
            int(record.get("log_start") or 0),
            known,
            step=logscan.compile_step(observed.get("step_regex") if isinstance(observed, dict) else None),
            resume=resume,
            budget_s=scan_s,
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        answer["problem"] = "%s: %s" % (type(error).__name__, error)
        return answer
    answer.update(found)
    answer.update(
        exists=True,
        size=status.st_size,
        mtime=status.st_mtime,
        grown=None if size_before is None else status.st_size - size_before,
    )
    return answer


def family_facts(
    run: RunFolder, before: proc.Table, after: proc.Table, tagged: Dict[str, List[int]]
) -> Dict[str, Any]:
    """The processes of the run: state, wait channel, CPU seconds in the sample, memory, threads by name."""
    members = run.family(after, tagged)
    shown = sorted(members, key=lambda process: process.rss_bytes, reverse=True)[:PROCESSES_SHOWN]
    return {
        # A zombie is no more: it has no memory and no GPU. `states` tells of it.
        "count": sum(not process.dead for process in members),
        "cpu_s": sum(_cpu_ticks(process, before) for process in members) / proc.TICKS_PER_S,
        "rss_bytes": sum(process.rss_bytes for process in members),
        "states": _counted(process.state for process in members),
        "processes": [
            {
                "pid": process.pid,
                "comm": process.comm,
                "state": process.state,
                "wchan": proc.wchan(process.pid),
                "cpu_s": _cpu_ticks(process, before) / proc.TICKS_PER_S,
                "rss_bytes": process.rss_bytes,
                "threads": process.threads,
                "thread_names": _counted(thread["comm"] for thread in proc.thread_states(process.pid)[:512]),
            }
            for process in shown
        ],
    }


def _cpu_ticks(process: proc.Process, before: proc.Table) -> int:
    """CPU time since `before`; a process that is new since then counts whole."""
    earlier = before.get(process.pid)
    same = earlier is not None and earlier.start == process.start
    return process.cpu_ticks - (earlier.cpu_ticks if same and earlier is not None else 0)


def _counted(names: Any) -> Dict[str, int]:
    counted: Dict[str, int] = {}
    for name in names:
        counted[name] = counted.get(name, 0) + 1
    return counted


def _pick(value: Optional[Dict[str, Any]], keys: Any) -> Optional[Dict[str, Any]]:
    return None if value is None else {key: value.get(key) for key in keys}
