"""How often the kernel's OOM killer has struck: in this process's memory cgroup (v2 memory.events, v1
memory.oom_control; both count the victim's own cgroup, whoever ran out of memory), and on the whole machine
(/proc/vmstat, which containers see as it is). See cgroup-v2.rst and cgroup-v1/memory.rst of the kernel's
documentation; the machine's counter is there since Linux 4.13.
"""

from __future__ import annotations

from typing import Dict, List, Optional

ROOT = "/sys/fs/cgroup"
VMSTAT = "/proc/vmstat"

Counts = Dict[str, Optional[int]]
"""`container` and `machine`: OOM kills so far; None where nobody counts them."""


def candidates(cgroup: str, root: str = ROOT) -> List[str]:
    """Files to look at, best first, for the text of /proc/self/cgroup. Inside a container the path may be
    relative to a root that is not mounted, so the mount's own top comes last."""
    found = []
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            found += [root + path.rstrip("/") + "/memory.events", root + "/memory.events"]
            found += [root + "/unified" + path.rstrip("/") + "/memory.events"]  # hybrid: v2 beside v1
        elif "memory" in controllers.split(","):
            top = root + "/memory"
            found += [top + path.rstrip("/") + "/memory.oom_control", top + "/memory.oom_control"]
    return found


def parse(text: str) -> Optional[int]:
    """The `oom_kill N` line of any of these files."""
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdigit():
            return int(number)
    return None


def oom_kills() -> Counts:
    return {"container": _in_cgroup(), "machine": _on_machine()}


def during(before: Counts, after: Counts) -> Counts:
    """What was counted between two looks; None where either knows nothing."""
    found: Counts = {}
    for name, first in before.items():
        last = after[name]
        found[name] = None if first is None or last is None else max(last - first, 0)
    return found


def _on_machine() -> Optional[int]:
    try:
        with open(VMSTAT) as file:
            return parse(file.read())
    except OSError:
        return None


def _in_cgroup() -> Optional[int]:
    """None where no such file can be read (a machine's root cgroup has none)."""
    try:
        with open("/proc/self/cgroup") as file:
            paths = candidates(file.read())
    except OSError:
        return None
    for path in paths:
        try:
            with open(path) as file:
                count = parse(file.read())
        except OSError:
            continue
        if count is not None:
            return count
    return None
