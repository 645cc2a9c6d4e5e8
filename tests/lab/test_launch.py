"""`dflashctl launch` on the lab: once, on idle GPUs, with its record, whatever happens on the way."""

from __future__ import annotations

import json
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from lab_client import cli_environment

from dflashctl.runs.waiting import wait

if TYPE_CHECKING:
    from life_kit import Project

pytestmark = pytest.mark.lab

RUN_ID = r"\d{8}T\d{9}-[0-9a-f]{6}"


def test_a_launch_prints_what_a_person_needs(project: Project) -> None:
    out = project.run("launch", "--tag", "a").stdout
    assert re.search(rf"^  run +{RUN_ID}$", out, re.MULTILINE)
    assert re.search(r"^  pid +\d+ \(inside\)$", out, re.MULTILINE)
    assert re.search(r"^  GPUs +0-1$", out, re.MULTILINE)
    assert re.search(r"^  log +/workspace/train_x_a\.log$", out, re.MULTILINE)
    assert "launched in" in out and "next: dflashctl status a" in out
    assert out.startswith("lab · x · tag a · variant a\n")


def test_the_program_gets_its_gpus_by_uuid_and_the_host_names_its_holder(project: Project) -> None:
    launched = project.launch("a", "--gpus", "5,6")
    held = {one["index"]: one["holders"] for one in project.json("gpu")["gpus"] if one["holders"]}
    assert set(held) == {5, 6}
    (holder,) = held[5]
    assert (holder["kind"], holder["tag"], holder["run"]) == ("run", "a", launched["run"])
    assert holder["inner_pid"] == launched["pid"]
    environ = project.environ(launched["pid"])
    uuids = ",".join(gpu["uuid"] for gpu in launched["gpus"])
    assert f"CUDA_VISIBLE_DEVICES={uuids}" in environ and uuids.count("GPU-") == 2
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in environ
    names = {entry.partition("=")[0] for entry in environ}
    ours = {"PATH", "HOME", "LANG", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"}
    assert names == ours | {"DFLASH_RUN_DIR", "DFLASH_RUN_ID", "DFLASH_TAG"} | set(project.endpoint.env)


def test_the_tag_of_a_live_run_is_refused_and_free_after_its_end(project: Project) -> None:
    first = project.launch("a")
    refused = project.run("launch", "--tag", "a", code=8)
    assert f"run {first['run']} is live" in refused.stderr and "dflashctl kill a" in refused.stderr
    project.run("kill", "a")
    second = project.json("launch", "--tag", "a")
    assert second["rotated"] == f"/workspace/train_x_a.log.{first['run']}"


def test_a_laptop_whose_clock_is_ahead_hides_no_later_run(project: Project) -> None:
    first = project.launch("a")["run"]
    project.run("kill", "a")
    ahead = "29991231T235959000-0a1b2c"
    project.inside(f"cd /workspace/.dflashctl/runs && mv {first} {ahead}")
    project.inside(f"sed -i s/{first}/{ahead}/ /workspace/.dflashctl/runs/{ahead}/record.json")
    second = project.launch("a")["run"]
    assert [run["id"] for run in project.json("status", "a")["runs"]] == [second]
    assert project.json("logs", "a")["id"] == second > ahead


def test_waiting_gives_the_end(project: Project) -> None:
    done = project.run("launch", "--tag", "short", "--wait")
    assert "short finished: exit code 0 after" in done.stdout
    failed = project.run("launch", "--tag", "fails", "--wait", code=7)
    assert "KeyError: 'of the program'" in failed.stderr
    assert (
        "fails failed: exit code 1 after" in failed.stderr and "next: dflashctl logs fails" in failed.stderr
    )


def test_a_failure_that_ends_with_code_0_is_one_to_who_waits_as_to_status(project: Project) -> None:
    waited = project.run("launch", "--tag", "cause", "--wait", code=7)
    assert "left a root cause: ValueError: of the program" in waited.stderr
    assert project.json("status", "cause")["runs"][0]["state"] == "failed"


def test_waiting_ends_with_a_wedge_and_leaves_the_run(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflashctl.runs.waiting.WAIT_SLICE_S", 0.5)
    project.recipe("silent")
    with open(project.root / "recipes" / "silent.yaml", "a") as file:
        file.write("observe: {rules: {log_deadline_s: 1}}\n")
    launched = project.launch("a", "-r", "silent")
    end = wait(project.engine, project.engine.host.state_dir, launched["run"])
    assert end.exit is None and end.wedged is not None
    assert end.wedged.tag == "a" and end.wedged.state == "wedged" and "log" in " ".join(end.wedged.evidence)
    assert set(project.live()) == {"a"}


def test_a_program_that_dies_at_once_is_shown_with_its_log(project: Project) -> None:
    done = project.run("launch", "--tag", "dies", "--wait", "--json", code=None)
    assert done.returncode == 7
    assert "ModuleNotFoundError: No module named 'nothing_of_that_name'" in done.stderr
    document = json.loads(done.stdout)
    assert document["outcome"] == "failed" and document["why"].startswith("failed: exit code 1 after")
    assert document["exit"]["code"] == 1


def test_a_dry_run_starts_nothing(project: Project) -> None:
    plan = project.json("launch", "--tag", "a", "--dry-run")
    assert plan["dry_run"] and plan["command"][0] == project.endpoint.python
    assert "nothing was started" in project.run("launch", "--tag", "a", "--dry-run").stdout
    assert project.live() == {}


def test_a_busy_gpu_is_refused_with_the_table_and_its_holder(project: Project) -> None:
    pid = project.stranger(2)
    try:
        refused = project.run("launch", "--tag", "a", "--gpus", "1,2,3", code=5)
        assert re.search(rf"GPU 2: held by container process, pid {pid}: \S+python\S* -I -c", refused.stderr)
        assert len(re.findall(r"^ +\d  NVIDIA", refused.stderr, re.MULTILINE)) == 8
        assert project.json("launch", "--tag", "a", "--gpus", "3")["gpus"][-1]["index"] == 3
        project.run("kill", "a")
        allowed = project.run("launch", "--tag", "a", "--gpus", "2,", "--allow-busy")
        assert "GPU 2 is taken although it is not idle" in allowed.stderr
    finally:
        project.end(pid)


def test_memory_without_a_process_is_not_idle(project: Project) -> None:
    def leak(box: Any) -> None:
        box.gpu(4).leaked_mib = 700

    project.gpus(leak)
    refused = project.run("launch", "--tag", "a", "--gpus", "8", code=5)
    assert "8 wanted, 7 of 8 idle" in refused.stderr
    assert re.search(
        r"GPU 4: 70\d MiB in use \(idle: 64 MiB at most\), and no process has it", refused.stderr
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("reset", "GPU 3: requires reset"),
        ("missing", "7 of 8 GPUs are visible"),
        ("lost", "7 of 8 GPUs are visible"),
        ("handle", "7 of 8 GPUs are visible"),
    ],
)
def test_a_sick_gpu_is_not_idle_and_the_others_serve(project: Project, fault: str, said: str) -> None:
    def fall_ill(box: Any) -> None:
        box.gpu(3).fault = fault

    project.gpus(fall_ill)
    refused = project.run("launch", "--tag", "a", "--gpus", "8", "--allow-busy", code=5)
    assert said in refused.stderr
    launched = project.json("launch", "--tag", "a", "--gpus", "7")
    assert len({gpu["uuid"] for gpu in launched["gpus"]}) == 7


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("unknown", "Failed to initialize NVML: Unknown Error"),
        ("nodriver", "no NVIDIA driver is loaded"),
        ("mismatch", "reboot the host"),
        ("nodevices", "no GPU is visible"),
        ("blocked", "no access to /dev/nvidiactl"),
    ],
)
def test_a_driver_that_fails_is_not_eight_idle_gpus(project: Project, mode: str, said: str) -> None:
    def fail(box: Any) -> None:
        box.mode = mode

    project.gpus(fail)
    refused = project.run("launch", "--tag", "a", code=5)
    assert "the GPUs cannot be read" in refused.stderr and said in refused.stderr
    project.run("launch", "--tag", "a", "--gpus", "none")


