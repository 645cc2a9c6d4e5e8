"""Processes as /proc tells them (Linux, no subprocess). Which of them are a run's: kin.

A pid alone names nobody: it is given out again. Here a process is (pid, start), `start` being field 22 of
/proc/PID/stat in clock ticks since boot; together with the boot id and the start of the container's pid 1
that can never mean another process. Formats: proc_pid_stat(5), proc_pid_status(5), proc_pid_environ(5).
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Identity = Tuple[int, int]
"""(pid, start ticks)."""


class Process(NamedTuple):
    """One line of the process table, from /proc/PID/stat alone (one small read a process)."""

    pid: int
    ppid: int
    pgid: int  # 0 when the group lives outside this pid namespace (a plain `pct exec`): never signal that
    session: int
    start: int  # clock ticks since boot
    state: str  # R S D Z T t X I
    comm: str  # first 15 bytes of the thread name; a program may change it
    threads: int
    cpu_ticks: int  # utime + stime of the process, without its children
    rss_bytes: int

    @property
    def identity(self) -> Identity:
        return (self.pid, self.start)

    @property
    def dead(self) -> bool:
        """A zombie holds no memory and no GPU; only its parent can remove its entry."""
        return self.state in ("Z", "X")


Table = Dict[int, Process]


def read(path: str) -> Optional[bytes]:
    """A small file's bytes; None when they cannot be had."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # gone in the meantime, or not ours to read
        return None


def parse_stat(data: bytes) -> Optional[Process]:
    """Parse /proc/PID/stat. comm stands in parentheses and may hold spaces and parentheses itself."""
    head, _, tail = data.rpartition(b")")
    number, _, comm = head.partition(b"(")
    fields = tail.split()
    if len(fields) < 22:
        return None
    try:
        return Process(
            pid=int(number),
            ppid=int(fields[1]),
            pgid=int(fields[2]),
            session=int(fields[3]),
            start=int(fields[19]),
            state=fields[0].decode("ascii", "replace"),
            comm=comm.decode("utf-8", "replace"),
            threads=int(fields[17]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            rss_bytes=int(fields[21]) * PAGE_BYTES,
        )
    except ValueError:
        return None


def read_process(pid: int) -> Optional[Process]:
    data = read("/proc/%d/stat" % pid)
    return parse_stat(data) if data else None


def table() -> Table:
    """Every process that this pid namespace shows."""
    found: Table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = read_process(int(name))
            if process is not None:
                found[process.pid] = process
    return found


def cmdline(pid: int) -> List[str]:
    """argv as the process shows it now (a program may rewrite it); [] for kernel threads and zombies."""
    data = read("/proc/%d/cmdline" % pid) or b""
    return [part.decode("utf-8", "replace") for part in data.rstrip(b"\0").split(b"\0")] if data else []


def status_fields(pid: int) -> Dict[str, str]:
    """/proc/PID/status as {name: text}; {} when it cannot be read."""
    fields: Dict[str, str] = {}
    for line in (read("/proc/%d/status" % pid) or b"").decode("utf-8", "replace").splitlines():
        name, separator, value = line.partition(":")
        if separator:
            fields[name] = value.strip()
    return fields


def _numbers(text: str) -> List[int]:
    return [int(word) for word in text.split() if word.isdigit()]


def uid(pid: int) -> Optional[int]:
    """The real uid, as this user namespace sees it."""
    numbers = _numbers(status_fields(pid).get("Uid", ""))
    return numbers[0] if numbers else None


def ns_pids(pid: int) -> List[int]:
    """NSpid: the process's pid in each pid namespace, from the reader's own to the innermost."""
    return _numbers(status_fields(pid).get("NSpid", ""))


def wchan(pid: int) -> str:
    """The kernel function that it sleeps in, '' when running or hidden."""
    text = (read("/proc/%d/wchan" % pid) or b"").decode("ascii", "replace")
    return "" if text == "0" else text


def thread_states(pid: int) -> List[Dict[str, Any]]:
    """[{"tid", "comm", "state", "cpu_ticks"}] of every thread."""
    found = []
    try:
        names = os.listdir("/proc/%d/task" % pid)
    except OSError:
        return []
    for name in sorted(names, key=int):
        thread = parse_stat(read("/proc/%d/task/%s/stat" % (pid, name)) or b"")
        if thread is not None:
            found.append(
                {"tid": int(name), "comm": thread.comm, "state": thread.state, "cpu_ticks": thread.cpu_ticks}
            )
    return found


def pid_namespace(pid: Optional[int] = None) -> Optional[int]:
    """Inode of the pid namespace of a process (default: this one): the same number on the host and inside."""
    try:
        return os.stat("/proc/%s/ns/pid" % ("self" if pid is None else pid)).st_ino
    except OSError:
        return None


def boot_id() -> str:
    """Differs after each boot of the machine; '' when hidden."""
    return (read("/proc/sys/kernel/random/boot_id") or b"").decode("ascii", "replace").strip()


def init_start() -> int:
    """Start ticks of pid 1: differs after each start of the container; 0 when pid 1 is hidden (hidepid)."""
    process = read_process(1)
    return process.start if process else 0


def here() -> Dict[str, Any]:
    """What makes identities of this place comparable later."""
    return {"boot_id": boot_id(), "init_start": init_start()}


def same_place(recorded: Dict[str, Any]) -> bool:
    """Were these identities recorded in this boot, by this start of the container?"""
    now = here()
    return recorded.get("boot_id") == now["boot_id"] and recorded.get("init_start") == now["init_start"]


def as_identity(recorded: Any) -> Optional[Identity]:
    """{"pid", "start"} of a file -> identity; None when it is not one."""
    if (
        isinstance(recorded, dict)
        and isinstance(recorded.get("pid"), int)
        and isinstance(recorded.get("start"), int)
    ):
        return (recorded["pid"], recorded["start"])
    return None


def as_json(identity: Identity) -> Dict[str, int]:
    return {"pid": identity[0], "start": identity[1]}


def own_identity() -> Identity:
    process = read_process(os.getpid())
    if process is None:
        raise OSError("/proc/self/stat cannot be read: /proc is not mounted here")
    return process.identity


def living(identity: Optional[Identity], processes: Optional[Table] = None) -> Optional[Process]:
    """The process of this identity, unless it is gone, a zombie, or another one has its pid."""
    if identity is None:
        return None
    process = processes.get(identity[0]) if processes is not None else read_process(identity[0])
    return process if process is not None and process.start == identity[1] and not process.dead else None


def describe(process: Process) -> Dict[str, Any]:
    """A process for people: identity, state, command line, user, memory."""
    return {
        "pid": process.pid,
        "start": process.start,
        "ppid": process.ppid,
        "session": process.session,
        "state": process.state,
        "comm": process.comm,
        "cmdline": cmdline(process.pid),
        "uid": uid(process.pid),
        "threads": process.threads,
        "rss_bytes": process.rss_bytes,
        "wchan": wchan(process.pid) if process.state == "D" else "",
    }


def started_at(start: int) -> Optional[float]:
    """Wall time (seconds since the epoch) of start ticks, to about 0.01 s."""
    data = read("/proc/uptime")
    if not data:
        return None
    return time.time() - float(data.split()[0]) + start / TICKS_PER_S
