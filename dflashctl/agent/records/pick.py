"""Which runs a question means: by id, by tag, or what a person wants to see when they name none."""

from __future__ import annotations

import os
import re
import time
from typing import Any, Dict, List, Tuple

from .. import AgentError
from ..processes import proc
from .runfolder import RunFolder, list_runs, runs_folder

RECENT_S = 86400.0
ID_OR_END = re.compile(r"(?:\d{8}T\d{9}-)?[0-9a-f]{6}")
LIMIT = 8


def one_run(request: Dict[str, Any]) -> RunFolder:
    """The run of request["id"] or ["tag"] (its newest); neither: the only live run, else the newest one.

    Raises AgentError("not_found"), and "usage" where several live runs could be meant.
    """
    state_dir = str(request["state_dir"])
    everything = list_runs(state_dir)
    if request.get("id"):
        return by_id(state_dir, everything, str(request["id"]))
    if request.get("tag"):
        return by_tag(state_dir, everything, str(request["tag"]))
    processes = proc.table()
    live = [run for run in everything if not run.has("exit.json") and run.live(processes)]
    if len(live) > 1:
        tags = [str((run.record().value or {}).get("tag") or run.id) for run in live]
        what = "%d runs are live: %s" % (len(live), ", ".join(tags))
        raise AgentError("usage", what, runs_folder(state_dir), "name one of them")
    if not everything:
        raise not_found(state_dir, everything, "there is no run")
    return (live or everything)[0]


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
        if not alive and not _ended_since(run, since):
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


def _ended_since(run: RunFolder, since: float) -> bool:
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
    """The newest run with this tag; where nothing has it, the run with this id, or with this end of one as
    lists show it. A run whose record is damaged has nothing else to be called by."""
    for run in everything:
        if (run.record().value or {}).get("tag") == wanted:
            return run
    if ID_OR_END.fullmatch(wanted):
        for run in everything:
            if run.id.endswith(wanted):
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
