"""Plans: what the lab's host and its containers consist of. Pure: facts in, steps and texts out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dflashctl.lab.rootfs import Step, to_json

NODE = "pve1"
CONTAINER = 200
STOPPED_CONTAINER = 201
GPU_COUNT = 8
WORKSPACE_ON_HOST = "/tank/workspace"

HOST_STATE = "/var/lib/lab"
"""Where the host sees what the laptop keeps in <lab>/node."""
PCT_STATE = f"{HOST_STATE}/pct"
GPU_STATE = f"{HOST_STATE}/gpu"

HOOK = "/opt/lab/python"
SEARCH_PATH = "/sbin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/bin"
"""The stand-ins `pct` and `nvidia-smi` are in /sbin: first here, and in the PATH that `pct exec` sets."""

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
MERGED = ("bin", "lib", "lib32", "lib64", "libx32")


@dataclass(frozen=True)
class Machine:
    """What the plans need to know of the machine."""

    links: dict[str, str]  # of MERGED and sbin: name -> text of the link, for those that are links
    folders: tuple[str, ...]  # of MERGED and sbin: those that are real folders
    extra: tuple[str, ...]  # further top folders that programs need (/nix)
    shadowed: dict[str, tuple[str, ...]]  # stand-in -> paths of a real program of that name, to be covered
    has_etc: frozenset[str]  # which of hostname, hosts exist in /etc
    resolver: str | None = None  # what /etc/resolv.conf is a link to, when that lies elsewhere


@dataclass(frozen=True)
class Python:
    """The machine's Python as the lab shows it."""

    executable: str
    interpreter: str
    folders: tuple[str, ...]
    home: str
    user_base: str | None = None
    search: tuple[str, ...] = ()  # folders of packages that have to be on PYTHONPATH


@dataclass(frozen=True)
class HostPlan:
    """All that the host's program (host.py) is told. Paths without a note are the laptop's."""

    root: str
    steps: list[dict[str, Any]]
    ssh_dir: str
    home: str  # in the lab's host
    environment: dict[str, str]  # of ssh sessions

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def look_at_machine() -> Machine:
    """The one look at the file system that the plans need."""
    tops = {name: Path("/", name) for name in (*MERGED, "sbin")}
    shadowed = {
        program: tuple(
            f"{folder}/{program}"
            for folder in ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin")
            if Path(folder, program).is_file()
        )
        for program in ("nvidia-smi", "pct", "pveversion", "init")
    }
    resolver = Path("/etc/resolv.conf").resolve()
    return Machine(
        links={name: str(path.readlink()) for name, path in tops.items() if path.is_symlink()},
        folders=tuple(name for name, path in tops.items() if path.is_dir() and not path.is_symlink()),
        extra=tuple(path for path in ("/nix", "/gnu") if Path(path).is_dir()),
        shadowed=shadowed,
        has_etc=frozenset(name for name in ("hostname", "hosts") if Path("/etc", name).is_file()),
        resolver=None if resolver.is_relative_to("/etc") else str(resolver),
    )


def system_steps(machine: Machine) -> list[Step]:
    """The read-only part that host and containers share: programs, libraries, /etc."""
    steps = [Step("bind", "/usr", "/usr", read_only=True), Step("bind", "/etc", "/etc", read_only=True)]
    steps += [Step("bind", path, path, read_only=True) for path in machine.extra]
    for name in MERGED:
        if name in machine.links:
            steps.append(Step("link", f"/{name}", machine.links[name]))
        elif name in machine.folders:
            steps.append(Step("bind", f"/{name}", f"/{name}", read_only=True))
    # A folder of its own: the stand-ins must be found by the short PATH that `pct exec` sets.
    steps.append(Step("tmpfs", "/sbin"))
    if "sbin" in machine.folders:
        steps.append(Step("bind", "/opt/lab/sbin", "/sbin", read_only=True))
        steps.append(Step("links", "/sbin", "/opt/lab/sbin"))
    elif "sbin" in machine.links:
        steps.append(Step("links", "/sbin", str(PurePosixPath("/", machine.links["sbin"]))))
    return steps


def device_steps(gpu_state: str, gpu_devices: Sequence[str]) -> list[Step]:
    """/dev: the harmless devices of the machine, and the GPUs' stand-ins."""
    steps = [Step("tmpfs", "/dev")]
    steps += [Step("bind", f"/dev/{name}", f"/dev/{name}", optional=True) for name in DEVICES]
    steps += [Step("tmpfs", "/dev/shm", mode=0o1777), Step("devpts", "/dev/pts")]
    steps += [
        Step("link", f"/dev/{name}", text)
        for name, text in (
            ("ptmx", "pts/ptmx"),
            ("fd", "/proc/self/fd"),
            ("stdin", "/proc/self/fd/0"),
            ("stdout", "/proc/self/fd/1"),
            ("stderr", "/proc/self/fd/2"),
        )
    ]
    steps += [Step("bind", f"/dev/{name}", f"{gpu_state}/dev/{name}") for name in gpu_devices]
    return steps


def stand_in_steps(program: str, source: str, machine: Machine) -> list[Step]:
    """Our `program` in /sbin, and over a real one that the machine may have."""
    return [
        Step("bind", target, source, read_only=True)
        for target in (f"/sbin/{program}", *machine.shadowed.get(program, ()))
    ]


