"""What a run's other files prove of one that is damaged. Reads, never writes; nothing here is a guess.

A function a file: it answers with the content, where it comes from, and what of it is not known any more; or
with None, when too little is proven to write anything.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional

from ..records.runfolder import Loaded, RunFolder, number, read_lines, time_of, whole
from ..runs.ending import exit_body, killer


class Rebuilt(NamedTuple):
    """Content, the names of the files that it comes from, and what of it nobody can tell any more."""

    value: Dict[str, Any]
    source: str
    unknown: List[str]


class Witness(RunFolder):
    """A run's folder as it will be: with what has been rebuilt so far (each has `name` and `rebuilt`)."""

    def __init__(self, run: RunFolder, done: Iterable[Any] = ()) -> None:
        super().__init__(run.path)
        self._values = {each.name: each.rebuilt.value for each in done if each.rebuilt is not None}

    def read(self, name: str) -> Loaded:
        return Loaded(self._values[name], None) if name in self._values else super().read(name)


def record(run: RunFolder) -> Optional[Rebuilt]:
    """The event `launched` holds a copy of the whole record; one of an older launch only who and where."""
    launched = _event(run, "launched") or {}
    copy = launched.get("record")
    if isinstance(copy, dict) and copy.get("id") == run.id:
        return Rebuilt(dict(copy), "events.jsonl", [])
    supervised = run.supervisor().value or {}
    recipe = _recipe_name(run)
    if not (launched or supervised or recipe):
        return None
    value: Dict[str, Any] = {
        "id": run.id,
        "tag": None,
        "recipe": recipe,
        "created_at": time_of(run.id),
        "created_by": launched.get("by"),
        "host": launched.get("host"),
        "boot_id": supervised.get("boot_id"),
        "init_start": supervised.get("init_start"),
    }
    unknown = ["tag", "command", "release", "GPUs", "log", "environment"]
    unknown += [name for name in ("recipe", "created_by", "host") if value[name] is None]
    return Rebuilt(value, "its id, recipe.yaml, events.jsonl", unknown)


def supervisor(run: RunFolder) -> Optional[Rebuilt]:
    """Of a run that is over: who its program was, when it started. Its supervisor's own identity is lost."""
    started, known = _event(run, "started"), run.record().value or {}
    if started is None or not known.get("boot_id"):
        return None
    value = {
        "supervisor": None,
        "leader": started.get("leader"),
        "started_at": started.get("at"),
        "mono": started.get("mono"),
        "boot_id": known.get("boot_id"),
        "init_start": known.get("init_start"),
        "cgroup": None,
    }
    return Rebuilt(value, "events.jsonl, record.json", ["supervisor", "cgroup"])


def exit_record(run: RunFolder) -> Optional[Rebuilt]:
    """From the supervisor's event `exited`, and the kills that were asked for before it."""
    exited = _event(run, "exited")
    ended_at = number(exited.get("at")) if exited else None
    if exited is None or ended_at is None:
        return None
    started = run.supervisor().value or _event(run, "started") or {}
    began = number(started.get("started_at")) or number(started.get("at"))
    code, signal = whole(exited.get("code")), whole(exited.get("signal"))
    why = str(exited.get("why") or "")
    if code is None and signal is None and not why:
        return None
    killed_by = killer(run.events(), before=number(exited.get("mono")))
    value = exit_body(
        code=code,
        signal=signal,
        oom=False,
        started_at=ended_at if began is None else began,
        ended_at=ended_at,
        wall_s=0.0 if began is None else max(ended_at - began, 0.0),
        peak_rss_bytes=0,
        killed_by=killed_by,
        why=why,
    )
    unknown = ["peak memory", "whether memory ran out", *(["start"] if began is None else [])]
    return Rebuilt(value, "events.jsonl", unknown)


def summary(run: RunFolder) -> Optional[Rebuilt]:
    """The best acceptance length that was measured; headline and table are lost."""
    measured = [number(each.get("acceptance_length")) for each in read_lines(run.file("metrics.jsonl"))]
    lengths = [each for each in measured if each is not None]
    if not lengths:
        return None
    value: Dict[str, Any] = {"headline": None, "lossless": None, "table": None, "notes": []}
    value["best_acceptance_length"] = max(lengths)
    return Rebuilt(value, "metrics.jsonl", ["headline", "lossless", "table", "notes"])


REBUILD: Dict[str, Callable[[RunFolder], Optional[Rebuilt]]] = {
    "record.json": record,
    "supervisor.json": supervisor,
    "exit.json": exit_record,
    "summary.json": summary,
}
"""The others (environment, members, heartbeat, root cause) stand nowhere else: they are only set aside."""


def _recipe_name(run: RunFolder) -> Optional[str]:
    """The agent has no YAML: the one line that dflashctl itself wrote so."""
    try:
        with open(run.file("recipe.yaml"), encoding="utf-8", errors="replace") as file:
            found = re.search(r"^name: ([A-Za-z0-9._-]+)$", file.read(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1) if found else None


def _event(run: RunFolder, name: str) -> Optional[Dict[str, Any]]:
    """The last event of that name."""
    found = [event for event in run.events() if event.get("event") == name]
    return found[-1] if found else None
