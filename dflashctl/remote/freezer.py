"""Is a container frozen? `pct status` calls a frozen one running, so its first process is looked at from
the host.

Three signs, each enough: the cgroup v2 freezer (`cgroup.events`), the v1 freezer (`freezer.state`), and a
first process that is stopped by a signal (how the lab freezes, having no cgroups of its own).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Run = Callable[[Sequence[str]], bytes]
"""Runs a command on the host and returns its stdout, whatever its exit code."""

CGROUPS = "/sys/fs/cgroup"


def is_frozen(run: Run, container: int) -> bool:
    """Ask the host, in at most three commands."""
    pid = init_pid(run(["pct", "status", str(container), "--verbose"]))
    if pid is None:
        return False
    process = run(["cat", f"/proc/{pid}/stat", f"/proc/{pid}/cgroup"])
    if is_stopped(process):
        return True
    files = freezer_files(process)
    return bool(files) and says_frozen(run(["cat", *files]))


def init_pid(status: bytes) -> int | None:
    """The host's pid of the container's first process, from `pct status --verbose`."""
    found = re.search(rb"^pid: (\d+)$", status, re.MULTILINE)
    return int(found[1]) if found else None


def is_stopped(process: bytes) -> bool:
    """State T in /proc/PID/stat. The name before it may hold anything, so the last `)` counts."""
    line = process.partition(b"\n")[0]
    return line.rpartition(b")")[2].split()[:1] == [b"T"]


def freezer_files(process: bytes) -> list[str]:
    """Where the freezer of a process's cgroup shows its state, from /proc/PID/cgroup (version 2, then
    version 1)."""
    text = process.decode("utf-8", "replace")
    files = [f"{CGROUPS}{path}/cgroup.events" for path in re.findall(r"^0::(/.*)$", text, re.MULTILINE)]
    files += [
        f"{CGROUPS}/freezer{path}/freezer.state"
        for path in re.findall(r"^\d+:(?:[^:\n]*,)?freezer(?:,[^:\n]*)?:(/.*)$", text, re.MULTILINE)
    ]
    return files


def says_frozen(states: bytes) -> bool:
    """cgroup.events has a line `frozen 1` (inherited from above, too); freezer.state is one word."""
    return any(line in (b"frozen 1", b"FROZEN") for line in states.splitlines())
