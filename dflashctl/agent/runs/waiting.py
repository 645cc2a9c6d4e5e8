"""Wait for a run's end, and show the end of its log."""

from __future__ import annotations

import os
import time
from typing import Any, Dict

from .. import AgentError
from ..logs.ownlog import log_file
from ..records.runfolder import RunFolder, folder_of
from .spawn import find_supervisor

TAIL_BYTES = 8192
TAIL_LINES = 40
POLL_S = 0.2


def wait_end(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """Wait until the run has ended, at most request["wait_s"]; request: id, state_dir.

    Answers {"exit": {...}|null, "live", "problem": why there is no exit though nothing lives, "log_tail",
    "root_cause": the program's own word on its failure, or null}.
    """
    run = folder_of(str(request["state_dir"]), str(request["id"]))
    if not run.has("record.json"):
        raise AgentError("not_found", "no run %s" % run.id)
    until = time.monotonic() + float(request.get("wait_s", 30.0))
    while True:
        live = run.live() or (not run.has("supervisor.json") and find_supervisor(run) is not None)
        ended = run.exit()  # after the look at the supervisor, which writes it before it goes
        if ended.value is not None or not live:
            problem = None if ended.value else ended.problem or "its supervisor is gone without an exit.json"
            return dict(last_words(run), exit=ended.value, live=False, problem=problem)
        if time.monotonic() >= until or getattr(emit, "gone", False):
            return {"exit": None, "live": True, "problem": None, "log_tail": "", "root_cause": None}
        time.sleep(POLL_S)


def last_words(run: RunFolder) -> Dict[str, Any]:
    """What an ended run left to say: {"log_tail", "root_cause"}. A program may fail with exit code 0."""
    cause = (run.read("root_cause.json").value or {}).get("error")
    return {"log_tail": log_tail(run), "root_cause": str(cause) if cause else None}


def log_tail(run: RunFolder) -> str:
    """The last lines of the run's log."""
    record = run.record().value or {}
    try:
        with open(log_file(run, record), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read()
    except OSError:
        return ""
    return "\n".join(data.decode("utf-8", "replace").splitlines()[-TAIL_LINES:])
