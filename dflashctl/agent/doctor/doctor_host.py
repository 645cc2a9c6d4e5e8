"""What `doctor` wants to know of the machine that owns the GPUs, and of the container as seen from there.

Nothing is changed. All programs are started at once, each with a deadline. The container is looked at through
/proc, which answers while it is frozen, too.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any, Dict, List, Optional

from ..gpus.hostfacts import REAP_S, begin, end
from ..processes import proc
from ..releases import hostlock
from ..releases.pctlock import holder_words, holders
from ..runs.environment import driver
from .doctor_place import CGROUPS, nodes, place, resolve, text_of

SIMULATED = "/run/nvidia-lab/control"
"""Where this fifo is, the GPUs are the lab's."""

PCT_LOCK = "/run/lock/lxc/pve-config-%d.lock"
HIDDEN_JOURNAL = "You are currently not seeing messages"
LAST_LINES = 200
Facts = Dict[str, Any]


def doctor_host(request: Facts, emit: Any) -> Facts:
    """request: container|null, python, code_root, staging_dir, paths, program_timeout_s (20).

    Emits {"clock": wall time} at once. Answers {"boot_id", "kernel", "uid", "simulated",
    "proxmox": reading|null, "smi", "topo": readings, "kernel_log": {"lines", "from", "problem"}, "driver",
    "majors": {name: number}, "nodes", "libraries", "memory_total", "staging": folder,
    "python": {"exists", "broken", "other"}, "deploy_lock": record|null,
    "container": null | see `container_facts`}; a reading is that of hostfacts.
    """
    emit({"clock": time.time()})
    timeout_s = float(request.get("program_timeout_s") or 20.0)
    # Where an ssh user's PATH leaves them out.
    os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    container = request.get("container")
    programs: Dict[str, List[str]] = {
        "smi": ["nvidia-smi", "-q"],
        "topo": ["nvidia-smi", "topo", "-m"],
        "journal": ["journalctl", "-k", "-b", "--no-pager", "-o", "short-iso", "-g", "NVRM"],
        "dmesg": ["dmesg"],
    }
    if container is not None:
        programs["proxmox"] = ["pveversion"]
        programs["status"] = ["pct", "status", str(container), "--verbose"]
        programs["config"] = ["pct", "config", str(container), "--current=1"]
    started = {name: begin(argv) for name, argv in programs.items()}
    until = time.monotonic() + timeout_s
    readings = {name: end(each, max(until - time.monotonic(), REAP_S)) for name, each in started.items()}
    here = place("", [str(request["staging_dir"])])
    return {
        "boot_id": proc.boot_id(),
        "kernel": os.uname().release,
        "uid": os.getuid(),
        "simulated": os.path.exists(SIMULATED),
        "proxmox": readings.get("proxmox"),
        "smi": readings["smi"],
        "topo": readings["topo"],
        "kernel_log": kernel_log(readings["journal"], readings["dmesg"]),
        "driver": driver(),
        "majors": majors(text_of("/proc/devices")),
        "nodes": nodes(""),
        "libraries": here["libraries"],
        "memory_total": here["memory"]["total"],
        "staging": here["folders"][0],
        "python": interpreter("", str(request["python"])),
        "deploy_lock": hostlock.holder(deploy_lock(request)),
        "container": None if container is None else container_facts(int(container), request, readings),
    }


def container_facts(container: int, request: Facts, readings: Facts) -> Facts:
    """{"status", "config": readings, "binds": [{"key", "source", "target", "holds_staging"}],
    "lock_holders": text, "init": null | see `first_process`}."""
    config = readings["config"]["stdout"] if readings["config"]["exit"] == 0 else ""
    lock = PCT_LOCK % container
    return {
        "status": readings["status"],
        "config": readings["config"],
        "binds": binds(config, str(request["staging_dir"])),
        "lock_holders": holder_words(lock) if holders(lock) else "",
        "init": first_process(readings["status"]["stdout"], request),
    }


def first_process(status: str, request: Facts) -> Optional[Facts]:
    """The container through its first process, whose pid `pct status --verbose` tells: {"pid", "stat",
    "freezer": words of its freezers, "uid_map", "place", "python"}."""
    found = re.search(r"^pid: (\d+)$", status, re.MULTILINE)
    if found is None:
        return None
    pid = found[1]
    root = "/proc/%s/root" % pid
    cgroup = text_of("/proc/%s/cgroup" % pid)
    return {
        "pid": int(pid),
        "stat": text_of("/proc/%s/stat" % pid),
        "freezer": "".join(text_of(path) for path in freezer_files(cgroup)),
        "uid_map": text_of("/proc/%s/uid_map" % pid),
        "place": place(root, [str(path) for path in request["paths"]], pid),
        "python": interpreter(root, str(request["python"])),
    }


