"""Operations `note_run` and `prune_runs`: what people add to the history, and what they take out of it.

`note_run`: state_dir, tag | id, text, who. Appends a note to the run's events. Answer: {"id", "tag",
"notes"}.

`prune_runs`: state_dir, keep (the newest so many stay, whatever their age), older_than_s, dry_run. Takes runs
that have ended; never one that may be alive, never the newest of a tag. A run's folder goes with its
checkpoints; its log goes when it is this run's alone. Answer: {"pruned": [{id, tag, bytes, log}], "kept": n,
"failed": [{id, problem}]}.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any, Dict, List, Optional, Set

from ..processes import kin, proc
from ..records.pick import one_run
from ..records.runfolder import RunFolder, list_runs, read_lines, runs_folder

MAX_NOTE_CHARS = 4000
DOOMED = ".pruned-"
"""A folder is renamed before it is emptied: half a run is never taken for a run."""


def note_run(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    run = one_run(request)
    text = str(request.get("text") or "")[:MAX_NOTE_CHARS]
    run.append_event("note", text=text, by=str(request.get("who") or "?"))
    return {"id": run.id, "tag": (run.record().value or {}).get("tag"), "notes": notes(run)}


def notes(run: RunFolder) -> List[Dict[str, Any]]:
    """What people wrote; the supervisor's own notes name nobody."""
    return [
        {"at": event.get("at"), "by": event.get("by"), "text": event.get("text")}
        for event in read_lines(run.file("events.jsonl"), '"note"')
        if event.get("event") == "note" and event.get("by")
    ]


def prune_runs(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    state_dir, dry = str(request["state_dir"]), bool(request.get("dry_run"))
    everything = list_runs(state_dir)
    chosen = prunable(everything, int(request.get("keep") or 0), request.get("older_than_s"))
    logs = log_owners(everything)
    pruned, failed = [], []
    if not dry:
        sweep(state_dir)
    for run in chosen:
        record = run.record().value or {}
        log = own_log(run, record, logs)
        size = folder_bytes(run.path)
        try:
            size += os.path.getsize(log) if log else 0
            if not dry:
                remove(run, log)
        except OSError as error:
            failed.append({"id": run.id, "problem": str(error)})
            continue
        pruned.append({"id": run.id, "tag": record.get("tag"), "bytes": size, "log": log})
    return {"pruned": pruned, "kept": len(everything) - len(pruned), "failed": failed}


def prunable(everything: List[RunFolder], keep: int, older_than_s: Any) -> List[RunFolder]:
    """Newest first in, newest first out."""
    processes = proc.table()
    tagged = kin.tagged(processes)
    limit = None if older_than_s is None else time.time() - float(older_than_s)
    tags: Set[Any] = set()
    chosen = []
    for number, run in enumerate(everything):
        record = run.record()
        tag = (record.value or {}).get("tag")
        newest = tag is not None and tag not in tags
        tags.add(tag)
        if number < max(keep, 1) or newest:
            continue
        if limit is not None and _ended_at(run) > limit:
            continue
        if not run.has("exit.json") and (run.live(processes) or run.family(processes, tagged)):
            continue
        if not run.has("exit.json") and not run.has("supervisor.json") and _young(run):
            continue  # being launched at this moment
        chosen.append(run)
    return chosen


def _young(run: RunFolder) -> bool:
    return time.time() - _mtime(run.path) < 3600.0


def _ended_at(run: RunFolder) -> float:
    """When it was last heard of."""
    names = ("exit.json", "heartbeat.json", "record.json", "events.jsonl")
    return max(_mtime(run.file(name)) for name in names)


def _mtime(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def log_owners(everything: List[RunFolder]) -> Dict[str, List[str]]:
    """Log path -> ids of the runs whose record names it."""
    owners: Dict[str, List[str]] = {}
    for run in everything:
        record = run.record().value or {}
        if record.get("log"):
            owners.setdefault(str(record["log"]), []).append(run.id)
    return owners


def own_log(run: RunFolder, record: Dict[str, Any], owners: Dict[str, List[str]]) -> Optional[str]:
    """The file that is this run's alone: moved aside under its id, or named by no other record."""
    log = str(record.get("log") or "")
    if not log:
        return None
    path = run.log_path(record)
    alone = path != log or owners.get(log) == [run.id]
    return path if alone and os.path.isfile(path) and not os.path.islink(path) else None


def remove(run: RunFolder, log: Optional[str]) -> None:
    doomed = os.path.join(os.path.dirname(run.path), DOOMED + run.id)
    os.rename(run.path, doomed)
    if log:
        os.unlink(log)
    shutil.rmtree(doomed)


def sweep(state_dir: str) -> None:
    """What an interrupted prune left."""
    folder = runs_folder(state_dir)
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if name.startswith(DOOMED):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def folder_bytes(path: str) -> int:
    """Sizes of the files below; links count as nothing and are not followed."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            total += status.st_size
    return total
