"""What the bed's host consists of: folders, mounts, servers. Pure: paths in, steps for hostinit.py out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .containers import Container, python_folders
from .rootfs import ID_BASE

NODES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OPERATOR, OPERATOR_UID = "operator", 64321
"""A user of the bed's host who is not root."""

Step = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """Where things are below the bed's folder `top`, which every user can search."""

    top: Path

    @property
    def gpu(self) -> Path:
        return self.top / "gpu"

    @property
    def lxc(self) -> Path:
        return self.top / "lxc"

    @property
    def upper(self) -> Path:
        """In the bed's namespace a tmpfs: all that containers write."""
        return self.top / "upper"

    @property
    def dev(self) -> Path:
        return self.top / "dev"

    @property
    def bin(self) -> Path:
        return self.top / "bin"

    @property
    def ssh(self) -> Path:
        return self.top / "ssh"

    @property
    def home(self) -> Path:
        return self.top / "home"

    @property
    def operator_home(self) -> Path:
        return self.top / "operator"

    @property
    def shared(self) -> Path:
        """Bound as /srv/host in each container: one inode on both sides."""
        return self.top / "shared"

    @property
    def pct(self) -> Path:
        return self.top / "pct"

    def rootfs(self, vmid: int) -> Path:
        return self.lxc / str(vmid) / "rootfs"


def container_steps(layout: Layout, ct: Container, vmid: int, tree: Path) -> list[Step]:
    """The container's file system: its tree below an overlay, and what it sees of the host."""
    owner = ID_BASE if ct.unprivileged else 0
    upper, work = layout.upper / f"{vmid}-data", layout.upper / f"{vmid}-work"
    root = layout.rootfs(vmid)
    options = f"lowerdir={tree},upperdir={upper},workdir={work}"
    steps: list[Step] = [
        {"op": "mkdir", "to": str(upper), "uid": owner},
        {"op": "mkdir", "to": str(work)},
        {"op": "mkdir", "to": str(root)},
        {"op": "overlay", "to": str(root), "options": options},
        {"op": "bind", "from": str(layout.gpu / "rpc"), "to": f"{root}/run/nvidia-lab", "uid": owner},
        {
            "op": "bind",
            "from": str(layout.gpu / "bin/nvidia-smi"),
            "to": f"{root}/usr/bin/nvidia-smi",
            "ro": True,
        },
        {"op": "bind", "from": str(layout.shared), "to": f"{root}/srv/host", "uid": owner},
    ]
    if ct.laptop_python:
        steps += [
            {"op": "bind", "from": folder, "to": f"{root}{folder}", "ro": True, "uid": owner}
            for folder in python_folders()
        ]
    return steps


def device_steps(layout: Layout, devices: list[Path]) -> list[Step]:
    """A /dev of its own for the host, so that /dev/nvidiaN exist there and on no other bed."""
    dev = layout.dev
    steps: list[Step] = [{"op": "mkdir", "to": str(dev)}, {"op": "tmpfs", "to": str(dev)}]
    steps += [{"op": "bind", "from": f"/dev/{n}", "to": f"{dev}/{n}"} for n in (*NODES, "pts", "shm")]
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    steps += [{"op": "symlink", "from": target, "to": f"{dev}/{name}"} for name, target in links.items()]
    steps += [{"op": "bind", "from": str(d), "to": f"{dev}/{d.name}"} for d in devices]
    return [*steps, {"op": "bind", "from": str(dev), "to": "/dev"}]


def run_steps(layout: Layout) -> list[Step]:
    """A /run of its own: locks of LXC and sshd's folder are not shared with the machine."""
    return [
        {"op": "tmpfs", "to": "/run"},
        *({"op": "mkdir", "to": f"/run/{name}"} for name in ("sshd", "lock", "lock/lxc")),
        {"op": "bind", "from": str(layout.gpu / "rpc"), "to": "/run/nvidia-lab"},
    ]


def host_steps(layout: Layout, trees: list[tuple[Container, int, Path]], devices: list[Path]) -> list[Step]:
    """All of it, in order."""
    steps: list[Step] = [
        {"op": "mkdir", "to": str(layout.upper), "mode": 0o711},
        {"op": "tmpfs", "to": str(layout.upper), "options": "mode=711,size=4g"},
    ]
    for ct, vmid, tree in trees:
        steps += container_steps(layout, ct, vmid, tree)
    steps += device_steps(layout, devices)
    steps += [
        {"op": "bind", "from": str(layout.top / "etc" / name), "to": f"/etc/{name}", "ro": True}
        for name in ("passwd", "subuid", "subgid")
    ]
    return [*steps, *run_steps(layout)]


def sshd_config(layout: Layout, port: int) -> str:
    """A real sshd as a Proxmox host runs it, but on loopback, with keys of its own, and a PATH that has the
    stand-ins first."""
    path = f"{layout.bin}:{PATH}"
    return f"""\
Port {port}
ListenAddress 127.0.0.1
HostKey {layout.ssh}/host_key
PidFile {layout.ssh}/sshd.pid
AuthorizedKeysFile {layout.ssh}/authorized_keys
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 200:30:400
MaxSessions 64
UseDNS no
Subsystem sftp internal-sftp
SetEnv PATH={path} HOME={layout.home}
Match User {OPERATOR}
    SetEnv PATH={path} HOME={layout.operator_home}
"""
