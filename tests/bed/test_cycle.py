"""The daily commands over the bed: the real command line, real ssh, pct and LXC; judged by what the bed
itself says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bedkit.bed import Bed
from bedkit.project import Project

pytestmark = pytest.mark.bed


@pytest.fixture
def project(bed: Bed, tmp_path: Path) -> Project:
    """A laptop's project with the recipe `steady`, whose default host is container `main`."""
    project = Project(tmp_path / "project", {"bed": bed.host_entry()})
    project.write_recipe("steady")
    return project


def wait_for(what: Callable[[], object], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"did not become true within {seconds} s"
        time.sleep(0.1)


def state(project: Project, tag: str) -> str:
    [run] = project.json("status", tag)["runs"]
    return str(run["state"])


def deployed_and_launched(project: Project, kind: str, *args: str, tag: str = "t", **recipe: object) -> str:
    project.write_recipe(kind, *args, **recipe)  # type: ignore[arg-type]
    project.ok("deploy", "-r", kind)
    project.ok("launch", "-r", kind, "--tag", tag)
    return tag


def test_deploy_launch_status_logs_kill(bed: Bed, project: Project) -> None:
    project.write_recipe("steady", gpus={"ids": [5, 6]})
    deploy = project.ok("deploy")
    assert "jobs/job.py" in deploy.stdout and "switched" in deploy.stdout
    current = bed.inside("main", ["readlink", "/workspace/code/current"]).stdout.decode()
    release = current.strip().rsplit("/", 1)[-1]
    assert len(release) == 64

    project.ok("launch", "--tag", "one")
    log = "/workspace/train_steady_one.log"
    wait_for(lambda: b"step 3" in bed.inside("main", ["cat", log]).stdout)
    [run] = project.json("status", "one")["runs"]
    assert (run["state"], run["release"], run["gpus"]) == ("running", release, [5, 6])
    assert run["step"] >= 3

    memory = bed.gpu_memory()
    assert [n for n, mib in enumerate(memory) if mib >= 1000] == [5, 6]
    assert "one" in project.ok("gpu").stdout
    taken = project.run("launch", "--tag", "one")
    assert taken.returncode == 8 and "one" in taken.stderr
    busy = project.run("launch", "--tag", "two")
    assert busy.returncode == 5 and "one" in busy.stderr, "says who holds them"
    assert len(bed.gpu_holders()) == 2, "neither refused launch left anything"

    assert "step" in project.ok("logs", "one", "-n", "2").stdout
    project.ok("kill", "one")
    assert bed.gpu_holders() == [] and bed.gpu_memory() == [0, 0, 0, 0, 4, 0, 0, 0]
    assert state(project, "one") == "killed"
    assert "killed" in project.ok("runs").stdout


def test_the_run_outlives_the_connection(bed: Bed, project: Project) -> None:
    tag = deployed_and_launched(project, "steady")
    sessions = bed.on_host(["sh", "-c", "cat /proc/[0-9]*/comm | grep -c '^sshd'"], check=False).stdout
    assert int(sessions) == 1, "no session is left open, only the listener"
    wait_for(lambda: len(bed.gpu_holders()) == 1)
    assert state(project, tag) in ("running", "starting")


def test_another_python_and_a_privileged_container(bed: Bed, project: Project) -> None:
    project.write_hosts({"bed": bed.host_entry("newer")})
    deploy = project.ok("deploy")
    assert "3.13" in deploy.stdout
    project.ok("launch", "--tag", "newer")
    wait_for(lambda: len(bed.gpu_holders()) == 1)
    project.ok("kill", "newer")
    assert bed.gpu_holders() == []


@pytest.mark.parametrize("kind", ["ranks", "renames", "ignores-term", "double-forks"])
def test_kill_reaches_the_whole_family(bed: Bed, project: Project, kind: str) -> None:
    """Sessions of their own, new names with no environment, deaf ears, adopted orphans."""
    args = ["--leave"] if kind == "double-forks" else []
    gpus = {"count": 3} if kind == "ranks" else None
    deployed_and_launched(project, kind, *args, gpus=gpus)
    wait_for(lambda: len(bed.gpu_holders()) == (3 if kind == "ranks" else 1))
    project.ok("kill", "t")
    assert bed.gpu_holders() == []
    names = bed.inside("main", ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]).stdout
    assert b"job" not in names and b"VLLM" not in names and b"supervisor" not in names


def test_kill_after_the_leader_was_killed_ends_the_orphans(bed: Bed, project: Project) -> None:
    deployed_and_launched(project, "ranks", gpus={"count": 2})
    wait_for(lambda: len(bed.gpu_holders()) == 2)
    script = 'for p in /proc/[0-9]*; do grep -q "jobs.job.ranks" $p/cmdline && kill -9 ${p#/proc/}; done'
    bed.inside("main", ["sh", "-c", script], check=False)
    time.sleep(0.5)
    assert len(bed.gpu_holders()) == 2
    project.ok("kill", "t")
    assert bed.gpu_holders() == []


