"""Who holds the configuration lock of a container: the kernel's list of locks, read on the host."""

from __future__ import annotations

import os
from typing import List

from ..processes import proc


def holder_words(path: str) -> str:
    """`pid 4711: vzdump 200`, for each holder; `unknown` when it cannot be seen. The lock is never removed:
    it is Proxmox's."""
    found = []
    for pid in holders(path):
        words = " ".join(proc.cmdline(pid)) or "?"
        found.append("pid %d: %s" % (pid, words[:120]))
    return ", ".join(found) or "unknown"


def holders(path: str) -> List[int]:
    """Pids with a granted flock on the file. Lines of /proc/locks: `1: FLOCK ADVISORY WRITE 4711 fd:00:123 0
    EOF` (`->` marks one that waits)."""
    try:
        info = os.stat(path)
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    place = "%02x:%02x:%d" % (os.major(info.st_dev), os.minor(info.st_dev), info.st_ino)
    pids = []
    for line in lines:
        words = line.split()
        if (
            len(words) > 5
            and words[1] != "->"
            and words[5] == place
            and words[4].isdigit()
            and int(words[4]) > 0
        ):
            pids.append(int(words[4]))
    return pids
