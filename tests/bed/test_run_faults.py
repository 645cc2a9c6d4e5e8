"""Runs whose ground gives way, on the bed: every program ended exactly and in time, a container restarted, a
supervisor killed, a full disk, launches at the same moment. Judged by what the bed itself says."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bedkit.bed import Bed
from bedkit.project import Project

from dflashctl.agent.records.runfolder import new_id
from dflashctl.config import resolve
from dflashctl.config.hosts import HostEntry, complete
from dflashctl.config.resolve import read_recipe
from dflashctl.gpus.choose import choose, parse
from dflashctl.gpus.facts import ask_inside
from dflashctl.remote.engine import Engine
from dflashctl.remote.factory import open_engine
from dflashctl.runs.launch import plan_launch
from dflashctl.runs.launching import Attempt
from dflashctl.runs.stopping import stop

pytestmark = pytest.mark.bed

GRACE_S = 1.0
IN_TIME_S = GRACE_S + 3.0
PROGRAMS = {
    "steady": "0,", "heartbeat": "1,", "ranks": "2,3", "renames": "4,", "ignores-term": "5,",
    "double-forks": "6,", "stalls": "7,", "spins": "none", "stops": "none", "wedges": "none",
    "progress": "none", "escapes": "none",
}  # fmt: skip
"""Every program of the bed that does not end by itself (crashes, exits, hogs, floods), with its GPUs."""


@pytest.fixture
def project(bed: Bed, tmp_path: Path) -> Project:
    project = Project(tmp_path / "project", {"bed": bed.host_entry()})
    project.write_recipe("steady")
    return project


def wait_for(what: Callable[[], object], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"did not become true within {seconds} s"
        time.sleep(0.1)


def lines_inside(bed: Bed, role: str = "main") -> list[str]:
    script = 'for p in /proc/[0-9]*; do tr "\\0" " " < $p/cmdline 2>/dev/null; echo; done'
    text = bed.inside(role, ["sh", "-c", script]).stdout.decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip() and "for p in" not in line]


def launch(engine: Engine, project: Project, kind: str, gpus: str) -> str:
    """As `dflashctl launch` does it, without a new process each time. Returns the run's id."""
    recipe = resolve(read_recipe(project.folder / "recipes" / f"{kind}.yaml"), kind)
    with Attempt(engine, samples=0 if gpus == "none" else 1) as attempt:
        facts = attempt.facts()
        plan = plan_launch(
            engine.host,
            recipe,
            run_id=new_id(),
            inside=facts.inside,
            gpus=choose(facts.box, parse(gpus)),
            created_by="test",
        )
        answer = attempt.start(plan, {})
    assert answer["outcome"] == "started", answer
    return plan.run_id


@pytest.mark.alone
def test_every_program_is_ended_exactly_and_in_time(bed: Bed, project: Project) -> None:
    for kind in PROGRAMS:
        project.write_recipe(kind, gpus={"count": 0}, grace_s=GRACE_S)
    project.ok("deploy")
    # Strangers: one with the words of a run in its command line, one with nothing.
    twin = ["sh", "-c", 'exec setsid sh -c "sleep 600 & wait" jobs.job steady supervise >/dev/null 2>&1 &']
    bed.inside("main", twin)
    before = sorted(lines_inside(bed))
    took: dict[str, float] = {}
    with open_engine(complete("bed", HostEntry.model_validate(bed.host_entry()))) as engine:
        ids = {kind: launch(engine, project, kind, gpus) for kind, gpus in PROGRAMS.items()}
        wait_for(lambda: len(bed.gpu_holders()) == 8)

        def end(kind: str) -> None:
            told = stop(engine, ids[kind], who="test", reason="", grace_s=GRACE_S, on_event=lambda e: None)
            assert told["outcome"] == "killed" and told["exit"]["cause"] == "killed", (kind, told)
            took[kind] = told["seconds"]

        kinds = list(PROGRAMS)
        for number in range(0, len(kinds), 3):
            threads = [threading.Thread(target=end, args=(kind,)) for kind in kinds[number : number + 3]]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            live = {run["tag"] for run in ask_inside(engine)["runs"]}
            assert live == set(kinds[number + 3 :]), "the others live on"
    assert set(took) == set(PROGRAMS) and max(took.values()) <= IN_TIME_S, took
    print("seconds to the end of each:", took)
    assert bed.gpu_holders() == []
    assert sorted(lines_inside(bed)) == before, "nobody is left, and no stranger is gone"


