"""Is a container frozen? `pct status` calls a frozen one running, so its first process is looked at from
the host.

Three signs, each enough: the cgroup v2 freezer (`cgroup.events`), the v1 freezer (`freezer.state`), and a
first process that is stopped by a signal (how the lab freezes, having no cgroups of its own).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Run = Callable[[Sequence[str]], bytes]
"""Runs a command on the host and returns its stdout, whatever its exit code."""

# One command, because each costs a round trip and a start on a host that may be busy. lxc-info answers in a
# hundredth of a second and `pct status`, a Perl program of some size, in about one: it is asked where the
# first one does not know the container (the lab, an LXC path of another kind).
SCRIPT = """\
pid=$(lxc-info -n "$1" -p -H 2>/dev/null) || pid=$(pct status "$1" --verbose | sed -n 's/^pid: //p')
case $pid in ''|*[!0-9]*) exit 0 ;; esac
cat "$2/$pid/stat"
while IFS=: read -r number controllers path; do
  case $number:,$controllers, in
    0:,,) cat "$3$path/cgroup.events" ;;
    *,freezer,*) cat "$3/freezer$path/freezer.state" ;;
  esac
done <"$2/$pid/cgroup"
"""


def is_frozen(run: Run, container: int, *, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> bool:
    """Ask the host."""
    said = run(["sh", "-c", SCRIPT, "sh", str(container), proc, cgroups])
    return is_stopped(said) or says_frozen(said)


def is_stopped(stat: bytes) -> bool:
    """State T in /proc/PID/stat, the first line. The name before it may hold anything, so the last `)`
    counts."""
    line = stat.partition(b"\n")[0]
    return line.rpartition(b")")[2].split()[:1] == [b"T"]


def says_frozen(states: bytes) -> bool:
    """cgroup.events has a line `frozen 1` (inherited from above, too); freezer.state is one word."""
    return any(line in (b"frozen 1", b"FROZEN") for line in states.splitlines()[1:])
