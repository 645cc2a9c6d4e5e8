"""`dflashctl doctor` on the lab: what is wrong with it is told, whatever else is.

Faults that do not hide each other are made at once: each look costs a Python of its own on either side.
"""

from __future__ import annotations

import ctypes.util
import glob
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from lab_client import on_host
from unproven import did_not_run

from dflashctl.config import load_hosts
from dflashctl.doctor.checks import CHECKS, Report, judge
from dflashctl.doctor.document import DoctorDocument
from dflashctl.doctor.findings import Line
from dflashctl.doctor.gather import gather
from dflashctl.lab.state import LabPaths, Record
from dflashctl.remote.connection import SshConnection

if TYPE_CHECKING:
    from life_kit import Project

pytestmark = pytest.mark.lab

MAX_COMMANDS = 6


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every command that goes over ssh, by its first word."""
    made: list[str] = []
    real = SshConnection.run

    def counted(self: Any, argv: Any, **how: Any) -> Any:
        made.append(argv[0])
        return real(self, argv, **how)

    monkeypatch.setattr(SshConnection, "run", counted)
    return made


@pytest.fixture
def bare_python(lab_paths: LabPaths, lab: Record) -> Iterator[str]:
    """The lab's Python without any package, so that no test waits for torch. Its path inside."""
    path = lab_paths.workspace / "bare-python"
    script(path, f'exec {lab.endpoint.python} -S "$@"')
    yield f"/workspace/{path.name}"
    path.unlink()


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def write_hosts(project: Project, **entry: Any) -> None:
    hosts = {"version": 1, "defaults": {"host": "lab"}, "hosts": {"lab": {"engine": "lab", **entry}}}
    (project.root / "hosts.yaml").write_text(yaml.safe_dump(hosts))


def examined(project: Project, said: Callable[[str], None] = lambda what: None, **entry: Any) -> Report:
    write_hosts(project, **entry)
    return judge(gather(load_hosts(project.root).host("lab"), said))


def lines(report: Report) -> dict[str, Line]:
    return {each.name: each for each in report.lines}


