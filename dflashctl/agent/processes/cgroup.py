"""A control group of a run's own (cgroup v2), where one can be made: then its family is known for certain,
whatever it forks, and ends at one stroke (`cgroup.kill`, Linux 5.14), forks and all.

Where none can be made (v1 alone, a read-only mount, not root) the family is found by other marks as well, see
kin.family. Nothing is limited here and no controller is enabled, so memory is still counted above. Files:
cgroup-v2.rst of the kernel's documentation.
"""

from __future__ import annotations

import os
from typing import List, Optional

PREFIX = "dflash-"


def own_group(mountinfo: str, cgroup: str) -> Optional[str]:
    """The folder of this process's group, from the texts of /proc/self/mountinfo and /proc/self/cgroup; None
    without cgroup v2, or where the group lies outside what is mounted."""
    path = next((line[3:] for line in cgroup.splitlines() if line.startswith("0::")), None)
    if path is None or "/.." in path:
        return None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        words = left.split()
        if right.split()[:1] == ["cgroup2"] and len(words) > 4:
            root, at = words[3], words[4]
            if root == "/":
                return at + path.rstrip("/")
            if path == root or path.startswith(root + "/"):
                return at + path[len(root) :]
    return None


def make(run_id: str) -> Optional[str]:
    """A new group for a run, below our own; None where that cannot be."""
    try:
        with open("/proc/self/mountinfo") as mounts, open("/proc/self/cgroup") as mine:
            above = own_group(mounts.read(), mine.read())
        if above is None:
            return None
        path = os.path.join(above, PREFIX + run_id)
        os.mkdir(path, 0o755)
    except OSError:
        return None
    return path


def enter(path: Optional[str]) -> None:
    """Move this process in; between fork and exec, so that nothing of the program is ever outside."""
    _tell(path, "cgroup.procs", b"0")


def is_ours(path: object, run_id: str) -> bool:
    """Does a record name the group of this run, and no other folder?"""
    return isinstance(path, str) and os.path.basename(path) == PREFIX + run_id


def pids(path: Optional[str]) -> List[int]:
    """Everybody in it and below it, as this pid namespace counts; [] where there is no such group."""
    found = []
    for folder, _, _ in os.walk(path or ""):
        try:
            with open(os.path.join(folder, "cgroup.procs")) as file:
                found += [int(word) for word in file.read().split() if word != "0"]
        except (OSError, ValueError):
            continue
    return found


def populated(path: Optional[str]) -> bool:
    """Is anybody alive in it? The kernel counts, so this is right also about what forks and goes faster than
    a process table can be read."""
    try:
        with open(os.path.join(path or "", "cgroup.events")) as file:
            return path is not None and "populated 1" in file.read()
    except OSError:
        return False


def kill(path: Optional[str]) -> bool:
    """SIGKILL to everybody in it at once; False where that cannot be done."""
    return _tell(path, "cgroup.kill", b"1")


def _tell(path: Optional[str], file: str, word: bytes) -> bool:
    """Write to a file of the group; False where that cannot be done."""
    if path is None:
        return False
    try:
        descriptor = os.open(os.path.join(path, file), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, word)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def remove(path: Optional[str]) -> None:
    """Once nobody is in it; with what the program made below."""
    for folder, _, _ in os.walk(path or "", topdown=False):
        try:
            os.rmdir(folder)
        except OSError:
            pass
