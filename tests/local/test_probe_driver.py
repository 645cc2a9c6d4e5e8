"""Run with: pytest tests/local/test_probe_driver.py. The driver of a probe, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent.processes import kin, proc
from dflashctl.probe.programs import driver as driver_module
from trainer.failures import find

DRIVER = str(Path(driver_module.__file__))
LONG_S = 120.0
ANSWER = "import json, os; open(os.environ['DFLASH_PROBE_ANSWER'], 'w').write(json.dumps({'ok': True}));"


class Bench:
    """Plans and what became of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.results = root / "probe.jsonl"

    def case(self, name: str, program: str, deadline_s: float = LONG_S, **more: Any) -> dict[str, Any]:
        return {"name": name, "argv": ["-c", program], "env": {}, "deadline_s": deadline_s, **more}

    def argv(self, *cases: dict[str, Any], **plan: Any) -> list[str]:
        body = {"cases": cases, "look": None, "answers": str(self.root), "results": str(self.results), **plan}
        (self.root / "plan.json").write_text(json.dumps(body))
        return [sys.executable, "-u", DRIVER, str(self.root / "plan.json")]

    def run(self, *cases: dict[str, Any], **plan: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*cases, **plan), capture_output=True, text=True, timeout=LONG_S, check=False
        )

    def ends(self) -> dict[str, dict[str, Any]]:
        lines = [json.loads(line) for line in self.results.read_text().splitlines()]
        assert {line["version"] for line in lines} <= {1}
        return {line["case"]: line for line in lines if line.get("state") in ("ended", "skipped")}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_each_end_is_told_and_the_next_runs_all_the_same(bench: Bench) -> None:
    done = bench.run(
        bench.case("good", ANSWER + "print('to the log')"),
        bench.case("raises", "raise ValueError('odd')"),
        bench.case("crashes", "import os; os.kill(os.getpid(), 11)"),
        bench.case("last", ANSWER, env={"X": "1"}),
    )
    assert done.returncode == 0 and "to the log" in done.stdout
    ends = bench.ends()
    assert (ends["good"]["exit"], ends["good"]["answer"], ends["good"]["tail"]) == (
        0,
        {"ok": True},
        "to the log\n",
    )
    assert ends["raises"]["exit"] == 1 and ends["raises"]["tail"].endswith("ValueError: odd\n")
    assert ends["raises"]["answer"] is None
    assert (ends["crashes"]["exit"], ends["crashes"]["signal"]) == (None, 11)
    assert "Segmentation fault" in ends["crashes"]["tail"]  # faulthandler's word
    assert ends["last"]["answer"] == {"ok": True} and not ends["last"]["timed_out"]


def test_a_deadline_shows_the_stacks_and_kills_the_whole_session(
    bench: Bench, until: Callable[..., Any]
) -> None:
    child = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (6, 15)]; time.sleep(600)"
    program = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"open({str(bench.root / 'pid')!r}, 'w').write(str(child.pid))\n"
        "def where_it_hangs():\n    time.sleep(600)\n"
        "where_it_hangs()\n"
    )
    done = bench.run(bench.case("hangs", program, 10.0), bench.case("next", ANSWER))
    ends = bench.ends()
    assert ends["hangs"]["timed_out"] and not ends["hangs"]["unkillable"]
    assert (ends["hangs"]["exit"], ends["hangs"]["signal"], ends["hangs"]["answer"]) == (None, None, None)
    assert "not done within 10 s; its stacks" in done.stdout and "where_it_hangs" in ends["hangs"]["tail"]
    assert not find(done.stdout)  # of the stacks nobody concludes that it crashed
    assert ends["next"]["exit"] == 0
    pid = int((bench.root / "pid").read_text())
    until(lambda: (process := proc.read_process(pid)) is None or process.dead)


def test_one_that_is_deaf_to_the_call_for_stacks_is_killed(bench: Bench) -> None:
    deaf = "import signal, time; signal.signal(6, signal.SIG_IGN); time.sleep(600)"
    done = bench.run(bench.case("deaf", deaf, 1.5), alone=True)
    assert done.returncode == 124
    assert bench.ends()["deaf"]["timed_out"]


@pytest.mark.parametrize(
    ("program", "code"),
    [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("pass", 0)],
)
def test_alone_it_ends_as_its_program_does(bench: Bench, program: str, code: int) -> None:
    assert bench.run(bench.case("snippet", program), alone=True).returncode == code


