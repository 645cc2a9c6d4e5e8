"""Run with: pytest tests/lab/test_status_logs_runs.py. A run's life as status, logs and runs tell it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fast_cli
import pytest
from lab_client import on_host

from dflashctl.lab.state import LabEndpoint, LabPaths, Record

pytestmark = pytest.mark.lab
DEADLINE_S = 120.0

JOB = """
import json, os, sys, time

FOLDER = os.environ["DFLASH_RUN_DIR"]

def write(name, **body):
    with open(f"{FOLDER}/{name}.tmp", "w") as file:
        json.dump({"version": 1, **body}, file)
    os.replace(f"{FOLDER}/{name}.tmp", f"{FOLDER}/{name}")

def beat(phase, since, step, **more):
    now = time.monotonic()
    write("heartbeat.json", pid=os.getpid(), phase=phase, step=step, total_steps=int(sys.argv[2]),
          wall=time.time(), mono=now, phase_since=since, deadline_s=3.0, median_step_s=0.1, queues={},
          threads={}, metrics={"tokens_per_s": 1203.0}, **more)

def train(steps):
    since = time.monotonic()
    for step in range(1, steps + 1):
        beat("training", since, step)
        with open(f"{FOLDER}/metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "wall": time.time(), "loss": 2.0}) + "\\n")
        print("step", step, flush=True)
        time.sleep(0.1)

kind = sys.argv[1]
beat("compiling", time.monotonic(), None)
print("compiling forward (cudagraphs=False)", flush=True)
time.sleep(1.0)
train(int(sys.argv[2]))
if kind == "wedge":
    print("Traceback (most recent call last):\\n    assert torch._C._is_key_in_tls(attr_name)")
    print("AssertionError", flush=True)
    time.sleep(600)
if kind == "fail":
    raise RuntimeError("\\x1b[31mCUDA out of memory. Tried to allocate 2.00 GiB.")
write("summary.json", headline="acceptance length 1.02 -> 2.44", lossless=True, best_acceptance_length=2.44,
      table={"columns": ["figure", "before", "after"], "rows": [["greedy", "1.02", "2.44"]]}, notes=[])
"""

RECIPE = """
version: 1
name: job
deploy: {include: [job.py]}
launch:
  command: [python, "{release_dir}/job.py", KIND, STEPS]
  log: "{log_dir}/train_{recipe}_{tag}.log"
  gpus: {count: 2}
  grace_s: 1
"""

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(lab: Record, lab_paths: LabPaths, tmp_path: Path) -> Iterator[Cli]:
    """dflashctl in a folder with the job's recipe, against the lab; what it launched is killed afterwards."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "job.py").write_text(JOB)
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    environment.pop("DFLASHCTL_HOSTS", None)
    tags: list[str] = []

    def call(*words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = fast_cli.run(*words, cwd=tmp_path, env=environment, timeout=DEADLINE_S)
        if code is not None:
            assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
        assert "Traceback (most recent" not in done.stderr, done.stderr
        return done

    def launch(tag: str, kind: str, steps: int) -> None:
        recipe = RECIPE.replace("KIND", kind).replace("STEPS", f'"{steps}"')
        (tmp_path / "recipes" / "job.yaml").write_text(recipe)
        call("deploy", "-r", "job")
        tags.append(tag)
        call("launch", "-r", "job", "--tag", tag)

    call.launch = launch  # type: ignore[attr-defined]
    yield call
    for tag in tags:
        call("kill", tag, code=None)
    shutil.rmtree(lab_paths.workspace / ".dflashctl" / "runs")  # the next test's status is of its own runs


def launch(cli: Cli, tag: str, kind: str, steps: int) -> None:
    cli.launch(tag, kind, steps)  # type: ignore[attr-defined]


def seen(cli: Cli, tag: str, **wanted: Any) -> dict[str, Any]:
    """The run's JSON once it is as wanted."""
    end = time.monotonic() + 120
    while True:
        (run,) = json.loads(cli("status", tag, "--json", code=None).stdout)["runs"]
        if all(run[key] == value for key, value in wanted.items()):
            return run
        assert time.monotonic() < end, run
        time.sleep(0.3)


def test_a_run_from_compiling_to_what_was_learnt(cli: Cli) -> None:
    launch(cli, "whole", "finish", 60)
    run = seen(cli, "whole", state="running")
    assert run["confidence"] == "high"
    assert run["total_steps"] == 60 and run["tokens_per_s"] == 1203.0
    assert len(run["gpus"]) == 2 and run["processes"] == 1
    watched = cli("status", "whole", "--watch", "--every", "0.5").stdout
    assert "finished" in watched
    assert "acceptance length 1.02 -> 2.44" in watched
    log = cli("logs", "whole", "-n", "0").stdout.splitlines()
    assert log == ["compiling forward (cudagraphs=False)", *(f"step {n}" for n in range(1, 61))]
    listed = cli("runs").stdout
    assert "whole" in listed and "acceptance length 1.02 -> 2.44" in listed
    shown = cli("runs", "show", "whole").stdout
    assert "lossless: yes" in shown and "exit code 0" in shown
    assert "no live run" in cli("status", "--check").stdout


def test_a_log_is_followed_to_its_end(cli: Cli) -> None:
    launch(cli, "follow", "finish", 30)
    log = cli("logs", "follow", "-f", "-n", "0").stdout.splitlines()
    assert log == ["compiling forward (cudagraphs=False)", *(f"step {n}" for n in range(1, 31))]


def test_a_wedged_run_is_found_with_its_cause(cli: Cli) -> None:
    launch(cli, "stuck", "wedge", 20)
    run = seen(cli, "stuck", state="wedged")
    assert run["confidence"] == "high"
    told = "; ".join(run["evidence"])
    assert "no heartbeat for" in told
    assert "log line 24: AssertionError … assert torch._C._is_key_in_tls(attr_name)" in told
    assert run["known_failures"] == ["cudagraph-trees-tls"]
    assert cli("status", "--check", code=7).stdout.count("wedged") >= 1
    assert "<2.13" in cli("explain", "stuck").stdout
    stacks = cli("stacks", "stuck", "--again", "0.5").stdout
    assert "has not moved" in stacks and "job.py:" in stacks
    assert cli("logs", "stuck", "--errors").stdout.splitlines()[-1] == "24: AssertionError"
    cli("kill", "stuck")
    assert seen(cli, "stuck", state="killed")["exit"]["cause"] == "killed"


def test_a_failed_run_names_its_exception_escaped(cli: Cli) -> None:
    launch(cli, "bad", "fail", 3)
    run = seen(cli, "bad", state="failed")
    assert "cuda-oom" in run["known_failures"]
    shown = cli("status", "bad").stdout
    assert "\x1b" not in shown and "\\x1b[31mCUDA out of memory" in shown


def test_a_frozen_container_is_frozen_and_its_run_is_not_lost(cli: Cli, lab: Record) -> None:
    launch(cli, "ice", "wedge", 600)
    seen(cli, "ice", state="running")
    freezer(lab.endpoint, "freeze")
    try:
        before = time.monotonic()
        shown = cli("status", "ice", "--check", code=12)
        assert time.monotonic() - before < 14, "the freezer is looked at long before the deadline of 15 s"
        assert "lab · frozen · 1 run" in shown.stdout
        assert "its container is frozen" in shown.stdout and "last seen running" in shown.stdout
        for word in ("failed", "lost", "wedged"):
            assert word not in shown.stdout
    finally:
        freezer(lab.endpoint, "thaw")
    seen(cli, "ice", state="running")


def freezer(endpoint: LabEndpoint, what: str) -> None:
    code = f"sys.argv = ['freezer', S, '200', '{what}']\n"
    done = on_host(
        endpoint, code + "import runpy\nrunpy.run_module('dflashctl.lab.pct.outside', run_name='__main__')"
    )
    assert done.returncode == 0, done.stderr
