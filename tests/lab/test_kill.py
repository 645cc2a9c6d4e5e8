"""`dflashctl kill` on the lab: the whole family, nobody else, and the GPUs proven free."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
from lab_client import inside, ssh

if TYPE_CHECKING:
    from life_kit import Project

pytestmark = pytest.mark.lab


def test_a_kill_frees_the_gpus_and_says_so(project: Project) -> None:
    project.launch("a", "--gpus", "8")
    done = project.run("kill", "a", "--reason", "enough seen")
    assert "SIGTERM to pid" in done.stdout and "8 GPUs free again: 0-7" in done.stdout
    assert re.search(r"lab · a \(\S+\) ended in", done.stdout)
    again = project.run("kill", "a")
    assert "has already ended: was killed by" in again.stdout and "(enough seen)" in again.stdout


def test_sessions_deaf_ranks_and_double_forks_all_go(project: Project) -> None:
    launched = project.launch("deaf", "--gpus", "2")
    target = project.live()["deaf"]
    pids = {member["pid"] for member in target["family"]}
    assert len(pids) == 6  # leader, three ranks, one forked twice, the supervisor
    result = project.json("kill", "deaf")
    (run,) = result["runs"]
    assert run["signalled"]["TERM"] == [launched["pid"]] and run["survivors"] == []
    assert all(gpu["free"] for gpu in result["gpus"]) and len(result["gpus"]) == 2
    left = project.inside("ls /proc").stdout.decode().split()
    assert not pids & {int(name) for name in left if name.isdigit()}


def test_without_a_tag_the_only_live_run_is_meant(project: Project) -> None:
    project.launch("a", "--gpus", "1")
    project.launch("b", "--gpus", "1")
    refused = project.run("kill", code=2)
    assert "2 runs are live: b (" in refused.stderr and "dflashctl kill --all" in refused.stderr
    project.run("kill", "b")
    assert " a (" in project.run("kill").stdout
    none = project.run("kill", code=6)
    assert "no run is live" in none.stderr
    assert "no run is live" in project.run("kill", "--all").stdout


def test_all_and_unknown_and_both(project: Project) -> None:
    project.launch("a", "--gpus", "1")
    project.launch("b", "--gpus", "1")
    assert {run["tag"] for run in project.json("kill", "--all")["runs"]} == {"a", "b"}
    assert "no run has the tag 'nope'; " in project.run("kill", "nope", code=6).stderr
    project.run("kill", "a", "--all", code=2)


def test_a_dry_run_signals_nobody(project: Project) -> None:
    launched = project.launch("a")
    done = project.run("kill", "a", "--dry-run")
    assert f"would end a ({launched['run']}) on GPUs 0-1: pids {launched['pid']}" in done.stdout
    assert project.json("kill", "--dry-run")["runs"][0]["live"] is True
    assert "no live run nope" in project.run("kill", "nope", "--dry-run", code=6).stderr


def test_orphans_of_a_killed_supervisor_go_too(project: Project) -> None:
    project.launch("deaf", "--gpus", "1")
    target = project.live()["deaf"]
    recorded = project.inside(f"cat /workspace/.dflashctl/runs/{target['id']}/supervisor.json").stdout
    supervisor = json.loads(recorded)["supervisor"]["pid"]
    project.inside(f"kill -9 {supervisor}")
    lost = project.until(lambda: (run := project.live()["deaf"]) and not run["live"] and run)
    assert {one["pid"] for one in lost["family"]} == {one["pid"] for one in target["family"]} - {supervisor}
    refused = project.run("launch", "--tag", "deaf", code=8)
    assert "lost its supervisor, but its processes live" in refused.stderr
    (run,) = project.json("kill", "deaf")["runs"]
    assert run["outcome"] == "killed" and run["exit"]["cause"] == "killed"


def test_a_stranger_on_the_runs_gpu_is_listed_and_lives(project: Project) -> None:
    project.launch("a", "--gpus", "0,1")
    pid = project.stranger(1)
    try:
        done = project.run("kill", "a", code=9)
        assert f"GPU 1 is not free: held by container process, pid {pid}" in done.stderr
        assert "GPU 0: free" in done.stdout
        assert project.inside(f"cat /proc/{pid}/comm").returncode == 0
    finally:
        project.end(pid)


def test_memory_that_drains_slowly_is_waited_for(project: Project) -> None:
    def slow(box: Any) -> None:
        box.linger_s = 2.0

    project.gpus(slow)
    project.launch("a")
    assert "2 GPUs free again" in project.run("kill", "a").stdout


def test_memory_that_stays_is_no_success(project: Project) -> None:
    project.launch("a", "--gpus", "3,")

    def leak(box: Any) -> None:
        box.gpu(3).leaked_mib = 2000

    project.gpus(leak)
    done = project.run("kill", "a", code=9)
    assert "GPU 3 is not free: 2,000 MiB in use" in done.stderr and "no process has it" in done.stderr


def test_gpus_that_cannot_be_read_are_not_claimed_free(project: Project) -> None:
    project.launch("a")

    def fail(box: Any) -> None:
        box.mode = "unknown"

    project.gpus(fail)
    done = project.run("kill", "a", code=9)
    assert "ended in" in done.stdout and "GPU 0 is not free: not known" in done.stderr


def test_words_in_a_command_line_make_nobody_ours(project: Project) -> None:
    """What `pkill -9 -f python3` would have taken."""
    project.launch("a", "--gpus", "1")
    pid = project.stranger(7)
    try:
        project.run("kill", "--all")
        assert project.inside(f"cat /proc/{pid}/comm").returncode == 0
    finally:
        project.end(pid)


def test_a_laptop_that_dies_while_killing(project: Project) -> None:
    """The order has arrived: the run ends over there all the same."""
    run_id = project.launch("deaf", "--gpus", "1")["run"]
    laptop = project.popen("kill", "deaf")
    project.until(lambda: any(event["event"] == "signalled" for event in project.events(run_id)))
    laptop.kill()
    laptop.communicate()
    project.until(lambda: project.live() == {})
    assert "already ended: was killed by" in project.run("kill", "deaf").stdout


def test_ctrl_c_while_killing_can_be_repeated(project: Project) -> None:
    run_id = project.launch("deaf", "--gpus", "1")["run"]
    person = project.popen("kill", "deaf", "--grace", "60")
    project.until(lambda: any(event["event"] == "signalled" for event in project.events(run_id)))
    person.send_signal(signal.SIGINT)
    _, said = person.communicate(timeout=30)
    assert person.returncode == 130 and "Traceback" not in said
    assert "the end of deaf may go on over there: dflashctl status deaf" in said
    project.run("kill", "deaf", "--grace", "0")


def test_an_orphan_of_no_run_is_shown_and_ended_by_its_pid(project: Project) -> None:
    pid, other = project.stranger(2), project.stranger(3)
    try:
        shown = project.run("kill", "--pid", str(pid), "--dry-run").stdout
        assert f"lab · pid {pid} inside, of no run" in shown and "GPUs     2\n" in shown
        assert "nobody is there to ask" in project.run("kill", "--pid", str(pid), code=2, input="").stderr
        assert project.held(2)
        done = project.json("kill", "--pid", str(pid), "--yes")
        assert (done["outcome"], done["signalled"], done["gpus"]) == ("killed", ["SIGTERM"], [2])
        assert project.held(2) == [] and project.held(3)
        run = project.launch("a", "--gpus", "1")
        refused = project.run("kill", "--pid", str(run["pid"]), "--yes", code=8)
        assert f"belongs to run {run['run']}" in refused.stderr and "dflashctl kill a" in refused.stderr
    finally:
        project.end(pid)
        project.end(other)


def test_a_container_that_was_restarted_names_nobody_of_today(project: Project) -> None:
    """Its pids begin anew: those of the old run's files are other processes now."""
    old = project.launch("a", "--gpus", "1")
    assert ssh(project.endpoint, "pct stop 200 && pct start 200").returncode == 0
    assert project.live() == {}
    code = project.run("launch", "--tag", "a", "--gpus", "1", "--json").stdout
    new = json.loads(code)
    told = project.run("kill", old["run"])
    assert "has already ended: it went without a trace" in told.stdout
    assert project.live()["a"]["id"] == new["run"]
    assert project.live()["a"]["leader"]["pid"] == new["pid"]


