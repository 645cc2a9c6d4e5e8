"""How often the kernel's OOM killer has struck in this process's memory cgroup (v2 memory.events, v1
memory.oom_control; both count the victim's own cgroup, whoever ran out of memory). See cgroup-v2.rst and
cgroup-v1/memory.rst of the kernel's documentation.
"""

from __future__ import annotations

from typing import List, Optional

ROOT = "/sys/fs/cgroup"


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
    """The `oom_kill N` line of either file."""
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdigit():
            return int(number)
    return None


def oom_kills() -> Optional[int]:
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
