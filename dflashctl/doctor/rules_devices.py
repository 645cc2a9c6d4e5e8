"""The way of a GPU into the container: driver, libraries, device nodes, their numbers and rules. Pure."""

from __future__ import annotations

from dflashctl.doctor.facts import Facts
from dflashctl.doctor.findings import Finding, failure, not_known, ok
from dflashctl.runs.facts import listed, mapping, text, whole

NEEDED = ("nvidiactl", "nvidia-uvm")
"""Beside one node for each GPU. nvidia-smi needs the first, CUDA both."""

FRONTENDS = ("nvidia", "nvidia-frontend")
"""How /proc/devices names the driver of nvidiaN and nvidiactl."""
SIMULATED = "simulated GPUs: plain files"


def driver(facts: Facts) -> Finding:
    """The kernel's module against the libraries that programs load."""
    loaded = text(mapping(facts.box).get("driver")) or facts.query.driver
    if not loaded:
        if facts.box is not None and not facts.host_nodes:
            mend = (
                "install the NVIDIA driver on the host; a box without GPUs: gpus: {expect: 0} in hosts.yaml"
            )
            return failure("no NVIDIA driver is loaded", "no program can use a GPU", mend)
        return not_known("the loaded driver's version could not be read")
    on_host = _versions(mapping(mapping(facts.box).get("libraries")))
    if on_host and loaded not in on_host:
        return failure(
            f"driver {loaded} is loaded, but the host's libraries are of {', '.join(on_host)}",
            "it was updated underneath: programs end with `Driver/library version mismatch`",
            "reboot the host, or unload and load the nvidia modules when nothing uses a GPU",
        )
    if not facts.place:
        return not_known(f"driver {loaded} is loaded; the libraries inside: {facts.inside_problem}")
    inside = _versions(mapping(facts.place.get("libraries")))
    if inside and loaded not in inside:
        return failure(
            f"driver {loaded} is loaded on the host, the libraries inside are of {', '.join(inside)}",
            "CUDA and nvidia-smi inside end with `Driver/library version mismatch`",
            f"in the container: install the libraries of {loaded} (its .run file with --no-kernel-module)",
        )
    if facts.simulated:
        return ok(f"{loaded} ({SIMULATED})")
    if not inside:
        return failure(
            f"driver {loaded} is loaded, but no libcuda.so and libnvidia-ml.so are installed for runs",
            "CUDA cannot start: `libcuda.so.1: cannot open shared object file`",
            f"install the libraries of {loaded} there (its .run file with --no-kernel-module)",
        )
    missing = {"cuda", "nvidia-ml"} - set(mapping(facts.place.get("libraries")))
    if missing:
        names = " and ".join(f"lib{name}.so" for name in sorted(missing))
        mend = f"install all libraries of {loaded} there (its .run file with --no-kernel-module)"
        return failure(f"{names} is missing beside the others of {loaded}", "CUDA cannot start", mend)
    return ok(f"{loaded}, and the libraries that runs load are the same")


def _versions(libraries: object) -> list[str]:
    found = mapping(libraries)
    return sorted({text(each) for versions in found.values() for each in listed(versions)})


def nodes(facts: Facts) -> Finding:
    """/dev/nvidia*: there, real, and allowed."""
    inside = {text(each.get("name")): each for each in facts.nodes}
    on_host = {text(each.get("name")): each for each in facts.host_nodes}
    numbered = sorted((name for name in on_host if name[6:].isdecimal()), key=lambda name: int(name[6:]))
    wanted = [*numbered, *(name for name in NEEDED if name in on_host or not facts.simulated)]
    missing = [name for name in wanted if name not in inside]
    if missing:
        return failure(
            f"missing where runs live: {', '.join(f'/dev/{name}' for name in missing)}",
            "those GPUs, or CUDA altogether, cannot be used there",
            _pass_through(facts, missing),
        )
    false = [name for name in wanted if inside[name].get("kind") != "char"]
    if false and not facts.simulated:
        return failure(
            f"no device, but a plain file: {', '.join(f'/dev/{name}' for name in false)}",
            "the host's node was missing when the container started, and create=file made an empty one",
            f"on the host: nvidia-modprobe -u -c=0, then pct reboot {facts.host.container}",
        )
    closed = [name for name in wanted if inside[name].get("usable") is False]
    if closed:
        return failure(
            f"may not be opened: {', '.join(f'/dev/{name}' for name in closed)}",
            "`Failed to initialize NVML: Unknown Error`, or no access to those GPUs",
            "let a rule allow their major number (see cgroup rules), and give them mode 0666",
        )
    if not wanted:
        return not_known("there is no /dev/nvidia* on the machine that owns the GPUs")
    kind = f" ({SIMULATED})" if facts.simulated else ""
    others = [name for name in wanted if name not in numbered]
    return ok(f"{', '.join([f'{len(numbered)} GPU nodes', *others])}{kind}")