def test_a_pid_that_was_given_out_again_is_left_alone(project: Project) -> None:
    """The run's processes are gone without a trace, and a stranger has the leader's pid: same boot, same
    container, same number, another start."""
    launched = project.launch("a", "--gpus", "none")
    recorded = project.inside(f"cat /workspace/.dflashctl/runs/{launched['run']}/supervisor.json").stdout
    supervisor, leader = (json.loads(recorded)[name]["pid"] for name in ("supervisor", "leader"))
    project.inside(f"kill -9 {supervisor} {leader}")
    project.until(lambda: project.live() == {})
    code = (
        "import os, sys, time\n"
        f"open('/proc/sys/kernel/ns_last_pid', 'w').write('{leader - 1}')\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    for fd in (0, 1, 2): os.close(fd)\n"
        "    time.sleep(600)\n"
    )
    project.until(lambda: project.inside(f"test ! -e /proc/{leader}", check=False).returncode == 0)
    assert inside(project.endpoint, [project.endpoint.python, "-I", "-c", code]).returncode == 0
    try:
        assert project.inside(f"test -e /proc/{leader}", check=False).returncode == 0, "nobody got that pid"
        told = project.json("kill", "a")["runs"][0]
        assert (told["outcome"], told["signalled"]) == ("already_ended", {"TERM": [], "KILL": []})
        assert project.inside(f"test -e /proc/{leader}", check=False).returncode == 0
    finally:
        project.end(leader)


def test_stacks_are_shown_before_the_end(project: Project) -> None:
    project.launch("a")
    out = project.run("kill", "a", "--stacks").stdout
    shown, _, ended = out.partition("SIGTERM")
    assert "pid " in shown and "state " in shown and "1 process" in shown
    assert "ended in" in ended
    second = project.launch("b")
    document = project.json("kill", "b", "--stacks")
    assert [one["id"] for one in document["stacks"]] == [second["run"]]
