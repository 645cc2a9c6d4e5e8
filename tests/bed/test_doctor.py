"""`dflashctl doctor` on real LXC containers behind a real sshd: each fault in its line.

Run: python -m pytest tests/bed/test_doctor.py (root)
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bedkit.bed import Bed
from bedkit.project import Project

from dflashctl.doctor.checks import CHECKS
from dflashctl.doctor.document import DoctorDocument, LinePart

pytestmark = pytest.mark.bed

NAMES = {check.name for check in CHECKS}
FAILED = 4


@pytest.fixture
def project(bed: Bed, tmp_path: Path) -> Project:
    return Project(tmp_path / "project", {"bed": bed.host_entry()})


def bare_python(bed: Bed) -> str:
    """main's Python without any package, so that no test waits for torch. Its path inside."""
    text = f'#!/bin/sh\nexec {sys.executable} -S "$@"\n'
    argv = ["sh", "-c", "cat > /workspace/bare-python && chmod 755 /workspace/bare-python"]
    bed.inside("main", argv, input=text.encode())
    return "/workspace/bare-python"


def examine(project: Project, code: int = FAILED, **entry: Any) -> dict[str, LinePart]:
    """`doctor --json` of a host with this entry: {name: line}."""
    project.write_hosts({"bed": entry})
    done = project.run("doctor", "--json", timeout=120)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr
    if code:
        assert done.stderr.count("error:") == 1
    document = DoctorDocument.model_validate(json.loads(done.stdout))
    assert {line.name for line in document.lines} == NAMES and document.left_out == []
    return {line.name: line for line in document.lines}


def test_an_unprivileged_container_with_torch(bed: Bed, project: Project) -> None:
    """LXC gives it a /dev/shm of half a MiB; all else of it is well."""
    found = examine(project, **bed.host_entry())
    machine = {
        "ssh",
        "disk",
        "inodes",
        "ulimits",
        "Xid",
    }  # what the machine below has is not the bed's to say
    bad = {name for name, line in found.items() if line.status in ("failure", "warning")} - machine
    assert bad == {"/dev/shm"}, found
    assert "root in it is uid 100000 on the host" in found["users"].found
    assert f"{bed.layout.shared} is /srv/host inside" in found["mounts"].found
    assert found["Proxmox"].found == "Proxmox VE 9.0.0"
    assert "build for CPUs" in found["torch"].found and found["torch"].status == "ok"
    assert "at most" in found["memory"].found, "the limit is seen from the host"


def test_faults_of_the_container(bed: Bed, project: Project) -> None:
    """Many at once: none hides another."""
    vmid = bed.ids["main"]
    conf = bed.layout.pct / "conf" / f"{vmid}.conf"
    sound = conf.read_text()
    library = "/usr/lib/x86_64-linux-gnu/libcuda.so.570.86.10"
    make = f"mkdir -p /dev/shm; mount -t tmpfs -o size=2g tmpfs /dev/shm; touch {library}"
    bed.inside("main", ["sh", "-c", make])
    bed.inside("main", ["sh", "-c", "head -c 7500000 /dev/zero > /srv/small/full"])
    (bed.layout.shared / "foreign").mkdir(mode=0o755)
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
    fake = bed.layout.bin / "journalctl"
    fake.write_text(f"#!/bin/sh\necho '2026-11-30T08:00:00+0000 pve1 kernel: {xid}'\n")
    fake.chmod(0o755)
    bed.pct(pve=7)
    conf.write_text("lock: backup\n" + sound.replace("unprivileged: 1\n", ""))
    lock = f"/run/lock/lxc/pve-config-{vmid}.lock"
    holder = hold(bed, lock)
    entry = bed.host_entry(python=bare_python(bed), log_dir="/srv/small", workdir="/srv/host/foreign")
    try:
        found = examine(project, **entry, staging_dir=str(bed.layout.shared))
    finally:
        holder.communicate(timeout=60)
        conf.write_text(sound)
        fake.unlink()
        bed.inside("main", ["sh", "-c", f"umount /dev/shm; rmdir /dev/shm; rm {library}"])
    status = {name: line.status for name, line in found.items()}
    wanted = {
        "Proxmox": "warning",
        "locks": "warning",
        "users": "failure",
        "mounts": "failure",
        "driver": "failure",
        "Xid": "failure",
        "disk": "failure",
        "folders": "failure",
        "packages": "failure",
        "NVML": "ok",
        "count": "ok",
        "ECC": "ok",
        "/dev/shm": "ok",
    }
    assert {name: status[name] for name in wanted} == wanted, found
    assert "lock: backup" in found["locks"].found and "held by pid" in found["locks"].found
    assert "says privileged" in found["users"].found
    assert "570.86.10" in found["driver"].found
    assert "Xid 79" in found["Xid"].found
    assert "/srv/small" in found["disk"].found
    assert "/srv/host/foreign" in found["folders"].found and "100000" in found["folders"].mend