@pytest.mark.parametrize(("program", "deadline_s"), [("pass", LONG_S), ("import time; time.sleep(60)", 0.5)])
def test_no_session_is_signalled_by_a_number_that_may_be_another_s(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, program: str, deadline_s: float
) -> None:
    """Its number is a child's own until the child is reaped; the session was killed after that."""
    signalled, kill = [], os.killpg

    def killpg(group: int, number: int) -> None:
        os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT | os.WNOHANG)  # ChildProcessError: it was reaped
        signalled.append(group)
        kill(group, number)

    monkeypatch.setattr(driver_module.os, "killpg", killpg)
    plan = {"answers": str(bench.root), "results": str(bench.results)}
    ended = driver_module.Driver(plan).one(bench.case("a", program, deadline_s))
    assert signalled and not ended["unkillable"] and ended["timed_out"] == (deadline_s < LONG_S)


def test_what_a_case_lacks_is_said_and_nothing_started(bench: Bench) -> None:
    (bench.root / "seen.py").write_text(ANSWER.replace("{'ok': True}", "{'torch': '2.11.0', 'gpus': 1}"))
    done = bench.run(
        bench.case("two", "raise SystemExit(1)", needs={"gpus": 2}),
        bench.case("builds", "raise SystemExit(1)", needs={"compiler": True}),
        bench.case("one", ANSWER, needs={"gpus": 1, "compiler": False}),
        look="seen",
        pythonpath=str(bench.root),
    )
    assert done.returncode == 0
    ends = bench.ends()
    assert (ends["two"]["lacks"], ends["two"]["why"]) == ("gpus", "2 GPUs: torch sees 1")
    builds = ("compiler", "a compiler: none is on PATH (Debian: g++)")
    assert (ends["builds"]["lacks"], ends["builds"]["why"]) == builds
    assert ends["one"]["exit"] == 0
    look = {"version": 1, "look": {"torch": "2.11.0", "gpus": 1}}
    assert json.loads(bench.results.read_text().splitlines()[0]) == look


def test_a_look_that_fails_leaves_its_last_words(bench: Bench) -> None:
    bench.run(
        bench.case("one", ANSWER, needs={"gpus": 1}),
        bench.case("builds", ANSWER, needs={"compiler": True}),
        bench.case("none", ANSWER),
        look="no_such_module",
    )
    first = json.loads(bench.results.read_text().splitlines()[0])
    assert first["look"] == {} and "no_such_module" in first["tail"]
    for skipped in bench.ends().values():  # nobody knows of GPUs and compilers
        assert skipped["lacks"] == "torch" and "No module named no_such_module" in skipped["why"]


def test_sigterm_is_passed_on_and_ends_the_plan(bench: Bench, until: Callable[..., Any]) -> None:
    ready = bench.root / "ready"
    program = (
        "import signal, sys, time\n"
        "def end(number, frame):\n    print('orderly end')\n    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"open({str(ready)!r}, 'w').close()\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        bench.argv(bench.case("runs", program), bench.case("never", ANSWER)), stdout=subprocess.PIPE
    )
    try:
        until(ready.exists, 120)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LONG_S)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM and b"orderly end" in out
    ends = bench.ends()
    assert ends["runs"]["exit"] == 3 and "never" not in ends


def test_no_core_is_written_and_output_without_an_end_is_kept_short(bench: Bench) -> None:
    program = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE)); print('x' * 100000)"
    done = bench.run(bench.case("long", program))
    assert done.stdout.startswith("(0, 0)") and len(done.stdout) > 100000
    assert len(bench.ends()["long"]["tail"]) == driver_module.TAIL_BYTES


def test_a_child_that_keeps_the_output_open_is_not_waited_for(bench: Bench) -> None:
    program = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"open({str(bench.root / 'pid')!r}, 'w').write('x')\n"
    )
    started = time.monotonic()
    process = subprocess.Popen(
        bench.argv(bench.case("leaves", program), bench.case("next", ANSWER)),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "DFLASH_RUN_ID": "probe-test"},
    )
    try:
        assert process.wait(LONG_S) == 0
    finally:
        for one in kin.tagged(proc.table()).get("probe-test", []):
            os.kill(one, signal.SIGKILL)
    assert bench.ends()["next"]["exit"] == 0 and time.monotonic() - started < LONG_S