def lines_inside(bed: Bed) -> list[str]:
    """The command lines of container `main`."""
    script = 'for p in /proc/[0-9]*; do tr "\\0" " " < $p/cmdline 2>/dev/null; echo; done'
    text = bed.inside("main", ["sh", "-c", script]).stdout.decode(errors="replace")
    return [line.strip() for line in text.splitlines()]


def test_kill_touches_no_bystander(bed: Bed, project: Project) -> None:
    """Strangers with the very same command line, in the container and on the host, are left alone."""
    deployed_and_launched(project, "steady")
    wait_for(lambda: len(bed.gpu_holders()) == 1)
    [words] = [line for line in lines_inside(bed) if "jobs.job" in line and "supervisor" not in line]
    twin = words.split()[1:]
    where = 'cd /workspace/code/current; exec setsid "$@" >/dev/null 2>&1 </dev/null &'
    bed.inside("main", ["sh", "-c", where, "sh", sys.executable, *twin])
    stranger = subprocess.Popen(
        ["nsenter", "-t", str(bed.pid), "--mount", "--pid", "--uts", "--", sys.executable, *twin],
        stdout=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(project.folder), "CUDA_VISIBLE_DEVICES": "7"},
    )
    try:
        wait_for(lambda: len(bed.gpu_holders()) == 2)
        project.ok("kill", "t")
        assert len(bed.gpu_holders()) == 1, "the host's stranger holds GPU 7 as before"
        assert lines_inside(bed).count(words) == 1, "the container's twin lives"
        assert stranger.poll() is None
    finally:
        # nsenter forks into the pid namespace, and its child outlives it: that one holds the GPU.
        for pid in Path(f"/proc/{stranger.pid}/task/{stranger.pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        stranger.wait(10)


@pytest.mark.parametrize(
    ("kind", "words"), [("crashes", "ValueError: tap layer 61"), ("exits", "exit code 3"), ("hogs", None)]
)
def test_a_failed_run_says_why(bed: Bed, project: Project, kind: str, words: str | None) -> None:
    role = "newer" if kind == "hogs" else "main"  # the one with little memory
    project.write_hosts({"bed": bed.host_entry(role)})
    if words is None:
        # Where the machine's control groups do not show in a container, nothing in it counts OOM kills.
        count = "find /sys/fs/cgroup -name memory.events -o -name memory.oom_control | head -1"
        counted = bed.inside(role, ["sh", "-c", count]).stdout
        killer = "the out-of-memory killer" if counted else "SIGKILL, which dflashctl did not send"
        words = f"ended by {killer}"
    deployed_and_launched(project, kind)
    wait_for(lambda: state(project, "t") == "failed", 120)
    [run] = project.json("status", "t")["runs"]
    assert words in " ".join(run["evidence"]), run["evidence"]
    assert project.run("status", "t", "--check").returncode == 7
    assert bed.gpu_holders() == []


def test_hostile_output_is_shown_escaped(bed: Bed, project: Project) -> None:
    deployed_and_launched(project, "escapes")
    log = "/workspace/train_escapes_t.log"
    wait_for(lambda: b"step 1 " in bed.inside("main", ["cat", log]).stdout)
    for verb in (["logs", "t"], ["status", "t"], ["explain", "t"]):
        done = project.run(*verb)
        assert done.returncode in (0, 6), done.stderr
        for text in (done.stdout, done.stderr):
            assert not {"\x1b", "\x07", "\x00", "\x9b", "\u202e", "\x08"} & set(text), verb
    assert "[bold red]not markup[/bold red]" in project.ok("logs", "t").stdout
    project.ok("kill", "t")


def test_the_host_can_be_a_name_of_the_persons_ssh_config(bed: Bed, project: Project) -> None:
    """Port, key and known_hosts come from there, as a person has them already."""
    config = project.home / ".ssh" / "config"
    config.parent.mkdir(mode=0o700)
    config.write_text(
        f"Host my-gpu-box\n  HostName 127.0.0.1\n  Port {bed.port}\n  User root\n"
        f"  IdentityFile {bed.key}\n  IdentitiesOnly yes\n  UserKnownHostsFile {bed.known_hosts}\n"
    )
    project.write_hosts({"bed": bed.host_entry(ssh={"host": "my-gpu-box"})})
    assert "8 idle" in project.ok("gpu").stdout


def test_dry_runs_change_nothing(bed: Bed, project: Project) -> None:
    project.ok("deploy", "--dry-run")
    assert bed.inside("main", ["ls", "-A", "/workspace"]).stdout == b""
    project.ok("deploy")
    project.ok("launch", "--tag", "dry", "--dry-run")
    assert bed.gpu_holders() == []
    assert project.json("status")["runs"] == []
