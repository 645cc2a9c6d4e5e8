"""What can go wrong between laptop and container: each has its own exit code and one clear message, nothing
hangs, and nothing is half-done."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from bedkit.bed import Bed
from bedkit.project import Project
from proxy import Proxy

pytestmark = pytest.mark.bed

UNREACHABLE, VERIFICATION, BUSY, KEY_CHANGED, CONTAINER_DOWN = 3, 4, 5, 11, 12


@pytest.fixture
def project(bed: Bed, tmp_path: Path) -> Project:
    project = Project(tmp_path / "project", {"bed": bed.host_entry()})
    project.write_recipe("steady")
    return project


def refused(project: Project, code: int, *args: str, within: float = 90.0) -> str:
    """Run; it must end with this exit code, one message, no traceback. Returns stderr."""
    began = time.monotonic()
    done = project.run(*args, timeout=within + 30)
    took = time.monotonic() - began
    assert done.returncode == code, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.count("error:") == 1
    assert took < within, f"took {took:.1f} s"
    return done.stderr


def nothing_inside(bed: Bed) -> bool:
    return bed.inside("main", ["ls", "-A", "/workspace"]).stdout == b""


def test_a_changed_host_key_stops_everything(bed: Bed, project: Project) -> None:
    kind, _ = (bed.layout.ssh / "host_key.pub").read_text().split()[:2]
    other = (bed.layout.ssh / "user_key.pub").read_text().split()[1]
    bed.known_hosts.write_text(f"[127.0.0.1]:{bed.port} {kind} {other}\n")
    log = bed.dir / "sshd.log"
    before = log.stat().st_size
    for verb in (["deploy"], ["gpu"], ["launch", "--tag", "t"]):
        said = refused(project, KEY_CHANGED, *verb)
        assert "SHA256:" in said and "host key" in said
    assert nothing_inside(bed)
    assert log.stat().st_size > before and b"Accepted" not in log.read_bytes()[before:], "nobody logged in"


def test_an_unknown_host_key_is_refused_and_can_be_trusted(bed: Bed, project: Project) -> None:
    bed.known_hosts.write_text("")
    said = refused(project, UNREACHABLE, "deploy")
    assert "SHA256:" in said and "dflashctl host trust bed" in said
    assert nothing_inside(bed)
    project.ok("host", "trust", "bed", "--yes")
    assert bed.known_hosts_line().split()[2] in bed.known_hosts.read_text()
    project.ok("gpu")


@pytest.mark.parametrize("verb", [["deploy"], ["launch", "--tag", "t"], ["kill", "t"], ["logs", "t"]])
def test_a_stopped_container(bed: Bed, project: Project, verb: list[str]) -> None:
    project.write_hosts({"bed": bed.host_entry("stopped")})
    said = refused(project, CONTAINER_DOWN, *verb)
    assert f"pct start {bed.ids['stopped']}" in said


@pytest.mark.parametrize("verb", [["deploy"], ["launch", "--tag", "t"], ["kill", "t"]])
def test_a_frozen_container(bed: Bed, project: Project, verb: list[str]) -> None:
    bed.freeze("main")
    said = refused(project, CONTAINER_DOWN, *verb)
    assert "frozen" in said
    bed.thaw("main")
    assert nothing_inside(bed)


def test_a_container_that_does_not_exist(bed: Bed, project: Project) -> None:
    project.write_hosts({"bed": bed.host_entry() | {"container": 998877}})
    said = refused(project, 6, "deploy")
    assert "998877" in said


def test_nobody_listens(bed: Bed, project: Project) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        project.write_hosts({"bed": bed.host_entry(port=s.getsockname()[1])})
        for verb in (["deploy"], ["launch", "--tag", "t"], ["gpu"]):
            refused(project, UNREACHABLE, *verb)


def test_a_listener_that_says_nothing(bed: Bed, project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        entry = bed.host_entry(port=silent.getsockname()[1])
        entry["ssh"]["connect_timeout_s"] = 2
        project.write_hosts({"bed": entry})
        refused(project, UNREACHABLE, "gpu")


def test_a_key_that_is_not_let_in(bed: Bed, project: Project, tmp_path: Path) -> None:
    entry = bed.host_entry()
    entry["ssh"]["identity_file"] = str(bed.layout.ssh / "host_key")
    project.write_hosts({"bed": entry})
    said = refused(project, UNREACHABLE, "deploy")
    assert "root" in said


def test_a_user_who_is_not_root(bed: Bed, project: Project) -> None:
    entry = bed.host_entry()
    entry["ssh"]["user"] = "operator"
    project.write_hosts({"bed": entry})
    done = project.run("deploy")
    assert done.returncode not in (0, 1) and "Traceback" not in done.stderr
    assert "sudo" in done.stderr, done.stderr


@pytest.mark.parametrize("where", ["early", "middle", "late"])
def test_a_line_cut_during_deploy(bed: Bed, project: Project, proxied: Proxy, where: str) -> None:
    """At three places of the conversation, measured on a whole one; then the same deploy goes through."""
    project.write_hosts({"bed": bed.host_entry(port=proxied.port)})
    (project.folder / "jobs" / "data.txt").write_text("0123456789abcdef" * 40000)
    project.ok("deploy")
    whole = proxied.moved("up")
    (project.folder / "jobs" / "data.txt").write_text("fedcba9876543210" * 40000)
    before = bed.inside("main", ["readlink", "/workspace/code/current"]).stdout
    share = {"early": 0.1, "middle": 0.5, "late": 0.9}[where]
    proxied.cut_after(int(whole * share), "up")
    refused(project, UNREACHABLE, "deploy")
    assert bed.inside("main", ["readlink", "/workspace/code/current"]).stdout == before
    proxied.rules["up"].cut_at = None
    project.ok("deploy")
    assert bed.inside("main", ["readlink", "/workspace/code/current"]).stdout != before
    assert bed.on_host(["sh", "-c", 'ls -A "$HOME"']).stdout == b"", "nothing staged is left on the host"


def test_a_slow_line_only_takes_longer(bed: Bed, project: Project, proxied: Proxy) -> None:
    project.write_hosts({"bed": bed.host_entry(port=proxied.port)})
    proxied.throttle(60000)
    proxied.delay(0.05)
    project.ok("deploy", timeout=120)


def test_a_full_disk_switches_nothing(bed: Bed, project: Project) -> None:
    project.write_hosts({"bed": bed.host_entry(code_root="/srv/small/code")})
    project.ok("deploy")
    before = bed.inside("main", ["readlink", "/srv/small/code/current"]).stdout
    (project.folder / "jobs" / "big.bin").write_bytes(random.Random(7).randbytes(9_000_000))
    said = refused(project, VERIFICATION, "deploy")
    assert "space" in said
    assert bed.inside("main", ["readlink", "/srv/small/code/current"]).stdout == before
    (project.folder / "jobs" / "big.bin").unlink()
    project.ok("deploy")


@pytest.mark.parametrize("verb", [["status"], ["runs"], ["kill", "t"], ["logs", "t"], ["deploy"]])
def test_runs_that_nobody_inside_may_look_at(bed: Bed, project: Project, verb: list[str]) -> None:
    """The folder belongs to a user of the host: root inside is not root to it."""
    bed.inside("main", ["mkdir", "-p", "/workspace/.dflashctl/runs"])
    state = bed.layout.rootfs(bed.ids["main"]) / "workspace/.dflashctl"
    bed.on_host(["sh", "-c", 'chown -R 0:0 "$1" && chmod -R go= "$1"', "sh", str(state)])
    try:
        said = refused(project, VERIFICATION, *verb)
    finally:
        bed.on_host(["rm", "-rf", str(state)])
    assert "/workspace/.dflashctl/runs" in said and "ermission denied" in said and "unmapped uid" in said


GPU_TROUBLE: list[tuple[str, Any]] = [
    ("hang", {"mode": "hang"}),
    ("lost access", {"mode": "unknown"}),
    ("mismatch", {"mode": "mismatch"}),
    ("no devices", {"mode": "nodevices"}),
]


@pytest.mark.parametrize(("name", "change"), GPU_TROUBLE, ids=[name for name, _ in GPU_TROUBLE])
def test_gpus_that_cannot_be_read_are_not_idle(
    bed: Bed, project: Project, name: str, change: dict[str, str]
) -> None:
    project.ok("deploy")
    bed.gpus(lambda box: [setattr(box, key, value) for key, value in change.items()] and None)
    refused(project, BUSY, "launch", "--tag", "t")
    bed.gpus(lambda box: setattr(box, "mode", "ok"))
    assert bed.gpu_holders() == []


@pytest.mark.parametrize("fault", ["reset", "lost", "missing"])
def test_a_broken_gpu_is_not_taken(bed: Bed, project: Project, fault: str) -> None:
    project.write_recipe("steady", gpus={"count": 8})
    project.ok("deploy")
    bed.gpus(lambda box: setattr(box.gpu(2), "fault", fault))
    refused(project, BUSY, "launch", "--tag", "t")
    project.write_recipe("steady", gpus={"count": 7})
    project.ok("deploy")
    project.ok("launch", "--tag", "t")
    end = time.monotonic() + 90
    while len(bed.gpu_holders()) < 6:
        assert time.monotonic() < end
        time.sleep(0.2)
    bed.gpus(lambda box: setattr(box.gpu(2), "fault", "none"))
    uuids = {uuid for _, uuid in bed.gpu_holders()}
    out = bed.on_host(["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]).stdout.decode()
    table = dict(line.split(", ")[::-1] for line in out.splitlines())
    assert {table[u] for u in uuids} == {"0", "1", "3", "4", "5", "6", "7"}


def test_memory_that_lingers_after_the_kill_is_waited_for(bed: Bed, project: Project) -> None:
    bed.gpus(lambda box: setattr(box, "linger_s", 3.0))
    project.write_recipe("ignores-term")
    project.ok("deploy", "-r", "ignores-term")
    project.ok("launch", "-r", "ignores-term", "--tag", "t")
    end = time.monotonic() + 90
    while not bed.gpu_holders():
        assert time.monotonic() < end
        time.sleep(0.2)
    project.ok("kill", "t")
    assert bed.gpu_memory() == [0, 0, 0, 0, 4, 0, 0, 0]
