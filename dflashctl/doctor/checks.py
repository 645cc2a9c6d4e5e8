"""The checks in order: from the way in to what a run imports, so that the first failure explains the rest.

`needs` names what a rule cannot judge without; where it is missing, the line is "not known" with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflashctl.config.hosts import Host
from dflashctl.doctor import (
    rules_compiler,
    rules_contact,
    rules_container,
    rules_cuda,
    rules_devices,
    rules_gpus,
    rules_place,
)
from dflashctl.doctor.facts import Facts
from dflashctl.doctor.findings import Finding, Line, Rule, not_known


@dataclass(frozen=True)
class Check:
    """One line of the report. `applies`: "" or why it makes no sense for a host."""

    name: str
    group: str
    rule: Rule
    needs: tuple[str, ...] = ()
    left_out: Callable[[Host], str] = lambda host: ""


def _no_ssh(host: Host) -> str:
    return "engine local is this machine: no ssh, and the same clock" if host.engine == "local" else ""


def _no_container(host: Host) -> str:
    return f"engine {host.engine} has no container" if host.container is None else ""


def _no_gpus(host: Host) -> str:
    return "hosts.yaml expects no GPU" if host.gpus.expect == 0 else ""


def _no_gpus_or_container(host: Host) -> str:
    return _no_gpus(host) or _no_container(host)


CHECKS = (
    Check("ssh key", "connection", rules_contact.ssh_key, left_out=_no_ssh),
    Check("known_hosts", "connection", rules_contact.known_hosts, left_out=_no_ssh),
    Check("ssh", "connection", rules_contact.ssh, left_out=_no_ssh),
    Check("host", "connection", rules_contact.host),
    Check("clock", "connection", rules_contact.clock, left_out=_no_ssh),
    Check("Proxmox", "container", rules_container.proxmox, ("box",), _no_container),
    Check("state", "container", rules_container.container, ("box",), _no_container),
    Check("freezer", "container", rules_container.frozen, ("box", "running"), _no_container),
    Check("locks", "container", rules_container.locks, ("box",), _no_container),
    Check("users", "container", rules_container.users, ("box", "running"), _no_container),
    Check("mounts", "container", rules_container.mounts, ("box",), _no_container),
    Check("driver", "devices", rules_devices.driver, ("box",), _no_gpus),
    Check("nvidia-uvm", "devices", rules_devices.uvm, ("box",), _no_gpus),
    Check("device nodes", "devices", rules_devices.nodes, ("box", "place"), _no_gpus),
    Check("device majors", "devices", rules_devices.majors, ("box", "place"), _no_gpus),
    Check("cgroup rules", "devices", rules_devices.rules, ("box",), _no_gpus_or_container),
    Check("NVML", "GPUs", rules_gpus.nvml_host, ("box",), _no_gpus),
    Check("NVML inside", "GPUs", rules_gpus.nvml_inside, ("inside",), _no_gpus_or_container),
    Check("count", "GPUs", rules_gpus.gpus, ("box", "gpus"), _no_gpus),
    Check("ECC", "GPUs", rules_gpus.ecc, ("box", "gpus"), _no_gpus),
    Check("Xid", "GPUs", rules_gpus.xid, ("box",), _no_gpus),
    Check("PCIe", "GPUs", rules_gpus.pcie, ("box", "gpus"), _no_gpus),
    Check("NVLink", "GPUs", rules_gpus.nvlink, ("box", "gpus"), _no_gpus),
    Check("P2P", "GPUs", rules_cuda.peers, ("inside",), _no_gpus),
    Check("CUDA IPC", "GPUs", rules_cuda.ipc, ("inside",), _no_gpus),
    Check("/dev/shm", "room", rules_place.shared_memory, ("place",)),
    Check("disk", "room", rules_place.disk, ("place",)),
    Check("inodes", "room", rules_place.inodes, ("place",)),
    Check("folders", "room", rules_place.folders, ("place",)),
    Check("memory", "room", rules_place.memory, ("place",)),
    Check("ulimits", "room", rules_place.limits, ("inside",)),
    Check("Python", "software", rules_cuda.python),
    Check("packages", "software", rules_cuda.packages, ("inside",)),
    Check("torch", "software", rules_cuda.torch, ("inside",)),
    Check("compiler", "software", rules_compiler.compiler, ("inside",)),
)


@dataclass(frozen=True)
class Report:
    """All lines of a box, and the checks that make no sense for it: (name, why)."""

    lines: tuple[Line, ...]
    left_out: tuple[tuple[str, str], ...]

    def of(self, status: str) -> list[Line]:
        return [line for line in self.lines if line.status == status]


def judge(facts: Facts) -> Report:
    """Pure: every check that applies, in order."""
    lines, left_out = [], []
    for check in CHECKS:
        why = check.left_out(facts.host)
        if why:
            left_out.append((check.name, why))
            continue
        missing = next((reason for need in check.needs if (reason := missing_for(facts, need))), "")
        found: Finding = not_known(missing) if missing else check.rule(facts)
        lines.append(Line(check.name, check.group, found.status, found.found, found.means, found.mend))
    return Report(tuple(lines), tuple(left_out))


def missing_for(facts: Facts, need: str) -> str:
    """Why a need is not met; "" when it is."""
    if need == "box":
        return "" if facts.box is not None else facts.box_problem
    if need == "inside":
        return "" if facts.inside is not None else facts.inside_problem
    if need == "place":
        return "" if facts.place else facts.inside_problem
    if need == "running":
        return "" if facts.running else "the container does not run"
    if need == "gpus":
        return "nvidia-smi lists none: see NVML" if facts.query.problem else ""
    raise ValueError(need)