def hold(bed: Bed, lock: str) -> subprocess.Popen[bytes]:
    """A process of the bed's host that holds a lock file, as a running `pct` does, until its stdin ends."""
    enter = ["nsenter", "-t", str(bed.pid), "--mount", "--pid", "--uts", "--"]
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2)"
    code += "; print('held', flush=True); sys.stdin.read()"
    argv = [sys.executable, "-I", "-c", code, lock]
    made = subprocess.Popen([*enter, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert made.stdout is not None and made.stdout.readline() == b"held\n"
    return made


def test_a_privileged_container_with_little_memory(bed: Bed, project: Project) -> None:
    """Its Python is the system's, newer, and has no torch."""
    found = examine(project, **bed.host_entry("newer"))
    assert found["users"].status == "warning" and "root in it is root" in found["users"].found
    assert found["memory"].status == "failure" and "512 MiB at most" in found["memory"].found
    assert "Python 3.13" in found["Python"].found and found["packages"].status == "failure"


def test_a_container_without_python_is_told_from_its_host(bed: Bed, project: Project) -> None:
    found = examine(project, **bed.host_entry("bare"))
    assert found["Python"].status == "failure" and "there is no /usr/bin/python3" in found["Python"].found
    for name in ("users", "mounts", "device nodes", "/dev/shm", "disk", "inodes", "NVML", "count"):
        assert found[name].status != "not known", found[name]
    assert found["torch"].status == "not known" and "another Python" in found["torch"].found


def test_frozen_and_stopped(bed: Bed, project: Project) -> None:
    bed.freeze("main")
    frozen = examine(project, **bed.host_entry())
    bed.thaw("main")
    assert frozen["freezer"].status == "failure" and "is frozen" in frozen["torch"].found
    known = {name for name, line in frozen.items() if line.status != "not known"}
    assert known >= {"users", "mounts", "locks", "device nodes", "NVML", "/dev/shm", "disk", "memory"}
    stopped = examine(project, **bed.host_entry("stopped"))
    assert stopped["state"].status == "failure"
    assert stopped["state"].mend == f"on the host: pct start {bed.ids['stopped']}"
    assert stopped["NVML"].status == "ok" and stopped["disk"].status == "not known"


def test_a_device_that_the_container_has_lost(bed: Bed, project: Project) -> None:
    bed.inside("newer", ["umount", "/dev/nvidia5"])
    bed.inside("newer", ["rm", "-f", "/dev/nvidia5"])
    try:
        found = examine(project, **bed.host_entry("newer"))
    finally:
        bed.stop("newer")  # the next start mounts it again: see Bed.reset
    assert found["device nodes"].status == "failure" and "/dev/nvidia5" in found["device nodes"].found
    assert found["count"].status == "failure" and "not seen inside: GPU 5" in found["count"].found


def test_an_unknown_key_and_a_user_without_rights(bed: Bed, project: Project) -> None:
    entry = bed.host_entry()
    entry["ssh"]["user"] = "operator"
    found = examine(project, **entry)
    assert found["state"].status == "failure" and "ssh.sudo" in found["state"].mend
    bed.known_hosts.write_text("")
    found = examine(project, **bed.host_entry())
    assert found["known_hosts"].status == "failure" and "host trust bed" in found["known_hosts"].mend
    assert found["ssh"].status == "not known" and found["NVML"].status == "not known"