def test_a_container_without_gpu_access_is_no_affair_of_the_gate(project: Project) -> None:
    """The host's nvidia-smi is the truth; the container's may be broken for a while."""

    def fail_inside(box: Any) -> None:
        box.mode, box.mode_at = "unknown", "container"

    project.gpus(fail_inside)
    project.run("launch", "--tag", "a")


def test_a_missing_secret_stops_before_any_contact(project: Project) -> None:
    project.recipe("s", secrets=["NO_SUCH_TOKEN"])
    done = project.run("launch", "--recipe", "s", "--tag", "a", code=2)
    assert "NO_SUCH_TOKEN is not set in your environment" in done.stderr


def test_a_secret_arrives_in_the_program_alone(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIFE_TOKEN", "hunter2-of-the-lab")
    project.recipe("s", secrets=["LIFE_TOKEN"])
    launched = project.launch("a", "--recipe", "s")
    environ = project.environ(launched["pid"])
    assert "LIFE_TOKEN=hunter2-of-the-lab" in environ
    assert b"hunter2" not in project.inside("cat /workspace/.dflashctl/runs/*/*; cat /workspace/*.log").stdout
    words = project.inside("cat /proc/[0-9]*/cmdline").stdout
    assert b"hunter2" not in words


@pytest.mark.parametrize("moment_s", [0.55, 0.7, 0.85, 1.0, 1.2, 1.5])
def test_a_laptop_that_dies_while_launching(project: Project, moment_s: float) -> None:
    """SIGKILL at any moment: afterwards the run is there or it is not, a repetition never makes two."""
    laptop = project.popen("launch", "--tag", "count")
    time.sleep(moment_s)
    laptop.kill()
    laptop.communicate()
    time.sleep(1.5)  # what had arrived over there goes on
    again = project.run("launch", "--tag", "count", code=None)
    assert again.returncode in (0, 8), again
    project.until(lambda: project.inside("cat /workspace/ready", check=False).stdout)
    assert project.inside("cat /workspace/starts").stdout == b"x"
    assert set(project.live()) == {"count"}


def test_ctrl_c_while_waiting_leaves_the_run(project: Project) -> None:
    waiting = project.popen("launch", "--tag", "a", "--wait")
    project.until(lambda: project.inside("cat /workspace/ready", check=False).stdout)
    time.sleep(1.0)
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=90)
    assert waiting.returncode == 130
    assert "the run goes on: dflashctl status a · dflashctl kill a" in said and "Traceback" not in said
    assert set(project.live()) == {"a"}


