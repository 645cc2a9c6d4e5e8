"""Start a run, once: the record first, then the supervisor, then its word that the program runs.

The run's id is made by whoever asks, so asking again after an uncertain answer finds the first attempt
instead of starting a second one. A lock on the state folder is held from the checks to the supervisor's word:
of two launches at once, the second sees the first.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any, ContextManager, Dict, Optional

from .. import AgentError
from ..payload import payload_bytes
from ..processes import kin, proc
from ..processes.flock import exclusive
from ..processes.surroundings import HINTS
from ..records.runfolder import (
    NEWER,
    TAG_PATTERN,
    RunFolder,
    folder_of,
    list_runs,
    unfinished_runs,
    write_bytes,
)
from ..records.sentfiles import write_files
from .compilecache import compile_cache
from .spawn import STARTED_S, find_supervisor, spawn_supervisor
from .waiting import last_words

LOCK_S = 15.0


def launch(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """Start the run that the request describes, or report what became of it earlier.

    request: id, state_dir, record (run-folder.md, without id, created_at, boot_id, init_start), recipe_yaml,
    secrets {name: value}, release_dir|null, allow_busy, settle_s, files {path below files/: text}|absent,
    make_cwd (the working folder is one of ours)|absent.
    Answers {"outcome": "started" | "already_running" | "already_ended" | "failed" | "starting", "id", "tag",
    "leader", "log", "rotated", "exit", "log_tail", "root_cause", "why"}. Raises AgentError: locked (tag or
    log in use), gpus_busy, not_found (release), verification (no space), usage.
    """
    state_dir = str(request["state_dir"])
    try:
        run = folder_of(state_dir, str(request["id"]))
    except ValueError as error:
        raise AgentError("usage", str(error)) from None
    record = dict(request["record"])
    if not TAG_PATTERN.fullmatch(str(record.get("tag", ""))):
        raise AgentError("usage", "not a tag: %r" % record.get("tag"))
    try:
        os.makedirs(os.path.dirname(run.path), exist_ok=True)
        with launch_lock(state_dir):
            answer = _earlier(run) or _start(run, record, request)
    except OSError as error:
        raise cannot_write(error, state_dir) from None
    if answer["outcome"] == "started":
        _settle(run, answer, float(request.get("settle_s", 0.5)))
    return answer


def launch_lock(state_dir: str) -> ContextManager[None]:
    """One launch at a time in a state folder."""
    return exclusive(os.path.join(state_dir, "launch.lock"), LOCK_S, "another launch holds the lock")


def _earlier(run: RunFolder) -> Optional[Dict[str, Any]]:
    """What an earlier request with this id came to; None when it never started anything."""
    if not run.has("record.json"):
        return None
    answer = _await_word(run)
    if answer is None and run.family():
        what = "run %s lost its supervisor while it started, and its processes live" % run.id
        raise AgentError("locked", what, next="dflashctl kill %s" % run.id)
    return answer


def _await_word(run: RunFolder) -> Optional[Dict[str, Any]]:
    until = time.monotonic() + STARTED_S
    while True:
        ended = run.exit().value
        if ended is not None:
            return _answer(run, "already_ended", exit=ended, **last_words(run))
        if run.has("supervisor.json"):
            return _answer(run, "already_running" if run.live() else "already_ended")
        if find_supervisor(run) is None:
            return None
        if time.monotonic() >= until:
            return _answer(run, "starting")
        time.sleep(0.05)


def _start(run: RunFolder, record: Dict[str, Any], request: Dict[str, Any]) -> Dict[str, Any]:
    refuse_conflicts(run, record, allow_busy=bool(request.get("allow_busy")))
    release_dir = request.get("release_dir")
    if release_dir and not os.path.isdir(str(release_dir)):
        raise AgentError("not_found", "the release is gone", str(release_dir), "dflashctl deploy")
    command = record.get("command")
    if request.get("make_cwd"):
        os.makedirs(str(record.get("cwd")), exist_ok=True)
    if not command or not os.path.isdir(str(record.get("cwd"))):
        what = "no command" if not command else "the working folder does not exist"
        raise AgentError(
            "not_found", what, str(record.get("cwd")), "create it, or correct `workdir` in hosts.yaml"
        )
    try:
        write_files(run.file("files"), dict(request.get("files") or {}))
        written = _write_folder(run, record, str(request.get("recipe_yaml", "")))
        rotated = rotate_log(run, str(record["log"]))
        # With a copy of the record: should one of the two files be damaged, the other tells (rebuilding.py).
        run.append_event("launched", by=record.get("created_by"), host=record.get("host"), record=written)
    except (OSError, AgentError):
        shutil.rmtree(run.path, ignore_errors=True)  # nothing was started: leave no half of a run
        raise
    word = spawn_supervisor(run, dict(request.get("secrets") or {}))
    if "failed" in word:
        return _answer(run, "failed", why=str(word["failed"]), rotated=rotated, exit=run.exit().value)
    return _answer(run, "started" if "started" in word else "starting", rotated=rotated)


def refuse_conflicts(run: RunFolder, record: Dict[str, Any], *, allow_busy: bool) -> None:
    """Raises AgentError when a run that is not over has the tag, the log, or (unless allowed) a GPU, or when
    a live one was launched by a later dflashctl, whose record does not tell us."""
    processes = proc.table()
    tagged = kin.tagged(processes)
    state_dir = os.path.dirname(os.path.dirname(run.path))
    uuids = {gpu.get("uuid") for gpu in record.get("gpus") or []}
    for other in unfinished_runs(state_dir):
        if other.id == run.id:
            continue
        theirs, problem = other.record()
        alive = other.live(processes)
        if NEWER in (problem or "") and (alive or find_supervisor(other) is not None):
            what = (
                "run %s is live, and was launched by a newer dflashctl: its tag, log and GPUs are not known"
            )
            raise AgentError(
                "locked", what % other.id, other.path, "launch with that one, or update this one"
            )
        if theirs is None or not (alive or [one for one in other.family(processes, tagged) if not one.dead]):
            continue
        who = "run %s (tag %s)" % (other.id, theirs.get("tag"))
        state = "is live" if alive else "lost its supervisor, but its processes live"
        kill = "dflashctl kill %s" % theirs.get("tag")
        if theirs.get("tag") == record["tag"]:
            raise AgentError("locked", "%s %s" % (who, state), next="%s, or take another tag" % kill)
        if theirs.get("log") == record["log"]:
            raise AgentError("locked", "%s %s and writes this log" % (who, state), str(record["log"]), kill)
        shared = sorted(gpu["index"] for gpu in theirs.get("gpus") or [] if gpu.get("uuid") in uuids)
        if shared and not allow_busy:
            names = ", ".join(str(index) for index in shared)
            raise AgentError("gpus_busy", "%s %s and has GPU %s" % (who, state, names), next=kill)


def _write_folder(run: RunFolder, record: Dict[str, Any], recipe_yaml: str) -> Dict[str, Any]:
    """Everything that the supervisor reads, durable before it starts; the record last. Returns the record."""
    os.makedirs(run.path, exist_ok=True)
    os.makedirs(os.path.dirname(str(record["log"])), exist_ok=True)
    write_bytes(run.file("recipe.yaml"), recipe_yaml.encode())
    write_bytes(run.file("supervisor.pyz"), payload_bytes())
    body = dict(record)
    body.update(id=run.id, created_at=time.time(), log_start=0)
    body["compile_cache"] = compile_cache(dict(record.get("env") or {}))
    body.update(proc.here())
    run.write("record.json", body)
    return body


def rotate_log(run: RunFolder, log: str) -> Optional[str]:
    """Move an ended run's log aside: its name gets that run's id; a log of nobody's gets `before-<this id>`.
    Returns the new name. So old exceptions are never counted for the new run, and nothing is lost."""
    if not os.path.lexists(log):
        return None
    if not os.path.isfile(log):
        raise AgentError(
            "usage", "the log is not an ordinary file", log, "choose another `log` in the recipe"
        )
    if os.path.getsize(log) == 0:
        return None
    suffix = "before-%s" % run.id
    for other in list_runs(os.path.dirname(os.path.dirname(run.path))):
        record = other.record().value if other.id != run.id else None
        # Of those that called their log so, the one whose log was not moved aside before wrote this one.
        if record is not None and record.get("log") == log and other.log_path(record) == log:
            suffix = other.id
            break
    aside = "%s.%s" % (log, suffix)
    os.rename(log, aside)
    return aside


def _settle(run: RunFolder, answer: Dict[str, Any], settle_s: float) -> None:
    """Look once more: many a start dies in its first half second, of a wrong import or argument."""
    until = time.monotonic() + settle_s
    while time.monotonic() < until:
        ended = run.exit().value
        if ended is not None:
            answer.update(last_words(run), exit=ended)
            return
        time.sleep(0.05)


def _answer(run: RunFolder, outcome: str, **more: Any) -> Dict[str, Any]:
    record = run.record().value or {}
    supervisor = run.supervisor().value or {}
    answer: Dict[str, Any] = {
        "outcome": outcome,
        "id": run.id,
        "tag": record.get("tag"),
        "leader": supervisor.get("leader"),
        "log": run.log_path(record),
        "rotated": None,
        "exit": None,
        "log_tail": "",
        "root_cause": None,
        "why": None,
    }
    answer.update(more)
    return answer


def cannot_write(error: OSError, where: str) -> AgentError:
    """A full disk and the like, as a message."""
    hint = HINTS.get(error.errno or 0, "")
    return AgentError("verification", "%s; nothing was started" % error, where, hint)
