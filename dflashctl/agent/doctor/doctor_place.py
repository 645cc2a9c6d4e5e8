"""What a place offers a run: its folders, /dev, /dev/shm, driver libraries and memory. No judgement.

Read from inside (root ""), or for a container from its host through /proc/PID/root, which answers also
while the container is frozen. A container's files are a stranger's: from the host no link leads out of its
root, and nothing in it is opened.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import Any, Dict, List, Optional

from ..processes import oom

MAX_LINKS = 40
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/lib",
)
LIBRARY = re.compile(r"lib(?P<name>cuda|nvidia-ml)\.so\.(?P<version>\d{3}\.\d+(?:\.\d+)*)")
CGROUPS = "/sys/fs/cgroup"
NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2**63 where version 2 writes `max`."""


def place(root: str, paths: List[str], pid: str = "self") -> Dict[str, Any]:
    """{"folders": [folder], "shm": folder, "nodes": [node], "libraries": {name: [version]}, "memory": {...}}.

    `pid` is a process of the place: its control group tells the memory limit.
    """
    return {
        "folders": [folder(root, path) for path in paths],
        "shm": folder(root, "/dev/shm"),
        "nodes": nodes(root),
        "libraries": libraries(root),
        "memory": memory(text_of("/proc/%s/cgroup" % pid), inside=not root),
    }


def resolve(root: str, path: str) -> str:
    """Where `path` of this root really is, links followed as a process in there would. Raises OSError."""
    if not root:
        return os.path.realpath(path)
    rest = [part for part in path.split("/") if part][::-1]
    done: List[str] = []
    links = 0
    while rest:
        part = rest.pop()
        if part in (".", ".."):
            done = done[:-1] if part == ".." else done
            continue
        try:
            target = os.readlink("/".join([root, *done, part]))
        except OSError:  # no link, or nothing there
            done.append(part)
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        done = [] if target.startswith("/") else done
        rest += [each for each in target.split("/") if each][::-1]
    return "/".join([root, *done])


def folder(root: str, path: str) -> Dict[str, Any]:
    """{"path", "exists", "at": nearest existing parent, "uid", "mode", "writable": bool|null (from outside),
    "read_only", "size", "free" (bytes for us), "inodes", "inodes_free", "device"} or {"path", "problem"}."""
    try:
        at = path
        while not os.path.exists(resolve(root, at)) and at != "/":
            at = os.path.dirname(at)
        real = resolve(root, at)
        info, room = os.stat(real), os.statvfs(real)
    except OSError as error:
        return {"path": path, "problem": error.strerror or str(error)}
    return {
        "path": path,
        "exists": at == path,
        "at": at,
        "uid": info.st_uid,
        "mode": stat.S_IMODE(info.st_mode),
        "writable": None if root else os.access(real, os.W_OK),
        "read_only": bool(room.f_flag & os.ST_RDONLY),
        "size": room.f_blocks * room.f_frsize,
        "free": room.f_bavail * room.f_frsize,
        "inodes": room.f_files,
        "inodes_free": room.f_favail,
        "device": info.st_dev,
    }


def nodes(root: str) -> List[Dict[str, Any]]:
    """Everything named nvidia* in /dev: {"name", "kind": char|file|other, "major", "minor", "usable": may be
    opened for reading and writing, null from outside}."""
    found = []
    for name in _names(root, "/dev"):
        if not name.startswith("nvidia"):
            continue
        try:
            path = os.path.join(resolve(root, "/dev"), name)
            info = os.lstat(path)
        except OSError:
            continue
        if stat.S_ISDIR(info.st_mode) or stat.S_ISLNK(info.st_mode):
            continue
        char = stat.S_ISCHR(info.st_mode)
        found.append(
            {
                "name": name,
                "kind": "char" if char else "file" if stat.S_ISREG(info.st_mode) else "other",
                "major": os.major(info.st_rdev) if char else None,
                "minor": os.minor(info.st_rdev) if char else None,
                "usable": None if root else os.access(path, os.R_OK | os.W_OK),
            }
        )
    return found


def libraries(root: str) -> Dict[str, List[str]]:
    """Versions in the names of libcuda.so.N and libnvidia-ml.so.N, where the loader looks."""
    found: Dict[str, List[str]] = {}
    for folder_name in LIBRARY_FOLDERS:
        for name in _names(root, folder_name):
            match = LIBRARY.fullmatch(name)
            if match and match["version"] not in found.setdefault(match["name"], []):
                found[match["name"]].append(match["version"])
    return found


def memory(cgroup: str, inside: bool) -> Dict[str, Any]:
    """{"limit", "used", "oom_kills", "total": MemTotal, seen from inside}, bytes or null.

    `cgroup` is /proc/PID/cgroup. The tightest limit of that group and those above counts; from inside, those
    above the mount cannot be seen.
    """
    limits, used, kills = [], None, None
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            tops = [CGROUPS, CGROUPS + "/unified"]
            names = ("memory.max", "memory.current", "memory.events")
        elif "memory" in controllers.split(","):
            tops = [CGROUPS + "/memory"]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
        else:
            continue
        for top in tops:
            for group in _upwards(path):
                limit = _number(text_of(top + group + "/" + names[0]))
                if limit is None or limit >= NO_LIMIT:
                    continue
                limits.append(limit)
                if limit == min(limits):
                    used = _number(text_of(top + group + "/" + names[1]))
                    kills = oom.parse(text_of(top + group + "/" + names[2]))
    meminfo = text_of("/proc/meminfo") if inside else ""
    total = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    return {
        "limit": min(limits) if limits else None,
        "used": used,
        "oom_kills": kills,
        "total": int(total[1]) * 1024 if total else None,
    }


def _upwards(path: str) -> List[str]:
    """/lxc/200/ns -> /lxc/200/ns, /lxc/200, /lxc, "" (the mount's own top)."""
    found = []
    while path.strip("/"):
        found.append(path.rstrip("/"))
        path = os.path.dirname(path.rstrip("/"))
    return [*found, ""]


def _number(text: str) -> Optional[int]:
    return int(text) if text.strip().isdigit() else None


def _names(root: str, path: str) -> List[str]:
    try:
        return sorted(os.listdir(resolve(root, path)))
    except OSError:
        return []


def text_of(path: str) -> str:
    """A file of the kernel's, "" when it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