def test_two_people_at_once_never_get_one_gpu(project: Project) -> None:
    both = [project.popen("launch", "--tag", tag, "--gpus", "4", "--json") for tag in ("a", "b")]
    answers = [one.communicate(timeout=120) for one in both]
    codes = sorted(one.returncode for one in both)
    assert codes in ([0, 0], [0, 5]), answers
    taken = [
        gpu["uuid"]
        for one, (out, _) in zip(both, answers, strict=True)
        if one.returncode == 0
        for gpu in json.loads(out)["gpus"]
    ]
    assert len(taken) == len(set(taken)) == 4 * codes.count(0)
    if 5 in codes:  # the loser may try again, and gets the others
        loser = next(tag for tag, one in zip(("a", "b"), both, strict=True) if one.returncode)
        more = [gpu["uuid"] for gpu in project.json("launch", "--tag", loser, "--gpus", "4")["gpus"]]
        assert not set(more) & set(taken)


def test_a_full_disk_starts_nothing(project: Project) -> None:
    project.inside("mkdir -p /workspace/.dflashctl && mount -t tmpfs -o size=16k tmpfs /workspace/.dflashctl")
    try:
        done = project.run("launch", "--tag", "a", code=4)
        assert "No space left on device" in done.stderr and "nothing was started" in done.stderr
        assert project.inside("ls /workspace/.dflashctl/runs").stdout == b""
    finally:
        project.inside("umount /workspace/.dflashctl")


def test_a_full_disk_under_the_log_ends_neither_supervisor_nor_kill(project: Project) -> None:
    project.inside("mkdir -p /workspace/small && mount -t tmpfs -o size=64k tmpfs /workspace/small")
    try:
        project.recipe("x", log="{workdir}/small/{tag}.log")
        project.json("launch", "--tag", "chatty", "--gpus", "none")
        project.until(lambda: project.inside("cat /workspace/refused", check=False).stdout)
        (run,) = project.json("kill", "chatty")["runs"]
        assert (run["outcome"], run["exit"]["cause"]) == ("killed", "killed")
    finally:
        project.inside("umount /workspace/small; rmdir /workspace/small")


def test_waiting_for_idle_gpus_takes_them_when_they_are_free(project: Project) -> None:
    pid = project.stranger(5)
    waiting = project.popen("launch", "--tag", "a", "--gpus", "5,", "--wait-idle", "2m")
    try:
        assert waiting.stderr is not None
        assert any("for GPUs: GPU 5: held by container process" in line for line in waiting.stderr)
        assert waiting.poll() is None and project.live() == {}
        project.end(pid)
        out, _ = waiting.communicate(timeout=90)
        assert waiting.returncode == 0 and "launched in" in out
    finally:
        project.end(pid)
        waiting.kill()
        waiting.communicate()


def test_a_fresh_cache_is_the_runs_own(project: Project) -> None:
    launched = project.launch("a", "--gpus", "none", "--fresh-cache")
    folder = f"/workspace/.dflashctl/runs/{launched['run']}"
    environ = project.environ(launched["pid"])
    assert f"TORCHINDUCTOR_CACHE_DIR={folder}/compile_cache/inductor" in environ
    record = json.loads(project.inside(f"cat {folder}/record.json").stdout)
    assert record["compile_cache"] == {"path": f"{folder}/compile_cache/inductor", "state": "cold"}


def test_a_secret_that_the_program_prints_is_masked_wherever_it_is_shown(project: Project) -> None:
    code = "import os, time; print('key is', os.environ['LICENCE'], flush=True); time.sleep(600)"
    project.recipe("leaky", secrets=["LICENCE"], command=["python", "-c", code])
    env = cli_environment(project.paths.root) | {"LICENCE": "open-sesame-77"}
    project.run("launch", "-r", "leaky", "--tag", "leak", env=env)
    project.until(
        lambda: b"key is" in project.inside("cat /workspace/train_leaky_leak.log", check=False).stdout
    )
    for words in (
        ["logs", "leak"],
        ["logs", "leak", "--grep", "key"],
        ["status", "leak"],
        ["status", "leak", "--json"],
        ["runs", "show", "leak", "--json"],
        ["kill", "leak", "--stacks"],
    ):
        done = project.run(*words, env=env)
        assert "open-sesame-77" not in done.stdout + done.stderr, words
    assert "key is ***" in project.run("logs", "leak", env=env).stdout
    assert "open-sesame-77" in project.run("logs", "leak").stdout, "who does not have it cannot mask it"
