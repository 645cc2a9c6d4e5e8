"""What the bed's containers are, as data: which system, which rights, which mounts, and their LXC
configuration."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from .rootfs import ID_BASE, ID_COUNT

SUITES = ("bookworm", "trixie")


@dataclass(frozen=True)
class Container:
    """One container of the bed. `offset` is added to the bed's first id (200 for the first bed on a
    machine)."""

    role: str
    offset: int
    suite: str
    include: tuple[str, ...] = ()
    unprivileged: bool = True
    starts: bool = True
    laptop_python: bool = False
    memory_mib: int = 512

    @property
    def hostname(self) -> str:
        return f"bed-{self.role}"


def laptop_suite() -> str:
    """The Debian suite whose C library runs this machine's Python: its own, or bookworm elsewhere."""
    try:
        lines = Path("/etc/os-release").read_text().splitlines()
    except OSError:
        return SUITES[0]
    codename = dict(line.split("=", 1) for line in lines if "=" in line).get("VERSION_CODENAME", "")
    return codename if codename in SUITES else SUITES[0]


def needs_own_python() -> bool:
    """A system Python lives in /usr, which a container has of its own: then it installs the same one."""
    return Path(sys.base_prefix).resolve() == Path("/usr")


def standard() -> tuple[Container, ...]:
    """`main`: as Proxmox makes them, with the laptop's own Python and packages. `newer`: privileged, Debian
    trixie with Python 3.13. `bare`: no Python at all. `stopped`: never started."""
    own = ("python3",) if needs_own_python() else ()
    return (
        Container("main", 0, laptop_suite(), own, laptop_python=True, memory_mib=2048),
        Container("newer", 1, "trixie", ("python3",), unprivileged=False),
        Container("bare", 2, "bookworm"),
        Container("stopped", 3, "bookworm", starts=False),
    )


def python_folders() -> list[str]:
    """Folders of this machine that a container needs in order to run this very Python, outermost first."""
    wanted = [Path(sys.prefix)]
    if not needs_own_python():
        wanted += [
            Path(sys.base_prefix),
            Path(sys.base_prefix).resolve(),
            Path(sys.executable).resolve().parents[1],
        ]
    kept: list[Path] = []
    for folder in sorted(set(wanted), key=lambda p: len(p.parts)):
        if not any(folder.is_relative_to(other) for other in kept):
            kept.append(folder)
    return [str(p) for p in kept]


def lxc_config(ct: Container, vmid: int, rootfs: Path, devices: list[Path], cgroup_v1: bool) -> str:
    """LXC's configuration file. The mounts below rootfs are made beforehand (plan.py); those in /dev must
    come after LXC has put its own file system there."""
    lines = [
        f"lxc.uts.name = {ct.hostname}",
        f"lxc.rootfs.path = dir:{rootfs}",
        "lxc.net.0.type = empty",
        "lxc.apparmor.profile = unconfined",
        "lxc.tty.max = 0",
        "lxc.pty.max = 64",
        "lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed",
        "lxc.init.cmd = /sbin/ctinit",
        "lxc.environment = TERM=linux",
        f"lxc.cgroup.dir.container = lxc/{vmid}",
        f"lxc.cgroup.dir.monitor = lxc.monitor/{vmid}",
        "lxc.cgroup.dir.container.inner = ns",
        "lxc.mount.entry = tmpfs srv/small tmpfs size=8m,mode=777 0 0",
    ]
    limit = ct.memory_mib << 20
    lines.append(
        f"lxc.cgroup.memory.limit_in_bytes = {limit}" if cgroup_v1 else f"lxc.cgroup2.memory.max = {limit}"
    )
    if ct.unprivileged:
        lines += [f"lxc.idmap = {kind} 0 {ID_BASE} {ID_COUNT}" for kind in "ug"]
    lines += [f"lxc.mount.entry = {d} dev/{d.name} none bind,create=file 0 0" for d in devices]
    return "\n".join(lines) + "\n"


def pve_config(ct: Container, vmid: int, shared: Path) -> str:
    """The container's configuration as Proxmox keeps it and `pct config` shows it."""
    values = {
        "arch": "amd64",
        "cores": "8",
        "hostname": ct.hostname,
        "memory": str(ct.memory_mib),
        "mp0": f"{shared},mp=/srv/host",
        "ostype": "debian",
        "rootfs": f"local-lvm:vm-{vmid}-disk-0,size=64G",
        "swap": "0",
    }
    if ct.unprivileged:
        values["unprivileged"] = "1"
    return "".join(f"{key}: {value}\n" for key, value in sorted(values.items()))