def _pass_through(facts: Facts, names: list[str]) -> str:
    vmid = facts.host.container
    if vmid is None:
        return "nvidia-modprobe -u -c=0 makes them; nvidia-persistenced keeps them"
    return f"on the host: pct set {vmid} -devN /dev/{names[0]} (one devN for each), then pct reboot {vmid}"


def rules(facts: Facts) -> Finding:
    """Whether control groups let the container open each device that it is given."""
    if facts.config is None:
        return not_known("the container's configuration could not be read")
    if facts.simulated:
        return ok(f"none needed ({SIMULATED})")
    majors = {text(each.get("name")): whole(each.get("major")) for each in facts.host_nodes}
    allowed = [rule for rule in facts.config.rules if rule.version == 2 and rule.write]
    denied = {
        name: major
        for name, major in majors.items()
        if name in facts.config.mounted - facts.config.granted
        and not any(rule.major in (None, major) for rule in allowed)
    }
    vmid = facts.host.container
    if denied:
        numbers = sorted({number for number in denied.values() if number is not None})
        lines = "; ".join(f"lxc.cgroup2.devices.allow: c {number}:* rwm" for number in numbers)
        old = any(rule.version == 1 for rule in facts.config.rules)
        note = " (lxc.cgroup.devices.allow has no effect on this host)" if old else ""
        return failure(
            f"no rule allows {', '.join(f'/dev/{name} (major {denied[name]})' for name in denied)}{note}",
            "`Failed to initialize NVML: Unknown Error` inside, though the nodes are there",
            f"in /etc/pve/lxc/{vmid}.conf of the host: {lines}; or devN entries; then pct reboot {vmid}",
        )
    given = facts.config.granted | facts.config.mounted
    if not given:
        mend = f"on the host: pct set {vmid} -dev0 /dev/nvidia0, and so on for each of its nodes"
        return failure("no GPU is given to the container", "it has no device nodes of its own", mend)
    return ok(f"{len(given)} device nodes are given to it, and all may be opened")


def majors(facts: Facts) -> Finding:
    """Numbers of the nodes that runs see against those that the driver has now."""
    if facts.simulated:
        return ok(f"none ({SIMULATED})")
    if not facts.majors:
        return not_known("/proc/devices of the host names no nvidia driver")
    current = {name: facts.majors[name] for name in FRONTENDS if name in facts.majors}
    frontend = next(iter(current.values()), None)
    stale = []
    for each in facts.nodes:
        name, major = text(each.get("name")), whole(each.get("major"))
        expected = facts.majors.get("nvidia-uvm") if name.startswith("nvidia-uvm") else frontend
        if name.startswith(("nvidia-caps", "nvidia-modeset")) or major is None or expected is None:
            continue
        if major != expected:
            stale.append(f"/dev/{name} has {major}, the driver {expected}")
    if stale:
        return failure(
            "; ".join(stale),
            "the driver was given another number at the last boot: opening the node reaches nothing",
            f"on the host: use devN entries, which are made anew at each start; then pct reboot"
            f" {facts.host.container}",
        )
    return ok(", ".join(f"{name} {number}" for name, number in sorted(facts.majors.items())))


def uvm(facts: Facts) -> Finding:
    """The module without which nvidia-smi works and CUDA does not."""
    if facts.simulated:
        return ok(f"not needed ({SIMULATED})")
    mend = "on the host: modprobe nvidia-uvm && nvidia-modprobe -u -c=0, at each boot before containers start"
    means = "nvidia-smi works, but CUDA does not: `CUDA unknown error`"
    if "nvidia-uvm" not in facts.majors:
        return failure("the module nvidia-uvm is not loaded on the host", means, mend)
    if not any(text(each.get("name")) == "nvidia-uvm" for each in facts.host_nodes):
        return failure("it is loaded, but the host has no /dev/nvidia-uvm", means, mend)
    if facts.place and not any(text(each.get("name")) == "nvidia-uvm" for each in facts.nodes):
        return failure("runs have no /dev/nvidia-uvm", means, _pass_through(facts, ["nvidia-uvm"]))
    return ok(f"loaded, major {facts.majors['nvidia-uvm']}")
