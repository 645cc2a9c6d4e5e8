"""`dflashctl gpu` on the lab: the host's truth, with faces."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from life_kit import Project

pytestmark = pytest.mark.lab


def test_eight_rows_with_their_holders(project: Project) -> None:
    project.launch("a", "--gpus", "0-4")
    pid = project.stranger(7)
    try:
        out = project.run("gpu").stdout
    finally:
        project.end(pid)
    assert out.startswith("lab · 8 GPUs · 2 idle\n")
    rows = [line for line in out.splitlines() if "NVIDIA H200" in line]
    assert len(rows) == 8
    assert all(re.search(r"a \(pid \d+\)$", row) for row in rows[:5])
    assert rows[5].endswith("idle") and rows[6].endswith("idle")
    assert f"container process, pid {pid}:" in rows[7]
    assert re.search(r"518 / 143,771 MiB +\d+ % +\d+ C +\d+ W", rows[0])


def test_a_host_process_is_none_of_the_containers(project: Project) -> None:
    code = (
        "import subprocess, sys\n"
        "code = \"import os,time; os.open('/dev/nvidia6', os.O_RDWR); time.sleep(600)\"\n"
        "null = subprocess.DEVNULL\n"
        "one = subprocess.Popen([sys.executable, '-I', '-c', code], stdin=null, stdout=null, stderr=null,"
        " start_new_session=True)\n"
        "print(one.pid)\n"
    )
    pid = int(project.host_code(code))
    try:
        project.until(lambda: project.held(6))
        (gpu,) = [one for one in project.json("gpu")["gpus"] if one["holders"]]
        (holder,) = gpu["holders"]
        assert (gpu["index"], holder["kind"], holder["pid"], holder["user"]) == (6, "host", pid, "root")
        refused = project.run("launch", "--tag", "a", "--gpus", "6,", code=5)
        assert f"held by host process, pid {pid}, user root" in refused.stderr
    finally:
        project.host_code(f"import os; os.kill({pid}, 9)")


def test_a_driver_that_hangs_is_said_within_its_deadline(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflashctl.gpus import facts

    def hang(box: Any) -> None:
        box.mode = "hang"

    project.gpus(hang)
    monkeypatch.setattr(facts, "SMI_TIMEOUT_S", 1.0)
    box = facts.read_facts(project.engine, samples=3).box
    assert box.problem == "nvidia-smi does not answer (it hangs in the driver)"


def test_an_idle_level_is_learnt_on_demand(project: Project) -> None:
    def display(box: Any) -> None:
        box.gpu(2).idle_mib = 300

    project.gpus(display)
    assert "GPU 2: 300 MiB in use" in project.run("launch", "--tag", "a", "--gpus", "2,", code=5).stderr
    assert "learnt the idle level of 8 GPUs" in project.run("gpu", "--learn-idle").stdout
    project.run("launch", "--tag", "a", "--gpus", "2,")
    project.inside("rm /workspace/.dflashctl/gpu_idle.json")


def test_an_unreadable_box_has_its_exit_code(project: Project) -> None:
    def fail(box: Any) -> None:
        box.mode = "mismatch"

    project.gpus(fail)
    assert "reboot the host" in project.run("gpu", code=5).stderr
    assert "Driver/library version mismatch" in project.json("gpu", code=5)["problem"]


def test_a_watch_tells_who_takes_a_gpu_and_gives_it_back(project: Project) -> None:
    watch = project.popen("gpu", "--watch", "--every", "0.5")
    try:
        assert watch.stdout is not None
        first = [watch.stdout.readline() for _ in range(8)]
        assert all(line.endswith("idle\n") for line in first), first
        project.launch("a", "--gpus", "5,")
        taken = watch.stdout.readline()
        assert "GPU 5" in taken and "a" in taken.split("MiB")[1].split(), taken
        if "reserved" in taken:  # looked at between the record and the first touch
            assert "a (pid " in watch.stdout.readline()
        project.run("kill", "a")
        back = watch.stdout.readline()
        if "unknown process" in back:  # looked at while it went: its memory is there, its /proc no more
            back = watch.stdout.readline()
        assert "GPU 5" in back and back.endswith("idle\n"), back
    finally:
        watch.send_signal(signal.SIGINT)
        watch.wait(20)
    assert watch.returncode == 130


def test_a_watch_follows_one_host_and_prints_no_json(project: Project) -> None:
    assert "--watch" in project.run("gpu", "--watch", "--json", code=2).stderr