def test_a_container_restarted_under_a_run_loses_it_and_says_so(bed: Bed, project: Project) -> None:
    project.ok("deploy")
    project.ok("launch", "--tag", "t")
    wait_for(lambda: len(bed.gpu_holders()) == 1)
    bed.stop("main")
    stopped = project.run("status", "t")
    assert stopped.returncode == 12 and "failed" not in stopped.stdout, stopped
    bed.start("main")
    [run] = project.json("status", "t")["runs"]
    assert run["state"] == "lost" and "restarted" in " ".join(run["evidence"]), run
    killed = project.ok("kill", "t")
    assert "went without a trace" in killed.stdout
    assert project.json("status", "t")["runs"][0]["state"] == "lost", (
        "a kill that came too late renames nothing"
    )
    assert all(gpu["idle"] for gpu in project.json("gpu")["gpus"]), "and reserves nothing"
    project.ok("launch", "--tag", "t")


def test_a_supervisor_killed_outright_leaves_orphans_that_kill_finds(bed: Bed, project: Project) -> None:
    project.write_recipe("ranks", gpus={"count": 3})
    project.ok("deploy")
    project.ok("launch", "-r", "ranks", "--tag", "t")
    wait_for(lambda: len(bed.gpu_holders()) == 3)
    [pid] = supervisors(bed)
    bed.inside("main", ["sh", "-c", f"kill -9 {pid}"])
    wait_for(lambda: supervisors(bed) == [])
    [run] = project.json("status", "t")["runs"]
    assert run["state"] != "finished" and run["state"] != "failed", run
    busy = project.run("launch", "--tag", "u", "--gpus", "0,")
    assert busy.returncode == 5 and "t" in busy.stderr
    project.ok("kill", "t")
    assert bed.gpu_holders() == [] and not [line for line in lines_inside(bed) if "jobs" in line]


def supervisors(bed: Bed) -> list[int]:
    script = 'for p in /proc/[0-9]*; do echo "${p#/proc/} $(tr "\\0" " " < $p/cmdline 2>/dev/null)"; done'
    rows = bed.inside("main", ["sh", "-c", script]).stdout.decode(errors="replace").splitlines()
    return [int(row.split()[0]) for row in rows if "supervisor.pyz supervise" in row]


def test_a_disk_that_fills_under_the_log_ends_neither_run_nor_kill(bed: Bed, project: Project) -> None:
    """Log and run folder on the same 8 MB."""
    entry = bed.host_entry(log_dir="/srv/small", state_dir="/srv/small/state")
    project.write_hosts({"bed": entry})
    fill = (
        "import os, time\nwhile True:\n  try: os.write(1, b'x' * 65536)\n  except OSError: time.sleep(0.2)\n"
    )
    project.write_recipe("fills", command=["python", "-c", fill])
    project.ok("deploy", "-r", "fills")
    project.ok("launch", "-r", "fills", "--tag", "t", "--gpus", "none")
    free = ["sh", "-c", "df -P /srv/small | awk 'END {print $4}'"]
    wait_for(lambda: int(bed.inside("main", free).stdout) == 0)
    assert project.json("status", "t")["runs"][0]["state"] in ("running", "starting")
    refused = project.run("launch", "-r", "fills", "--tag", "u", "--gpus", "none")
    assert refused.returncode == 4 and "nothing was started" in refused.stderr, refused
    killed = project.run("kill", "t")
    assert killed.returncode == 0 and "ended in" in killed.stdout, killed
    wait_for(lambda: not [line for line in lines_inside(bed) if "os.write" in line])
    bed.inside("main", ["sh", "-c", "rm -f /srv/small/*.log"])
    wait_for(lambda: supervisors(bed) == [])  # its last word waited for space
    assert project.json("status", "t")["runs"][0]["state"] in ("killed", "lost")


def test_launches_at_the_same_moment(bed: Bed, project: Project) -> None:
    """The same tag: one run. Another container, the same GPU: one run, and the other hears who has it, though
    that one has not opened it yet."""
    project.write_hosts({"bed": bed.host_entry(), "other": bed.host_entry("newer")})
    project.write_recipe("steady", command=["python", "-c", "import time; time.sleep(600)"])
    project.ok("deploy", "--host", "bed,other")
    same = at_once(project, ["--tag", "same", "--gpus", "0,"], ["--tag", "same", "--gpus", "1,"])
    assert sorted(code for code, _ in same) == [0, 8], same
    other = ["--tag", "b", "--gpus", "5,", "--host", "other"]
    both = at_once(project, ["--tag", "a", "--gpus", "5,"], other)
    assert sorted(code for code, _ in both) == [0, 5], both
    if both[0][0] == 0:
        assert f"GPU 5: reserved by a in container {bed.ids['main']}" in both[1][1]
        project.ok("kill", "a")
        project.ok("launch", *other)
    else:
        assert f"GPU 5: reserved by b in container {bed.ids['newer']}" in both[0][1]
    assert bed.gpu_holders() == []


def at_once(project: Project, *launches: list[str]) -> list[tuple[int, str]]:
    processes = [
        subprocess.Popen(
            project.argv("launch", *words),
            cwd=project.folder,
            env=project.env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in launches
    ]
    done = []
    for process in processes:
        try:
            _, said = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            raise
        done.append((process.returncode, said))
    return done
