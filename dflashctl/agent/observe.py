"""Operation `observe`: facts about the live runs and the newest ended ones, two looks a moment apart.

Request
    state_dir     of the host
    tag | id      one run (a tag means its newest run); neither: all that a person wants to see by default
    sample_s      time between the two looks (0: none; a run that has ended is never waited for)
    known         rows of the table of known failures: [{"name", "pattern", "unless"}]
    resume        {run id: "resume" of the last answer's log}, so that only new bytes are scanned
    recent_s      how far back ended runs are shown (default a day)
    limit         at most so many ended runs

Answer: {"now", "runs": [facts, newest first], "hidden": ended runs that the limit left out}. A run's facts
are those of `runfacts`; everything is judged on the laptop.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Optional, Tuple

from . import AgentError, logscan, proc, runfacts
from .runfolder import RunFolder, list_runs, runs_folder

RECENT_S = 86400.0
LIMIT = 8
SAMPLE_LIMIT_S = 10.0


def observe(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """See the module's text. Raises AgentError("not_found") for a tag or id that no run has."""
    state_dir = str(request["state_dir"])
    known = [logscan.Known(row) for row in request.get("known") or []]
    resume = request.get("resume") or {}
    chosen, hidden = choose(state_dir, request)
    before = proc.table()
    waiting = [run for run in chosen if not run.has("exit.json")]
    sizes = {run.id: runfacts.log_size(run, run.record().value or {}) for run in waiting}
    sample_s = min(max(float(request.get("sample_s", 0.5)), 0.0), SAMPLE_LIMIT_S)
    started = time.monotonic()
    if waiting:
        time.sleep(sample_s)
    after = proc.table()
    took_s = time.monotonic() - started
    runs = [facts_of(run, known, resume.get(run.id), sizes.get(run.id), before, after) for run in chosen]
    return {"now": runfacts.now(), "sample_s": took_s if waiting else 0.0, "runs": runs, "hidden": hidden}


def facts_of(
    run: RunFolder,
    known: List[logscan.Known],
    resume: Optional[Dict[str, Any]],
    size_before: Optional[int],
    before: proc.Table,
    after: proc.Table,
) -> Dict[str, Any]:
    """All facts of one run."""
    facts = runfacts.folder_facts(run, after)
    facts.update(runfacts.progress_facts(run))
    record = facts["record"] or {}
    facts["log"] = runfacts.log_facts(run, record, known, resume, size_before) if record.get("log") else None
    facts["family"] = runfacts.family_facts(run, before, after) if facts["exit"] is None else None
    return facts


def choose(state_dir: str, request: Dict[str, Any]) -> Tuple[List[RunFolder], int]:
    """Which runs to look at, newest first, and how many ended ones of the recent past the limit hides."""
    everything = list_runs(state_dir)
    if request.get("id"):
        return [by_id(state_dir, everything, str(request["id"]))], 0
    if request.get("tag"):
        return [by_tag(state_dir, everything, str(request["tag"]))], 0
    limit = int(request.get("limit", LIMIT))
    since = time.time() - float(request.get("recent_s", RECENT_S))
    processes = proc.table()
    chosen: List[RunFolder] = []
    tags = set()
    ended = hidden = 0
    for run in everything:
        alive = not run.has("exit.json") and run.live(processes)
        if not alive and not ended_since(run, since):
            continue  # a few stats, no parsing: most of a long history ends here
        tag = (run.record().value or {}).get("tag")
        superseded = tag in tags
        if tag is not None:
            tags.add(tag)
        if alive:
            chosen.append(run)
        elif not superseded:
            ended += 1
            chosen += [run] if ended <= limit else []
            hidden += ended > limit
    return chosen, hidden


def ended_since(run: RunFolder, since: float) -> bool:
    """Did it end, or was it last heard of, after `since`? By the folder's newest file: no parsing."""
    newest = 0.0
    for name in ("exit.json", "heartbeat.json", "supervisor.json", "record.json"):
        try:
            newest = max(newest, os.stat(run.file(name)).st_mtime)
        except OSError:
            continue
        if name == "exit.json":
            break
    return newest >= since


def by_id(state_dir: str, everything: List[RunFolder], wanted: str) -> RunFolder:
    """A run by its id or an unambiguous beginning or end of it."""
    found = [run for run in everything if run.id.startswith(wanted) or run.id.endswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        what = "%d runs match the id %r" % (len(found), wanted)
        raise AgentError("usage", what, runs_folder(state_dir), "give more of the id")
    raise not_found(state_dir, everything, "no run has the id %r" % wanted)


def by_tag(state_dir: str, everything: List[RunFolder], wanted: str) -> RunFolder:
    """The newest run with this tag."""
    for run in everything:
        if (run.record().value or {}).get("tag") == wanted:
            return run
    raise not_found(state_dir, everything, "no run has the tag %r" % wanted)


def not_found(state_dir: str, everything: List[RunFolder], what: str) -> AgentError:
    """Names the newest tags, so that a slip of the finger is seen."""
    tags: List[str] = []
    for run in everything[:50]:
        tag = (run.record().value or {}).get("tag")
        if isinstance(tag, str) and tag not in tags:
            tags.append(tag)
    said = "the newest tags are %s" % ", ".join(tags[:5]) if tags else "no run has been launched yet"
    return AgentError("not_found", "%s; %s" % (what, said), runs_folder(state_dir), "dflashctl runs")