def files(*tops: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder below, with what tells a change."""
    found = {}
    for top in tops:
        for path in top.rglob("*"):
            info = path.lstat()
            found[str(path)] = (info.st_mtime_ns, info.st_size)
    return found


def test_a_lab_that_is_well_and_nothing_of_it_changes(
    project: Project, commands: list[str], lab_paths: LabPaths
) -> None:
    told: list[str] = []
    parts = (lab_paths.host_root, lab_paths.disk(200), lab_paths.workspace, lab_paths.pct)
    before = files(*parts)
    report = examined(project, told.append)
    assert files(*parts) == before
    assert report.left_out == () and len(report.lines) == len(CHECKS)
    # What the machine below has too little of may be told; the lab itself is well.
    machine = {
        "ssh",
        "/dev/shm",
        "disk",
        "inodes",
        "memory",
        "ulimits",
        "Python",
        "packages",
        "torch",
        "compiler",
        "Xid",
    }
    found = {name: (each.status, each.found) for name, each in lines(report).items() if name not in machine}
    not_known = {name for name, (status, _) in found.items() if status == "not known"}
    assert not_known == {"P2P", "CUDA IPC"}, found
    assert {status for status, _ in found.values()} == {"ok", "not known"}, found
    assert "simulated" in lines(report)["P2P"].found
    assert lines(report)["packages"].found.startswith("torch ")
    assert commands.count("python3") == commands.count("pct") == 1
    assert len(commands) <= MAX_COMMANDS, "the others look at the freezer while the container is silent"
    assert told[0] == "connecting" and "looking inside" in told


def test_faults_of_the_box_are_told_each_in_its_line(
    project: Project, lab_paths: LabPaths, bare_python: str
) -> None:
    def harm(box: Any) -> None:
        box.gpu(6).fault = "missing"
        box.gpu(2).ecc_volatile_uncorrectable = 3
        box.gpu(1).fields = {"pcie.link.width.current": "8"}
        box.gpu(4).xid = [79]

    project.gpus(harm)
    conf = lab_paths.pct / "conf" / "200.conf"
    sound = conf.read_text()
    conf.write_text("lock: backup\n" + sound)
    write_hosts(project, python=bare_python, staging_dir="/tank/workspace")
    try:
        done = project.run("doctor", "--json", code=4)
    finally:
        conf.write_text(sound)
    document = DoctorDocument.model_validate(json.loads(done.stdout))
    found = {each.name: each for each in document.lines}
    bad = {each.name: each.status for each in document.lines if each.status in ("warning", "failure")}
    assert (
        bad.items()
        >= {
            "locks": "warning",
            "mounts": "failure",
            "count": "failure",
            "ECC": "failure",
            "Xid": "failure",
            "PCIe": "warning",
            "packages": "failure",
            "torch": "failure",
        }.items()
    )
    assert "lock: backup" in found["locks"].found and "pct unlock 200" in found["locks"].mend
    assert "7 of 8 GPUs" in found["count"].found
    assert "GPU 2: 3 uncorrectable errors" in found["ECC"].found
    assert "recovery of GPU 4" in found["Xid"].found
    assert "GPU 1: x8 of x16" in found["PCIe"].found
    assert "the first being: mounts" in done.stderr and "next: set staging_dir" in done.stderr
    counts = document.counts
    assert counts.ok + counts.warning + counts.failure + counts.not_known == len(CHECKS)


@pytest.mark.parametrize(
    ("mode", "where", "host_line", "inside_line"),
    [
        ("mismatch", "everywhere", "version mismatch", "version mismatch"),
        ("unknown", "container", "8 GPUs", "the host's is fine"),
    ],
)
def test_a_driver_that_fails(
    project: Project, bare_python: str, mode: str, where: str, host_line: str, inside_line: str
) -> None:
    def harm(box: Any) -> None:
        box.mode, box.mode_at = mode, where

    project.gpus(harm)
    found = lines(examined(project, python=bare_python))
    inside = found["NVML inside"]
    assert host_line in found["NVML"].found and inside_line in f"{inside.found}\n{inside.means}"
    assert inside.status == "failure"
    assert found["ECC"].status == ("ok" if where == "container" else "not known")


def test_a_frozen_container(project: Project, lab: Record, commands: list[str]) -> None:
    freezer(lab, "freeze")
    try:
        found = lines(examined(project))
    finally:
        freezer(lab, "thaw")
    assert found["freezer"].status == "failure" and "pct resume 200" in found["freezer"].mend
    assert found["state"].status == "ok"
    assert found["torch"].status == "not known" and "is frozen" in found["torch"].found
    for name in ("users", "mounts", "NVML", "count", "device nodes", "/dev/shm", "disk", "memory"):
        assert found[name].status != "not known", found[name]
    assert len(commands) == 1, "nothing is sent into it"


def test_a_stopped_container(project: Project, commands: list[str]) -> None:
    found = lines(examined(project, container=201))
    assert found["state"].status == "failure" and found["state"].mend == "on the host: pct start 201"
    assert found["torch"].found == "container 201 is stopped"
    for name in ("Proxmox", "locks", "mounts", "NVML", "count", "NVLink"):
        assert found[name].status == "ok", found[name]
    assert len(commands) == 1


def test_an_old_proxmox_and_a_small_shared_memory(
    project: Project, lab_paths: LabPaths, bare_python: str
) -> None:
    settings = lab_paths.pct / "pct.json"
    sound = settings.read_text()
    settings.write_text(json.dumps(json.loads(sound) | {"pve": 7}))
    project.inside("mount -t tmpfs -o size=1m tmpfs /dev/shm")
    try:
        found = lines(examined(project, python=bare_python))
    finally:
        project.inside("umount /dev/shm")
        settings.write_text(sound)
    assert (found["Proxmox"].status, found["/dev/shm"].status) == ("warning", "failure")
    assert "1.0 MiB" in found["/dev/shm"].found


def test_a_python_that_is_not_there(project: Project) -> None:
    found = lines(examined(project, python="/opt/none/bin/python"))
    assert found["Python"].status == "failure" and "there is no /opt/none/bin/python" in found["Python"].found
    assert "python3 -m venv /opt/none" in found["Python"].mend
    assert found["torch"].status == "not known"
    assert found["ulimits"].status != "not known", "another Python of the container told the rest"


def test_a_clock_that_is_wrong_inside(project: Project, lab_paths: LabPaths, lab: Record) -> None:
    libraries = [*glob.glob("/usr/lib/*/faketime/libfaketime.so.1"), ctypes.util.find_library("faketime")]  # noqa: PTH207
    library = next((path for path in libraries if path), None)
    if library is None:
        did_not_run("a wrong clock. apt install libfaketime")
    path = lab_paths.workspace / "late-python"
    fake = f"LD_PRELOAD={library} FAKETIME=-2h DONT_FAKE_MONOTONIC=1 FAKETIME_DONT_FAKE_MONOTONIC=1"
    script(path, f'{fake} exec {lab.endpoint.python} -S "$@"')
    try:
        found = lines(examined(project, python="/workspace/late-python"))["clock"]
    finally:
        path.unlink()
    # Certain is only what is left when the whole wait for the answer is taken off.
    assert found.status == "failure", found
    assert re.search(r"the container's clock is (1h5\dm|2h00m) behind", found.found), found


def freezer(lab: Record, what: str) -> None:
    code = (
        f"sys.argv = ['freezer', S, '200', '{what}']\n"
        "import runpy\nrunpy.run_module('dflashctl.lab.pct.outside', run_name='__main__')"
    )
    done = on_host(lab.endpoint, code)
    assert done.returncode == 0, done.stderr
