"""The parent of a run, inside the container: starts the program, outlives the connection, writes the end.

    launch --stdin: secrets--> supervisor --stdout: one line, started or failed--> launch
                                   |
                                program (own session, both outputs to the log)

It is a child subreaper, so what forks twice or makes its own session stays below it and its end is seen.
Nothing that matters is in its memory alone: identities are on disk before anybody hears "started", so `kill`
can finish the work of a supervisor that was itself killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any, Dict, List, Optional, Set

from ..logs.logindex import LogIndex
from ..processes import cgroup, kin, proc
from ..processes.detach import detach, fresh_start, read_secrets, tell
from ..processes.oom import during, oom_kills
from ..processes.signals import send_signal, tell_to_end
from ..records.runfolder import RunFolder
from .cannotstart import cannot_start
from .ending import exit_body, kill_time, killer, next_step
from .environment import environment
from .lastword import failed_to_start, remove_if_empty, write_exit

TICK_S = 0.5  # an ending family is looked at this often; a child's end wakes the loop at once
SAMPLE_S = 2.0
SAMPLE_COST = 0.01  # reading the process table may take this share of one core


class Supervisor:
    """One run, from its record to its exit.json."""

    def __init__(self, run: RunFolder, record: Dict[str, Any]) -> None:
        self.run = run
        self.record = record
        self.grace_s = float(record.get("grace_s", 15.0))
        self.me = proc.own_identity()
        self.process: Optional[subprocess.Popen[bytes]] = None  # held, so that its __del__ never reaps
        self.leader: Optional[proc.Identity] = None
        self.started_at = time.time()
        self.started = time.monotonic()
        self.ended: Optional[float] = None  # the leader's end, monotonic
        self.code: Optional[int] = None
        self.signal: Optional[int] = None
        self.kill_seen = False  # somebody of the family died of SIGKILL
        self.kill_at: Optional[float] = None  # the end of a stop's grace, monotonic
        self.stopped_by = ""
        self.termed: Optional[float] = None
        self.peak_rss = 0
        self.group: Optional[str] = None
        self.log_inode = 0
        self.written: Set[proc.Identity] = set()
        self.next_sample = 0.0
        self.oom_before = oom_kills()
        self.log_index = LogIndex(run, str(record.get("log") or ""))

    def start(self, secrets: Dict[str, str]) -> Optional[str]:
        """Start the program and write the started record. Returns why it did not start."""
        env = {str(name): str(value) for name, value in self.record.get("env", {}).items()}
        env.update(secrets)
        try:
            log = os.open(self.record["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            return "cannot write the log: %s" % error
        self.log_inode = os.fstat(log).st_ino
        self.group = cgroup.make(self.run.id)
        try:
            self.process = subprocess.Popen(
                self.record["command"],
                cwd=self.record["cwd"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=self.before_exec,  # safe: this process has one thread
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return cannot_start(self.record["command"], str(self.record["cwd"]), env, error)
        finally:
            os.close(log)
        return self.write_started(self.process.pid)

    def before_exec(self) -> None:
        cgroup.enter(self.group)
        fresh_start()

    def write_started(self, pid: int) -> Optional[str]:
        """The started record, with fsync. A run that nobody could find again must not be: without the record
        the program is ended."""
        leader = proc.read_process(pid)  # a zombie at worst: nobody has reaped it yet
        assert leader is not None
        self.leader = leader.identity
        body: Dict[str, Any] = {
            "supervisor": proc.as_json(self.me),
            "leader": proc.as_json(self.leader),
            "started_at": self.started_at,
            "mono": self.started,
            "cgroup": self.group,
            "log_inode": self.log_inode,
        }
        body.update(proc.here())
        try:
            self.run.write("supervisor.json", body)
        except OSError as error:
            send_signal(self.leader, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "cannot write the started record: %s" % error
        self.note("started", leader=proc.as_json(self.leader))
        return None

    def write_environment(self) -> None:
        """For `runs diff`; after the word "started", because nobody waits for it."""
        try:
            self.run.write("environment.json", environment(), durable=False)
        except OSError:
            pass

    def watch(self) -> None:
        """Until the whole family has ended."""
        while True:
            info = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, TICK_S)
            if info is not None and info.si_signo == signal.SIGTERM:
                self.asked_to_stop(info.si_pid)
            self.reap()
            if self.advance():
                return

    def asked_to_stop(self, by_pid: int) -> None:
        """SIGTERM: an orderly stop. `kill` has written before who wants it and how long the grace is, so the
        stop goes on here when the connection that brought it is lost. A later, more impatient one counts."""
        asked = kill_time(self.run.events(), self.grace_s)
        if asked is None:
            asked = time.monotonic() + self.grace_s
            self.stopped_by = self.stopped_by or "SIGTERM to the supervisor, from pid %d" % by_pid
        self.kill_at = asked if self.kill_at is None else min(asked, self.kill_at)

    def reap(self) -> None:
        """Take the exit status of everybody who ended: the leader, and orphans that became our children."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.peak_rss = max(self.peak_rss, usage.ru_maxrss * 1024)
            killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            self.kill_seen = self.kill_seen or killed == signal.SIGKILL
            if self.process is not None and pid == self.process.pid and self.ended is None:
                self.process.returncode = 0  # what Popen thinks; the truth is here
                self.ended = time.monotonic()
                self.signal = killed
                self.code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
                self.note("exited", code=self.code, signal=self.signal)

    def advance(self) -> bool:
        """One look at the family, and the step that it needs. True when the run is over."""
        now = time.monotonic()
        ending = self.ended is not None or self.kill_at is not None
        if not ending and now < self.next_sample:
            return False
        processes = proc.table()
        members = self.members(processes, thorough=ending)
        self.sample(members, time.monotonic() - now)
        step = next_step(
            now,
            leader_ended=self.ended,
            failed=self.code != 0,
            kill_at=self.kill_at,
            termed=self.termed,
            members=len(members) or int(cgroup.populated(self.group)),
            grace_s=self.grace_s,
        )
        if step == "term_leader":
            self.termed = now
            self.signal_all([one for one in members if one.identity == self.leader], signal.SIGTERM)
        elif step == "term_family":
            self.termed = now
            self.note("note", text="left after the leader's end: %d" % len(members))
            self.signal_all(members, signal.SIGTERM)
        elif step == "kill":
            self.signal_all(members, signal.SIGKILL)
            cgroup.kill(self.group)  # after it, for the sake of the list; it catches what forks meanwhile
        return step == "done"

    def members(self, processes: proc.Table, *, thorough: bool) -> List[proc.Process]:
        """Who of the family still runs. `thorough` looks at every process's environment too."""
        tagged = kin.tagged(processes).get(self.run.id, []) if thorough else []
        tagged = tagged + cgroup.pids(self.group)
        found = kin.family(processes, supervisor=self.me, known=self.written, tagged=tagged)
        return [process for process in found if not process.dead]

    def sample(self, members: List[proc.Process], took_s: float) -> None:
        """Peak memory (resident pages summed: shared ones count in each process), identities on disk."""
        self.next_sample = time.monotonic() + max(SAMPLE_S, took_s / SAMPLE_COST)
        self.log_index.look()
        self.peak_rss = max(self.peak_rss, sum(process.rss_bytes for process in members))
        identities = {process.identity for process in members}
        if identities == self.written:
            return
        self.written = identities
        body: Dict[str, Any] = {"members": [proc.as_json(identity) for identity in sorted(identities)]}
        body.update(proc.here())
        try:
            self.run.write("members.json", body, durable=False)
        except OSError:  # a full disk: the next change tries again
            pass

    def signal_all(self, members: List[proc.Process], number: int) -> None:
        reached = []
        for process in members:
            try:
                if tell_to_end(process.identity, number):
                    reached.append(process.pid)
            except OSError as error:
                self.note("note", text="signal %d to pid %d: %s" % (number, process.pid, error))
        if reached:
            self.note("signalled", signal=int(number), pids=reached, by="supervisor")

    def note(self, event: str, **details: Any) -> None:
        """Events are for people: a full disk must not end the run that they would tell of."""
        try:
            self.run.append_event(event, **details)
        except OSError:
            pass

    def exit(self) -> Dict[str, Any]:
        """The exit.json of this run, once everybody is gone."""
        killed_by = killer(self.run.events(), before=self.ended)
        if killed_by is None and self.stopped_by:
            killed_by = {"who": self.stopped_by, "reason": ""}
        kills = during(self.oom_before, oom_kills())
        return exit_body(
            code=self.code,
            signal=self.signal,
            oom=bool(kills["container"]) and self.kill_seen and killed_by is None,
            oom_kills=kills,
            started_at=self.started_at,
            ended_at=time.time(),
            wall_s=time.monotonic() - self.started,
            peak_rss_bytes=self.peak_rss,
            killed_by=killed_by,
        )


def main(run_dir: str) -> int:
    """`python3 -I supervisor.pyz supervise RUN_DIR`. Returns 0 when the run was supervised to its end."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    run = RunFolder(run_dir)
    secrets = read_secrets()
    detach()
    loaded = run.record()
    if loaded.value is None:
        tell({"failed": loaded.problem or "there is no record.json"})
        return 1
    supervisor = Supervisor(run, loaded.value)
    why = supervisor.start(secrets)
    secrets.clear()
    if why is not None:
        cgroup.remove(supervisor.group)
        failed_to_start(run, why)
        tell({"failed": why})
        return 1
    tell({"started": supervisor.leader})
    supervisor.write_environment()
    supervisor.watch()
    cgroup.remove(supervisor.group)
    write_exit(run, supervisor.exit())
    remove_if_empty(run.file("supervisor.err"))
    return 0
