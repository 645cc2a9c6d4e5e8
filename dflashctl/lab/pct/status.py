"""`pct status` and `pct list` (docs/pct.md#status)."""

from __future__ import annotations

import os

from dflashctl.lab.pct import config
from dflashctl.lab.pct.backends import Backend, backend
from dflashctl.lab.pct.errors import Die
from dflashctl.lab.pct.namespaces import start_ticks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from dflashctl.lab.pct.state import State

MIB = 1024 * 1024
DEFAULT_DISK = 4 * 1024 * MIB
_UNITS = {"": 1, "K": 1024, "M": MIB, "G": 1024 * MIB, "T": 1024 * 1024 * MIB}
# avg10 of pressure stall information; the keys come in this order in `--verbose`
_PRESSURES = (
    ("cpu", "full"),
    ("cpu", "some"),
    ("io", "full"),
    ("io", "some"),
    ("memory", "full"),
    ("memory", "some"),
)


def is_running(state: State, vmid: int) -> bool:
    """Whether the container runs. One that has no backend (only a configuration file) is stopped."""
    found = _backend(state, vmid)
    return found is not None and found.running()


def _backend(state: State, vmid: int) -> Backend | None:
    if not os.path.exists(os.path.join(state.folder, "ns", f"{vmid}.json")):
        return None
    return backend(state, vmid)


def listing(state: State, warn: Callable[[str], None]) -> str:
    """The table of `pct list`: columns padded to 10, 10, 12 and 20; nothing at all without containers."""
    rows = []
    for vmid in state.vmids():
        found = config.load(state, vmid, warn).now
        status = "running" if is_running(state, vmid) else "stopped"
        rows.append((str(vmid), status, found.get("lock"), _name(found, vmid)))
    if not rows:
        return ""
    return "".join(
        f"{vmid:<10} {status:<10} {lock:<12} {name:<20}\n"
        for vmid, status, lock, name in [("VMID", "Status", "Lock", "Name"), *rows]
    )


def _name(found: config.Config, vmid: int) -> str:
    return "".join((found.get("hostname") or f"CT{vmid}").split())


def verbose(state: State, vmid: int, found: config.Config) -> str:
    """The `key: value` lines of `pct status --verbose`, in order of the keys."""
    facts: dict[str, object] = {
        "cpus": found.get("cores") or found.get("cpulimit") or os.cpu_count() or 1,
        "disk": 0,
        "diskread": 0,
        "diskwrite": 0,
        "maxdisk": _rootfs_size(found.get("rootfs")),
        "maxmem": int(found.get("memory") or 512) * MIB,
        "maxswap": int(found.get("swap") or 0) * MIB,
        "mem": 0,
        "name": _name(found, vmid),
        "netin": 0,
        "netout": 0,
        "status": "stopped",
        "swap": 0,
        "type": "lxc",
        "uptime": 0,
        "vmid": vmid,
    }
    for key in ("lock", "tags"):
        if found.get(key):
            facts[key] = found.get(key)
    if state.version < (5, 0, 5):
        facts["cpu"] = 0  # the load since the last call in the same process: there is none
    if found.template:
        facts["template"] = 1
    running = _backend(state, vmid)
    if running is not None and running.running():
        facts["status"] = "running"
        try:
            facts.update(_running_facts(running.init_pid(), state.version))
        except Die:  # it ended meanwhile
            pass
    return "".join(f"{key}: {facts[key]}\n" for key in sorted(facts))


def _rootfs_size(rootfs: str) -> int:
    """The size= of a rootfs line in bytes; 4 GiB when it has none."""
    for part in rootfs.split(","):
        key, _, value = part.partition("=")
        number = value.rstrip("KMGT")
        if key == "size" and number.isdigit() and value[len(number) :] in _UNITS:
            return int(number) * _UNITS[value[len(number) :]]
    return DEFAULT_DISK


def _running_facts(pid: int, version: tuple[int, ...]) -> dict[str, object]:
    facts: dict[str, object] = {"pid": pid}
    try:
        disk = os.statvfs(f"/proc/{pid}/root/")
        facts["disk"] = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        facts["maxdisk"] = disk.f_blocks * disk.f_frsize
    except OSError:
        pass
    ticks = start_ticks(pid)
    if ticks is not None:
        since_boot = float(_read("/proc/uptime").split()[0])
        facts["uptime"] = int(since_boot - ticks / os.sysconf("SC_CLK_TCK"))
    folders = _cgroups(pid)
    facts["mem"] = _first_number(folders, "memory.current", "memory.usage_in_bytes")
    facts["swap"] = _first_number(folders, "memory.swap.current")
    if version >= (6, 0, 7):
        for resource, kind in _PRESSURES:
            average = _pressure(folders, resource, kind)
            if average:
                facts[f"pressure{resource}{kind}"] = average
    return facts


def _cgroups(pid: int) -> list[str]:
    """The container's own cgroup folders: those that its first process does not share with us."""
    ours = set(_read("/proc/self/cgroup").splitlines())
    folders = []
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        if line in ours or line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        roots = (
            [f"/sys/fs/cgroup/{controllers}"] if controllers else ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        )
        # The first process may sit in a cgroup of its own below the container's (LXC: .../.lxc, init.scope).
        folders += [root + path for root in roots]
    return folders


def _first_number(folders: list[str], *names: str) -> int:
    for folder in folders:
        for name in names:
            text = _read(f"{folder}/{name}").strip()
            if text.isdigit():
                return int(text)
    return 0


def _pressure(folders: list[str], resource: str, kind: str) -> str:
    """avg10 as the kernel prints it ("0.00"), of the container's cgroup, else of the machine; "" if there is
    none."""
    texts = [_read(f"{folder}/{resource}.pressure") for folder in folders] + [
        _read(f"/proc/pressure/{resource}")
    ]
    for text in texts:
        for line in text.splitlines():
            words = line.split()
            if words and words[0] == kind:
                return words[1].removeprefix("avg10=")
    return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