def common_steps(
    machine: Machine, python: Python, gpu_state: str, gpu_devices: Sequence[str], etc: str
) -> list[Step]:
    """What host and containers have alike. `etc` holds the machine's own hostname and hosts files."""
    names = ("", "home", "mnt", "opt", "srv", "var/lib", "var/log", "sys")
    steps = [Step("dir", f"/{name}") for name in names]
    steps += [Step("dir", python.home, mode=0o700), Step("dir", "/root", mode=0o700)]
    steps += [Step("dir", f"/{name}", mode=0o1777) for name in ("tmp", "var/tmp")]
    steps += [Step("tmpfs", "/run"), Step("dir", "/run/lock/lxc")]
    steps += system_steps(machine)
    steps += device_steps(gpu_state, gpu_devices)
    steps += [Step("bind", "/sys", "/sys", read_only=True, optional=True), Step("proc", "/proc")]
    own = sorted(machine.has_etc)
    steps += [Step("bind", f"/etc/{name}", f"{etc}/{name}", read_only=True) for name in own]
    if machine.resolver is not None:  # names are looked up as on the machine: the network is its own
        resolver = machine.resolver
        steps.append(Step("bind", resolver, resolver, read_only=True, optional=True))
    steps += [Step("bind", folder, folder, read_only=True) for folder in python.folders]
    steps.append(Step("bind", "/run/nvidia-lab", f"{gpu_state}/rpc"))
    steps += stand_in_steps("nvidia-smi", f"{gpu_state}/bin/nvidia-smi", machine)
    return steps


def host_steps(
    machine: Machine, python: Python, *, node_dir: str, package_dir: str, gpu_devices: Sequence[str]
) -> list[Step]:
    """The lab's Proxmox host, seen from the laptop: `node_dir` becomes /var/lib/lab there."""
    steps = common_steps(machine, python, f"{node_dir}/gpu", gpu_devices, f"{node_dir}/etc/{NODE}")
    steps.append(Step("bind", HOST_STATE, node_dir))
    steps.append(Step("bind", WORKSPACE_ON_HOST, f"{node_dir}/workspace"))
    if not any(package_dir == f or package_dir.startswith(f"{f}/") for f in (*python.folders, "/usr")):
        steps.append(Step("bind", package_dir, package_dir, read_only=True))
    steps += stand_in_steps("pct", f"{node_dir}/bin/pct", machine)
    steps += stand_in_steps("pveversion", f"{node_dir}/bin/pveversion", machine)
    steps.append(Step("link", "/sbin/python3", python.interpreter))
    return steps


def container_spec(
    vmid: int, machine: Machine, python: Python, *, package_dir: str, gpu_devices: Sequence[str]
) -> dict[str, Any]:
    """`ns/<vmid>.json`: how container.start makes this container. Sources are paths of the lab's host."""
    hostname = f"ct{vmid}"
    # Everything was bound read-only on the host already; nested mounts keep that.
    steps = [Step("dir", "/workspace")]
    steps += common_steps(machine, python, GPU_STATE, gpu_devices, f"{HOST_STATE}/etc/{hostname}")
    steps.append(Step("bind", HOOK, f"{package_dir}/lab/gpu/hook", read_only=True))
    steps += stand_in_steps("init", f"{package_dir}/lab/init.py", machine)
    if vmid == CONTAINER:
        steps.append(Step("bind", "/workspace", WORKSPACE_ON_HOST))
    return {
        "version": 1,
        "backend": "userns",
        "hostname": hostname,
        "rootfs": f"{HOST_STATE}/disk/{vmid}",
        "init_python": python.interpreter,
        "home": python.home,
        "steps": to_json(steps),
    }


def container_conf(vmid: int, gpu_devices: Sequence[str]) -> str:
    """`/etc/pve/lxc/<vmid>.conf` as Proxmox would show it for such a container."""
    lines = {
        "arch": "amd64",
        "cores": "8",
        "hostname": f"ct{vmid}",
        "memory": "131072",
        "onboot": "1",
        "ostype": "debian",
        "rootfs": f"local-zfs:subvol-{vmid}-disk-0,size=200G",
        "swap": "0",
        "unprivileged": "1",
    }
    if vmid == CONTAINER:
        lines["mp0"] = f"{WORKSPACE_ON_HOST},mp=/workspace"
    lines |= {f"dev{n}": f"/dev/{name}" for n, name in enumerate(gpu_devices)}
    return "".join(f"{key}: {value}\n" for key, value in sorted(lines.items()))


def pct_settings() -> dict[str, Any]:
    """`pct.json`: which Proxmox this is."""
    return {"version": 1, "node": NODE, "pve": 9, "startup_delay_s": 0.0, "lock_dir": "/run/lock/lxc"}


def pct_wrapper(interpreter: str, package_parent: str, module: str = "cli") -> str:
    """/sbin/pct on the lab's host: the strict stand-in, in a Python that takes nothing from its caller. Or
    another program of dflashctl.lab.pct: `module` has its main()."""
    load = f"from dflashctl.lab.pct.{module} import main"
    code = f"import sys; sys.path.append({package_parent!r}); {load}; main()"
    return (
        f"#!/bin/sh\nexport DFLASHCTL_PCT_STATE={PCT_STATE}\n"
        f'exec {shlex.quote(interpreter)} -I -S -c {shlex.quote(code)} "$@"\n'
    )


def session_environment(home: str) -> dict[str, str]:
    """What an ssh session on the lab's host starts with."""
    shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
    return {
        "PATH": SEARCH_PATH,
        "HOME": home,
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": shell,
        "LANG": "C.UTF-8",
    }


def hosts_file(hostname: str) -> str:
    return f"127.0.0.1\tlocalhost\n127.0.1.1\t{hostname}\n::1\tlocalhost ip6-localhost ip6-loopback\n"


def to_text(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"
