"""Operation `list_runs`: what was run, how it ended, what was learnt.

Request: state_dir; limit (of the list, newest first); tag, recipe (only those); or `one`: true with tag | id
and code_root (for the files of its release) for everything about a single run. `known` (as for `observe`):
what the log of a single run is searched for, and those of live runs that keep no heartbeat. Such runs are
looked at twice, as `observe` does: a list calls none by another state than `status`.

Answer of a list: {"now", "sample_s", "runs": [facts], "total", "damaged": [{"id", "problem"}]}.
Of one: {"now", "runs": [facts], "detail": {"record" (whole), "summary", "root_cause", "events", "exit",
"environment", "recipe" (its text), "notes", "checkpoints" (checkpoints.py), "files": {path: sha256} of its
release, null when it is gone}}.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Optional, Tuple

from ..logs import logknown, logscan
from ..logs.ownlog import log_file
from ..processes import kin, proc
from ..records.pick import one_run
from ..records.runfolder import RunFolder
from ..records.runfolder import list_runs as all_runs
from ..releases import release
from ..runs import runfacts
from ..runs.observe import facts_of
from .checkpoints import checkpoints
from .curate import notes

LIMIT = 1000
SAMPLE_S = 0.4
"""As `status` asks for."""
SUMMARY_KEYS = ("headline", "lossless", "best_acceptance_length")


def list_runs(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """See the module's text."""
    processes = proc.table()
    known = [logknown.Known(row) for row in request.get("known") or []]
    if request.get("one"):
        run = one_run(request)
        shown = [(run, facts_of(run, known, None, None, processes, processes, kin.tagged(processes)))]
        sample_s = _look_again(shown, known, processes)
        detailed = detail(run, request)
        return {"now": runfacts.now(), "sample_s": sample_s, "runs": [shown[0][1]], "detail": detailed}
    everything = all_runs(str(request["state_dir"]))
    limit = int(request.get("limit") or LIMIT)
    wanted = {name: request.get(name) for name in ("tag", "recipe")}
    runs: List[Tuple[RunFolder, Dict[str, Any]]] = []
    damaged: List[Dict[str, Any]] = []
    for run in everything:
        if len(runs) >= limit:
            break
        facts = _facts(run, processes)
        if facts["record"] is None or facts["problems"]:
            damaged += [{"id": run.id, "problem": each} for each in facts["problems"] or ["no record.json"]]
        record = facts["record"] or {}
        if any(value is not None and record.get(name) != value for name, value in wanted.items()):
            continue
        runs.append((run, facts))
    sample_s = _look_again(runs, known, processes)
    for run, facts in runs:
        facts["notes"] = notes(run)[-1:]
        summary = facts["summary"]
        facts["summary"] = {key: summary.get(key) for key in SUMMARY_KEYS} if summary else None
    told = [facts for _, facts in runs]
    return {
        "now": runfacts.now(),
        "sample_s": sample_s,
        "runs": told,
        "total": len(everything),
        "damaged": damaged,
    }


def _look_again(
    runs: List[Tuple[RunFolder, Dict[str, Any]]], known: List[logknown.Known], before: proc.Table
) -> float:
    """Where a live run keeps no heartbeat, put what a second look shows into the facts of all live ones.

    Returns the seconds between the looks; 0: there was none.
    """
    live = [each for each in runs if each[1]["exit"] is None and each[1]["supervisor_alive"]]
    silent = [facts["id"] for _, facts in live if not facts["heartbeat"]]
    if not silent:
        return 0.0
    sizes = {run.id: runfacts.log_size(run, facts["record"] or {}) for run, facts in live}
    started = time.monotonic()
    time.sleep(SAMPLE_S)
    after = proc.table()
    took_s, tagged = time.monotonic() - started, kin.tagged(after)
    for run, facts in live:
        if facts["id"] in silent:
            scan_s = logscan.BUDGET_S / len(silent)
            facts.update(facts_of(run, known, None, sizes[run.id], before, after, tagged, scan_s))
        else:
            facts["family"] = runfacts.family_facts(run, before, after, tagged)
    return took_s


def _facts(run: RunFolder, processes: proc.Table) -> Dict[str, Any]:
    """As `observe` at one look, without reading the log: a list of a thousand runs must be quick."""
    facts = runfacts.folder_facts(run, processes)
    record = facts["record"] or {}
    if facts["exit"] is None and facts["supervisor_alive"]:
        facts.update(runfacts.progress_facts(run))
        facts["family"] = runfacts.family_facts(run, processes, processes, kin.tagged(processes))
    path = log_file(run, record)
    try:
        status = os.stat(path)
        facts["log"] = {"path": path, "exists": True, "size": status.st_size, "mtime": status.st_mtime}
    except OSError:
        facts["log"] = {"path": path, "exists": False}
    return facts


def detail(run: RunFolder, request: Dict[str, Any]) -> Dict[str, Any]:
    """Everything that the folder says, unabridged."""
    record = run.record().value
    return {
        "record": record,
        "summary": run.read("summary.json").value,
        "root_cause": run.read("root_cause.json").value,
        "exit": run.exit().value,
        "events": runfacts.told_events(run)[-500:],
        "environment": run.read("environment.json").value,
        "recipe": _text(run.file("recipe.yaml")),
        "notes": notes(run),
        "checkpoints": checkpoints(run),
        "files": _files(str(request.get("code_root") or ""), (record or {}).get("release")),
        "folder": run.path,
    }


def _text(path: str) -> Optional[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(2**20)
    except OSError:
        return None


def _files(code_root: str, name: Any) -> Optional[Dict[str, str]]:
    if not code_root or not isinstance(name, str):
        return None
    try:
        manifest = release.read_manifest(code_root, name).value
    except ValueError:
        return None
    if manifest is None:
        return None
    return {entry["path"]: entry["sha256"] for entry in manifest["files"]}
