"""Operation `observe`: facts about the live runs and the newest ended ones, two looks a moment apart.

Request
    state_dir     of the host
    tag | id      one run (a tag means its newest run); neither: all that a person wants to see by default
    sample_s      time between the two looks (0: none; a run that has ended is never waited for)
    known         rows of the table of known failures: [{"name", "pattern", "unless"}]
    scan_s        time for the middle of long logs, all runs together (default 1; the ends are always read)
    resume        {run id: "resume" of the last answer's log}, so that only new bytes are scanned
    recent_s      how far back ended runs are shown (default a day)
    limit         at most so many ended runs

Answer: {"now", "runs": [facts, newest first], "hidden": ended runs that the limit left out}. A run's facts
are those of `runfacts`; everything is judged on the laptop.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional

from ..logs import logknown, logscan
from ..processes import kin, proc
from ..records.pick import choose
from ..records.runfolder import RunFolder
from . import runfacts

SAMPLE_LIMIT_S = 10.0


def observe(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """See the module's text. Raises AgentError("not_found") for a tag or id that no run has."""
    state_dir = str(request["state_dir"])
    known = [logknown.Known(row) for row in request.get("known") or []]
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
    tagged = kin.tagged(after)
    took_s = time.monotonic() - started
    scan_s = float(request.get("scan_s", logscan.BUDGET_S)) / max(len(chosen), 1)
    runs = [
        facts_of(run, known, resume.get(run.id), sizes.get(run.id), before, after, tagged, scan_s)
        for run in chosen
    ]
    return {"now": runfacts.now(), "sample_s": took_s if waiting else 0.0, "runs": runs, "hidden": hidden}


def facts_of(
    run: RunFolder,
    known: List[logknown.Known],
    resume: Optional[Dict[str, Any]],
    size_before: Optional[int],
    before: proc.Table,
    after: proc.Table,
    tagged: Dict[str, List[int]],
    scan_s: float = logscan.BUDGET_S,
) -> Dict[str, Any]:
    """All facts of one run."""
    facts = runfacts.folder_facts(run, after)
    facts.update(runfacts.progress_facts(run))
    record = facts["record"] or {}
    facts["log"] = (
        runfacts.log_facts(run, record, known, resume, size_before, scan_s) if record.get("log") else None
    )
    facts["family"] = runfacts.family_facts(run, before, after, tagged) if facts["exit"] is None else None
    return facts
