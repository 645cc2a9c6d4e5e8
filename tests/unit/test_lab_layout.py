"""The plans of the lab's host and containers, as plain data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import PurePosixPath

import pytest

from dflashctl.lab import layout, ns, rootfs
from dflashctl.lab.layout import Machine, Python

MERGED_MACHINE = Machine(
    links={"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "sbin": "usr/sbin"},
    folders=(),
    extra=(),
    shadowed={"nvidia-smi": (), "pct": ()},
    has_etc=frozenset({"hostname", "hosts"}),
)
SPLIT_MACHINE = Machine(
    links={},
    folders=("bin", "lib", "lib64", "sbin"),
    extra=("/nix",),
    shadowed={"nvidia-smi": ("/usr/bin/nvidia-smi",), "pct": ("/usr/sbin/pct",)},
    has_etc=frozenset(),
    resolver="/run/systemd/resolve/stub-resolv.conf",
)
PYTHON = Python(
    "/home/ann/v/bin/python", "/home/ann/.uv/p/bin/python3", ("/home/ann/v", "/home/ann/.uv/p"), "/root"
)
DEVICES = [f"nvidia{n}" for n in range(8)] + ["nvidiactl"]


def container(machine: Machine, vmid: int = 200) -> dict:
    return layout.container_spec(
        vmid, machine, PYTHON, package_dir="/home/ann/src/dflashctl", gpu_devices=DEVICES
    )


def host(machine: Machine) -> list[rootfs.Step]:
    return layout.host_steps(
        machine,
        PYTHON,
        node_dir="/home/ann/.local/state/dflashctl/lab/node",
        package_dir="/home/ann/src/dflashctl",
        gpu_devices=DEVICES,
    )


@pytest.mark.parametrize("machine", [MERGED_MACHINE, SPLIT_MACHINE])
def test_a_container_shows_nothing_of_a_home_but_python(machine: Machine) -> None:
    targets = [step["target"] for step in container(machine)["steps"] if step["op"] == "bind"]
    assert [t for t in targets if t.startswith("/home/ann")] == list(PYTHON.folders)
    sources = {
        step["source"] for step in container(machine)["steps"] if step["source"].startswith("/home/ann")
    }
    package = {"/home/ann/src/dflashctl/lab/gpu/hook", "/home/ann/src/dflashctl/lab/init.py"}
    assert sources == {*PYTHON.folders, *package}


@pytest.mark.parametrize("machine", [MERGED_MACHINE, SPLIT_MACHINE])
def test_what_is_the_machines_is_read_only(machine: Machine) -> None:
    writable = {"/dev", "/var/lib/lab", "/tank/workspace", "/workspace", "/run/nvidia-lab"}
    for steps in (host(machine), rootfs.from_json(container(machine)["steps"])):
        for step in steps:
            if step.op == "bind" and not step.read_only:
                assert any(PurePosixPath(step.target).is_relative_to(place) for place in writable), step


def test_stand_ins_cover_real_programs_of_the_machine() -> None:
    bound = {step.target: step.source for step in host(SPLIT_MACHINE) if step.op == "bind"}
    for program in ("/sbin/nvidia-smi", "/usr/bin/nvidia-smi"):
        assert bound[program].endswith("/gpu/bin/nvidia-smi")
    for program in ("/sbin/pct", "/usr/sbin/pct"):
        assert bound[program].endswith("/bin/pct")
    order = [step.target for step in host(SPLIT_MACHINE)]
    assert order.index("/usr") < order.index("/usr/bin/nvidia-smi")


def test_names_are_looked_up_as_on_the_machine() -> None:
    for steps in (host(SPLIT_MACHINE), rootfs.from_json(container(SPLIT_MACHINE)["steps"])):
        targets = [step.target for step in steps]
        assert targets.index("/run") < targets.index("/run/systemd/resolve/stub-resolv.conf")
    assert not [s for s in host(MERGED_MACHINE) if "resolv" in s.target]


def test_sbin_is_a_folder_that_leads_to_the_machines() -> None:
    steps = [step for step in host(MERGED_MACHINE) if step.target == "/sbin"]
    assert [(s.op, s.source) for s in steps] == [("tmpfs", ""), ("links", "/usr/sbin")]
    steps = [step for step in host(SPLIT_MACHINE) if step.target in ("/sbin", "/opt/lab/sbin")]
    assert [(s.op, s.source) for s in steps] == [
        ("tmpfs", ""),
        ("bind", "/sbin"),
        ("links", "/opt/lab/sbin"),
    ]


def test_a_folder_is_filled_after_what_it_lies_in() -> None:
    for steps in (host(SPLIT_MACHINE), rootfs.from_json(container(SPLIT_MACHINE)["steps"])):
        mounted = [s.target for s in steps if s.op in ("bind", "tmpfs", "proc", "devpts")]
        for index, target in enumerate(mounted):
            assert not [
                t for t in mounted[index + 1 :] if PurePosixPath(target).is_relative_to(t) and t != target
            ]


def test_a_spec_survives_json() -> None:
    spec = json.loads(layout.to_text(container(MERGED_MACHINE)))
    assert rootfs.from_json(spec["steps"]) == rootfs.from_json(container(MERGED_MACHINE)["steps"])
    assert (spec["backend"], spec["hostname"], spec["rootfs"]) == ("userns", "ct200", "/var/lib/lab/disk/200")


def test_the_configuration_is_proxmox_like() -> None:
    lines = layout.container_conf(200, DEVICES).splitlines()
    assert lines == sorted(lines)
    for line in (
        "hostname: ct200",
        "unprivileged: 1",
        "mp0: /tank/workspace,mp=/workspace",
        "dev0: /dev/nvidia0",
    ):
        assert line in lines
    assert not [line for line in layout.container_conf(201, DEVICES).splitlines() if line.startswith("mp0")]


def test_the_package_is_shown_on_the_host_only_where_python_does_not_hold_it() -> None:
    assert "/home/ann/src/dflashctl" in [step.target for step in host(MERGED_MACHINE)]
    inside = "/home/ann/v/lib/python3.11/site-packages/dflashctl"
    steps = layout.host_steps(MERGED_MACHINE, PYTHON, node_dir="/n", package_dir=inside, gpu_devices=DEVICES)
    assert inside not in [step.target for step in steps]


def test_the_pct_wrapper_survives_odd_paths(tmp_path) -> None:
    parent = tmp_path / "it's a $HOME `dir`"
    package = parent / "dflashctl/lab/pct"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "cli.py").write_text(
        "import os, sys\n"
        "def main():\n"
        "    print(sys.argv[1:], os.environ['DFLASHCTL_PCT_STATE'])\n"
        "    sys.exit(3)\n"
    )
    wrapper = tmp_path / "pct"
    wrapper.write_text(layout.pct_wrapper(sys.executable, str(parent)))
    done = subprocess.run(
        ["sh", str(wrapper), "exec", "a b", "$x", ""], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == "['exec', 'a b', '$x', ''] /var/lib/lab/pct\n"


def test_mountinfo_names_the_mounts_below_a_place_with_their_options() -> None:
    text = (
        "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "31 22 0:5 / /usr ro,nosuid,nodev - ext4 /dev/vdb rw\n"
        "32 31 0:6 / /usr/lo\\040cal rw,noexec,relatime shared:1 - tmpfs x rw\n"
        "33 22 0:7 / /usr2 rw - tmpfs x rw\n"
    )
    assert ns.mounts_below(text, "/usr") == [
        ("/usr", ["ro", "nosuid", "nodev"]),
        ("/usr/lo cal", ["rw", "noexec", "relatime"]),
    ]
    assert len(ns.mounts_below(text, "/")) == 4
