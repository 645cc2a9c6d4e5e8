"""End a run: TERM to its leader, the grace, then KILL to everybody of it, and say who would not go.

Its supervisor does it, on SIGTERM, so a kill goes on when the connection that brought it is lost. Here the
wish is written down, the work is watched, and what is left a moment after the grace is ended from here: so it
is when the supervisor itself was killed, and then exit.json is written here too. Only what is proven to be
the run's is ever signalled, each by verified identity: no pattern, no group.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional

from ..processes import cgroup, kin, proc
from ..processes.signals import tell_to_end
from ..records.pick import not_found
from ..records.runfolder import RunFolder, list_runs
from .ending import exit_body
from .spawn import find_supervisor

KILL_S = 10.0  # what KILL has not ended by then sleeps in the kernel (state D) and cannot be ended
POLL_S = 0.1
HELP_S = 1.5  # how long after the grace the supervisor is left alone with its work
EXIT_S = 5.0  # for the supervisor's last word


class Stop:
    """One kill of one run."""

    def __init__(self, run: RunFolder, grace_s: float, emit: Callable[[Dict[str, Any]], None]) -> None:
        self.run = run
        self.grace_s = grace_s
        self.emit = emit
        self.signalled: Dict[str, List[int]] = {"TERM": [], "KILL": []}
        self.problems: List[str] = []
        self.heard = len(run.events())
        self.spared = kin.ancestors(os.getpid(), proc.table())  # a run that kills itself: not the messenger

    def members(self, processes: Optional[proc.Table] = None) -> List[proc.Process]:
        """Who of the family still runs."""
        found = self.run.family(processes)
        return [one for one in found if not one.dead and one.pid not in self.spared]

    def nobody(self) -> bool:
        """Is the whole family gone, also who was too quick for the process table?"""
        if self.members():
            return False
        group = self.run.group()
        return not cgroup.populated(group) or bool(self.spared.intersection(cgroup.pids(group)))

    def supervisor(self) -> Optional[proc.Process]:
        """The living supervisor, also one that is just starting its program."""
        return proc.living(self.run.identities()[0]) or find_supervisor(self.run)

    def ask(self, first: bool) -> float:
        """Ask the supervisor for an orderly stop; without one, TERM to the leader alone (without a leader, to
        each), once. Returns how long to wait before help is due."""
        supervisor = self.supervisor()
        if supervisor is not None and supervisor.pid not in self.spared:
            try:
                if tell_to_end(supervisor.identity, signal.SIGTERM):
                    return self.grace_s + HELP_S
            except OSError as error:
                self.problem(supervisor, error)
        if first:  # two TERMs would make torchrun drop its ranks before they have saved
            members = self.members()
            leader = proc.as_identity((self.run.supervisor().value or {}).get("leader"))
            self.send([one for one in members if one.identity == leader] or members, signal.SIGTERM)
        return self.grace_s

    def gone(self, within_s: float) -> bool:
        until = time.monotonic() + within_s
        while True:
            self.listen()
            if self.nobody():
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)

    def finish(self) -> List[proc.Process]:
        """KILL until nobody is left. Returns those who cannot be ended."""
        until = time.monotonic() + KILL_S
        while True:
            members = self.members()
            if self.nobody() or time.monotonic() >= until:
                return members
            self.send(members, signal.SIGKILL)
            group = self.run.group()
            if not self.spared.intersection(cgroup.pids(group)):
                cgroup.kill(group)
            time.sleep(POLL_S)

    def send(self, members: List[proc.Process], number: "signal.Signals") -> None:
        reached = []
        for process in members:
            try:
                if tell_to_end(process.identity, number):
                    reached.append(process.pid)
            except OSError as error:
                self.problem(process, error)
        new = [pid for pid in reached if pid not in self.signalled[number.name[3:]]]
        if new:
            note(self.run, "signalled", signal=int(number), pids=new, by="kill")
            self.tell(int(number), new)

    def listen(self) -> None:
        """Pass on whom the supervisor has signalled since the last look."""
        events = self.run.events()
        for event in events[self.heard :]:
            pids = event.get("pids")
            if (
                event.get("event") == "signalled"
                and event.get("by") == "supervisor"
                and isinstance(pids, list)
            ):
                self.tell(event.get("signal"), pids)
        self.heard = len(events)

    def tell(self, number: Any, pids: List[int]) -> None:
        name = {15: "TERM", 9: "KILL"}.get(number)
        if name is not None:
            self.signalled[name] += [pid for pid in pids if pid not in self.signalled[name]]
            self.emit({"signalled": "SIG" + name, "pids": pids})

    def problem(self, process: proc.Process, error: OSError) -> None:
        text = "pid %d (%s): %s" % (process.pid, process.comm, error)
        if text not in self.problems:
            self.problems.append(text)


def stop(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """End the run request["name"] (an id, or a tag: its newest run) of request["state_dir"]. Also: who,
    reason, grace_s|null (the recipe's).

    Answers {"outcome": "killed" | "already_ended" | "survivors", "id", "tag", "gpus", "seconds", "signalled",
    "survivors" [processes], "zombies" [processes], "problems", "exit"}. Raises AgentError: not_found, locked.
    """
    run = find_run(str(request["state_dir"]), str(request["name"]))
    body = run.record().value or {}
    grace_s = request.get("grace_s")
    attempt = Stop(run, float(body.get("grace_s", 15.0) if grace_s is None else grace_s), emit)
    began = time.monotonic()
    if not attempt.members() and (run.has("exit.json") or not under_way(run)):
        return _answer(attempt, body, "already_ended", began, [])
    with stop_lock(run) as first:
        who, reason = str(request.get("who", "")), str(request.get("reason") or "")
        note(run, "kill_requested", who=who, reason=reason, grace_s=attempt.grace_s)
        attempt.gone(attempt.ask(first))
        survivors = attempt.finish()
        if not survivors:
            _last_word(attempt, body, request)
        attempt.listen()
    return _answer(attempt, body, "survivors" if survivors else "killed", began, survivors)


def under_way(run: RunFolder) -> bool:
    """Its supervisor lives, or is just starting. Without one and without a family there is nobody to end:
    a run that went without a trace stays `lost`, a kill that came too late does not rename it."""
    return run.live() or find_supervisor(run) is not None


def find_run(state_dir: str, name: str) -> RunFolder:
    """By id, else the newest with that tag. Raises AgentError (not_found)."""
    for run in list_runs(state_dir):
        if name in (run.id, (run.record().value or {}).get("tag")):
            return run
    raise not_found(state_dir, list_runs(state_dir), "no run has the tag %r" % name)


@contextmanager
def stop_lock(run: RunFolder) -> Iterator[bool]:
    """True for the first of several kills at once. Held by the kernel, freed when the holder dies."""
    try:
        descriptor = os.open(run.file("stop.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:  # a full disk is no reason not to kill
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            first = True
        except OSError:
            first = False
        yield first
    finally:
        os.close(descriptor)


def _last_word(attempt: Stop, record: Dict[str, Any], request: Dict[str, Any]) -> None:
    """exit.json: the supervisor's, if it lives; else ours, for nobody else will write it."""
    run = attempt.run
    until = time.monotonic() + EXIT_S
    while not run.has("exit.json") and under_way(run):
        if time.monotonic() >= until:
            attempt.problems.append("the supervisor has not written exit.json yet")
            return
        time.sleep(POLL_S / 2)
    if run.has("exit.json"):
        # It goes a moment after its last word; until then its GPUs count as taken.
        while run.live() and time.monotonic() < until:
            time.sleep(POLL_S / 10)
        return
    cgroup.remove(run.group())
    started = run.supervisor().value or {}
    started_at = float(started.get("started_at") or record.get("created_at") or time.time())
    body = exit_body(
        code=None,
        signal=None,
        oom=False,
        started_at=started_at,
        ended_at=time.time(),
        wall_s=max(0.0, time.time() - started_at),
        peak_rss_bytes=0,
        killed_by={"who": str(request.get("who", "")), "reason": str(request.get("reason") or "")},
    )
    body["why"] = "the supervisor was gone; its program was ended by kill"
    try:
        run.write("exit.json", body)
    except OSError as error:
        attempt.problems.append("cannot write exit.json: %s" % error)


def note(run: RunFolder, event: str, **details: Any) -> None:
    try:
        run.append_event(event, **details)
    except OSError:
        pass


def _answer(
    attempt: Stop, record: Dict[str, Any], outcome: str, began: float, survivors: List[proc.Process]
) -> Dict[str, Any]:
    family = attempt.run.family()
    return {
        "outcome": outcome,
        "id": attempt.run.id,
        "tag": record.get("tag"),
        "gpus": record.get("gpus") or [],
        "seconds": round(time.monotonic() - began, 2),
        "signalled": attempt.signalled,
        "survivors": [proc.describe(one) for one in survivors],
        "zombies": [proc.describe(one) for one in family if one.dead],
        "problems": attempt.problems,
        "exit": attempt.run.exit().value,
    }
