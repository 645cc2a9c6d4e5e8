"""Operation `repair_runs`: damaged files of runs that are over, made readable again as far as can be proven.

Request: state_dir, tag | id (one run; neither: all), dry_run, who. Answer: {"repaired": [{"id", "tag",
"files": [{"name", "problem", "did": "rebuilt" | "set aside" | "lines dropped", "source", "unknown": [what is
not proven any more]}]}], "left": [{"id", "why"}]}.

What is damaged is no guess: it is not JSON, or lacks its version. A file of a newer dflashctl is left alone.
The damaged bytes are kept beside the file as `<name>.damaged-<time>`. What is written in their place comes
from the run's other files (rebuilding.py) and says so under "rebuilt"; where nothing is proven, nothing is
written. A run that lives, is being launched or killed, or has any process left, is never touched.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ..processes import kin, proc
from ..records.pick import one_run
from ..records.runfolder import RunFolder, list_runs, parse, sync_folder, whole
from ..runs.stop import stop_lock
from .rebuilding import REBUILD, Rebuilt, Witness

FILES = (
    "record.json", "supervisor.json", "exit.json", "summary.json", "root_cause.json", "environment.json",
    "members.json", "heartbeat.json",
)  # fmt: skip
LINES = ("events.jsonl", "metrics.jsonl", "log_index.jsonl")
YOUNG_S = 3600.0
"""A folder without a supervisor may be a launch at work for so long."""


class Damage(NamedTuple):
    """One damaged file, and what is done about it."""

    name: str
    problem: str
    did: str
    rebuilt: Optional[Rebuilt]

    def as_json(self) -> Dict[str, Any]:
        return {
            "name": self.name,
            "problem": self.problem,
            "did": self.did,
            "source": self.rebuilt.source if self.rebuilt else None,
            "unknown": self.rebuilt.unknown if self.rebuilt else [],
        }


def repair_runs(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """See the module's text. Raises AgentError("not_found") for a tag or id that no run has."""
    state_dir, dry = str(request["state_dir"]), bool(request.get("dry_run"))
    named = bool(request.get("tag") or request.get("id"))
    repaired: List[Dict[str, Any]] = []
    left: List[Dict[str, str]] = []
    processes = proc.table()
    tagged = kin.tagged(processes)
    for run in [one_run(request)] if named else list_runs(state_dir):
        found: List[Damage] = []
        try:
            found = damages(run)
            if not found:
                continue
            why = busy(run, processes, tagged)
            if why is None and not dry:
                why = _repair(run, str(request.get("who") or "?"))
        except OSError as error:  # not ours to read, or a folder in a file's place: the others are mended
            why = str(error)
        if why is None:
            record = Witness(run, found).record().value or {}
            files = [damage.as_json() for damage in found]
            repaired.append({"id": run.id, "tag": record.get("tag"), "files": files})
        else:
            left.append({"id": run.id, "why": why})
    return {"repaired": repaired, "left": left}


def busy(run: RunFolder, processes: proc.Table, tagged: Dict[str, List[int]]) -> Optional[str]:
    """Why a run must be left alone; None when it is over. Its own word for who its supervisor is may be
    damaged, so that is also looked for by the one file that every supervisor runs."""
    program = run.file("supervisor.pyz")
    supervised = run.live(processes) or any(program in proc.cmdline(pid) for pid in processes)
    if supervised or [one for one in run.family(processes, tagged) if not one.dead]:
        return "it lives"
    started = run.has("supervisor.json") or run.has("exit.json")
    if not started and time.time() - os.stat(run.path).st_mtime < YOUNG_S:
        return "it may be being launched at this moment"
    return None


def damages(run: RunFolder) -> List[Damage]:
    """What is damaged, and what will be done; a file that can be rebuilt is a witness for those after it."""
    found = [
        Damage(name, "damaged lines: %d" % count, "lines dropped", None)
        for name, count in ((name, len(_read_lines(run.file(name))[1])) for name in LINES)
        if count
    ]
    for name in FILES:
        problem = problem_of(run.file(name))
        missing = name == "record.json" and not run.has(name)
        if problem is None and not missing:
            continue
        rebuilt = REBUILD[name](Witness(run, found)) if name in REBUILD else None
        if rebuilt is not None or not missing:
            did = "set aside" if rebuilt is None else "rebuilt"
            found.append(Damage(name, problem or "missing", did, rebuilt))
    return found


def problem_of(path: str) -> Optional[str]:
    """Why these bytes are no file of ours; None for a good one, a missing one, and one of a newer version."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return None
    if not data.strip(b"\0 \n"):
        return "empty"
    try:
        value = parse(data.decode("utf-8"))
    except ValueError as error:
        return "not JSON: %s" % error
    if not isinstance(value, dict):
        return "not a JSON object"
    return None if whole(value.get("version")) is not None else "no version"


def _repair(run: RunFolder, who: str) -> Optional[str]:
    """Act on each damage. Returns why not, when somebody else is at it."""
    with stop_lock(run) as first:
        if not first:
            return "a kill or another repair is at work"
        found = damages(run)
        for damage in found:
            _act(run, damage, who)
        run.append_event("repaired", by=who, files=[damage.name for damage in found])
    return None


def _act(run: RunFolder, damage: Damage, who: str) -> None:
    path = run.file(damage.name)
    aside = free_name("%s.damaged-%s" % (path, time.strftime("%Y%m%dT%H%M%S", time.gmtime())))
    if damage.did == "lines dropped":
        _drop_lines(path, aside)
    elif damage.rebuilt is None:
        os.rename(path, aside)
    else:
        if os.path.exists(path):
            shutil.copy2(path, aside)
        mark = {
            "at": time.time(),
            "by": who,
            "from": damage.rebuilt.source,
            "unknown": damage.rebuilt.unknown,
        }
        body = dict(damage.rebuilt.value)
        body["rebuilt"] = mark
        run.write(damage.name, body)
    sync_folder(run.path)


def free_name(wanted: str) -> str:
    """Nothing that is kept is ever written over."""
    name, number = wanted, 1
    while os.path.lexists(name):
        number += 1
        name = "%s-%d" % (wanted, number)
    return name


def _drop_lines(path: str, aside: str) -> None:
    """The whole old file stays aside; the good lines go into a new one. Somebody may append at this moment (a
    note): what reached the new file first stays in it, what still reached the old one is brought over."""
    os.rename(path, aside)
    done = 0
    for _ in range(2):
        with open(aside, "rb") as file:
            file.seek(done)
            data = file.read()
        done += len(data)
        good, _bad = _sorted_lines(data)
        _append(path, b"".join(good))


def _append(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_lines(path: str) -> Tuple[List[bytes], List[bytes]]:
    try:
        with open(path, "rb") as file:
            return _sorted_lines(file.read())
    except FileNotFoundError:
        return [], []


def _sorted_lines(data: bytes) -> Tuple[List[bytes], List[bytes]]:
    """(good, damaged) lines, each of the good ones with its newline."""
    good: List[bytes] = []
    bad: List[bytes] = []
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            fine = isinstance(parse(line.decode("utf-8")), dict)
        except ValueError:
            fine = False
        (good if fine else bad).append(line + b"\n")
    return good, bad