def freezer_files(cgroup: str) -> List[str]:
    """Where the freezers of a process's groups show their state; the caller reads their words."""
    found = []
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            found += [top + path + "/cgroup.events" for top in (CGROUPS, CGROUPS + "/unified")]
        elif "freezer" in controllers.split(","):
            found.append(CGROUPS + "/freezer" + path + "/freezer.state")
    return found


def interpreter(root: str, path: str) -> Facts:
    """{"exists": the configured one is there, "broken": what its name is instead, or "" for nothing at all,
    "other": another Python of the place, or null}."""
    there = [name for name in (path, "/usr/bin/python3", "/usr/local/bin/python3") if _program(root, name)]
    return {
        "exists": path in there,
        "broken": "" if path in there else _instead(root, path),
        "other": next((name for name in there if name != path), None),
    }


def _instead(root: str, path: str) -> str:
    """Of a name that is no program: a link into nothing (a venv whose Python is gone), or what."""
    try:
        folder, real = resolve(root, os.path.dirname(path)), resolve(root, path)
    except OSError as error:
        return "cannot be followed: %s" % error.strerror
    if os.path.isdir(real):
        return "is a folder"
    if os.path.exists(real):
        return "is not executable"
    target = real[len(root) :]
    return (
        ""
        if real == os.path.join(folder, os.path.basename(path))
        else "leads to %s, which is not there" % target
    )


def _program(root: str, path: str) -> bool:
    try:
        real = resolve(root, path)
        return os.path.isfile(real) and os.access(real, os.X_OK)
    except OSError:
        return False


def binds(config: str, staging: str) -> List[Facts]:
    """Folders of the host that `pct config` mounts inside: mpN with a path, and lxc.mount.entry with bind.

    `holds_staging`: the staging folder is the same folder, or lies in it.
    """
    found = []
    for line in config.splitlines():
        key, _, value = line.partition(":")
        value = value.strip()
        if re.fullmatch(r"mp\d+", key) and value.startswith("/"):
            source, _, options = value.partition(",")
            target = dict(each.partition("=")[::2] for each in options.split(",")).get("mp", "")
        elif key == "lxc.mount.entry" and "bind" in value and not value.startswith("/dev/"):
            words = value.split()
            source, target = words[0], "/" + words[1].lstrip("/") if len(words) > 1 else ""
        else:
            continue
        found.append(
            {"key": key, "source": source, "target": target, "holds_staging": _within(staging, source)}
        )
    return found


def _within(path: str, top: str) -> bool:
    """By inode: a folder that is mounted twice has two names."""
    try:
        wanted = os.stat(top)
        at = os.path.realpath(path)
        while True:
            if os.path.exists(at) and os.path.samestat(os.stat(at), wanted):
                return True
            if at == "/":
                return False
            at = os.path.dirname(at)
    except OSError:
        return False


def majors(devices: str) -> Dict[str, int]:
    """/proc/devices -> {"nvidia-uvm": 508, ...}: the numbers that the loaded modules have."""
    characters = devices.partition("Block devices:")[0]
    return {
        name: int(number) for number, name in re.findall(r"^\s*(\d+) (nvidia\S*)$", characters, re.MULTILINE)
    }


def kernel_log(journal: Facts, dmesg: Facts) -> Facts:
    """{"lines": NVRM's, the last ones, "from", "problem": why none could be read}: the journal of this boot,
    else the kernel's buffer, which forgets."""
    if journal["problem"] is None and not journal["exit"] and HIDDEN_JOURNAL not in journal["stderr"]:
        return {"lines": _of_driver(journal["stdout"]), "from": "journalctl", "problem": None}
    # journalctl -g exits with 1 when nothing matches; it says so on stdout or not at all.
    if journal["exit"] == 1 and not journal["stderr"].strip():
        return {"lines": [], "from": "journalctl", "problem": None}
    if dmesg["exit"] == 0:
        return {"lines": _of_driver(dmesg["stdout"]), "from": "dmesg", "problem": None}
    said = dmesg["stderr"].strip() or "dmesg: %s" % (dmesg["problem"] or "exit code %s" % dmesg["exit"])
    return {"lines": [], "from": None, "problem": said}


def _of_driver(text: str) -> List[str]:
    return [line[:500] for line in text.splitlines() if "NVRM" in line][-LAST_LINES:]


def deploy_lock(request: Facts) -> str:
    """The lock file of this code root, whether or not it is there."""
    name = hostlock.lock_name(request.get("container"), str(request["code_root"]))
    return os.path.join(hostlock.folder_name(), name)
