"""Run with: pytest -m soak tests/local/test_verdict_soak_real.py (or make soak). Five minutes of real time:
runs that compile, save, evaluate, wait for data and slow down are looked at every two seconds; none may be
called wedged, failed or lost. The trainer's own run files are what they write.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent.runs import observe
from dflashctl.runs import known
from dflashctl.runs.readfacts import read_answer
from dflashctl.runs.verdict import judge

SOAK_S, LOOK_S = 300.0, 2.0

HEAD = """
import json, os, random, sys, threading, time
from pathlib import Path
from trainer.process.runfiles import RunFiles
files = RunFiles(Path(STATE) / "runs" / os.environ["DFLASH_RUN_ID"])
rng = random.Random(7)

def train(steps, seconds=0.5):
    if files.pace.phase != "training":
        files.enter("training")
    for _ in range(steps):
        time.sleep(seconds)
        files.stepped((files.step or 0) + 1)
        files.record({"loss": 2.0, "tokens_per_s": 1200.0})
        print("step", files.step, flush=True)

def wait(phase, seconds, beats):
    files.enter(phase)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(1.0, seconds))
        if beats:
            files.beat()

def busy(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(300000): pass
        time.sleep(0.02)

"""

PROGRAMS = {
    "healthy": HEAD + "wait('loading', 8, False)\nwait('compiling', 20, False)\nwhile True: train(100)",
    "compiling": HEAD + "wait('loading', 5, True)\nwait('compiling', 400, False)",
    "compiling-beats": HEAD + "wait('compiling', 250, True)\nwhile True: train(10)",
    "saving": HEAD + "while True:\n    train(rng.randint(5, 30)); wait('saving', rng.uniform(5, 80), False)",
    "evaluating": HEAD + "while True:\n    train(20)\n    wait('evaluating', rng.uniform(20, 100), True)",
    # The pipeline's queue is empty: the heartbeat says so, and beats on.
    "data-waiting": HEAD + """
def beat(depth, step):
    now = time.monotonic()
    body = {"version": 1, "pid": os.getpid(), "phase": "training", "step": step, "total_steps": None,
            "wall": time.time(), "mono": now, "phase_since": SINCE, "deadline_s": 30.0, "median_step_s": 0.5,
            "queues": {"hidden": {"depth": depth, "size": 8}}, "threads": {"drafter-0": True}, "metrics": {}}
    aside = files.folder / "beat.tmp"
    aside.write_text(json.dumps(body))
    aside.replace(files.folder / "heartbeat.json")
SINCE, step = time.monotonic(), 0
while True:
    for _ in range(10):
        time.sleep(0.5); step += 1; beat(4, step); files.step = step; files.record({"loss": 1.0})
    for _ in range(rng.randint(20, 150)):
        time.sleep(1); beat(0, step)
""",
    "slow": HEAD + "train(60)\nwhile True: train(1, rng.uniform(2, 9))",
    "log-only": "import time\nn = 0\nwhile True:\n    n += 1; print('step', n, flush=True); time.sleep(0.5)",
    "log-only-evaluates": HEAD.replace("files = ", "files = None and ") + """
step = 0
while True:
    for _ in range(20):
        step += 1; print("step", step, flush=True); time.sleep(0.5)
    busy(rng.uniform(30, 200))
""",
    "log-only-waits": HEAD.replace("files = ", "files = None and ") + """
step = 0
while True:
    for _ in range(20):
        step += 1; print("step", step, flush=True); time.sleep(0.5)
    time.sleep(rng.uniform(10, 90))
""",
    "log-only-compiles": HEAD.replace("files = ", "files = None and ") + """
step = 0
while True:
    for _ in range(20):
        step += 1; print("step", step, flush=True); time.sleep(0.5)
    print("compiling forward (cudagraphs=False)", flush=True); time.sleep(150)
""",
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_no_false_alarm_in_five_minutes(box: Any) -> None:
    root = str(Path(__file__).parents[2])
    for tag, program in PROGRAMS.items():
        observed = {"step_regex": r"step (?P<step>\d+)", "pause_regex": "compiling|evaluating|saving"}
        whole = program.replace("STATE", repr(box.state_dir))
        # With its packages: it writes its heartbeat by the trainer's own code.
        box.launch([sys.executable, "-c", whole], tag, cwd=root, observe=observed)
    seen: dict[str, Counter[str]] = {tag: Counter() for tag in PROGRAMS}
    told: dict[tuple[str, str], str] = {}
    resume: dict[str, Any] = {}
    until = time.monotonic() + SOAK_S
    while time.monotonic() < until:
        request = {"state_dir": box.state_dir, "sample_s": 0.4, "known": known.patterns(), "resume": resume}
        answer = observe.observe(request, None)
        resume = {run["id"]: run["log"]["resume"] for run in answer["runs"]}
        for facts in read_answer(answer):
            verdict = judge(facts)
            seen[facts.tag][verdict.state] += 1
            told.setdefault((facts.tag, verdict.state), "; ".join(verdict.evidence))
        time.sleep(LOOK_S)
    print("\n".join(f"{tag:20} {dict(states)}" for tag, states in seen.items()))
    for tag, states in seen.items():
        wrong = set(states) - {"starting", "compiling", "running", "slow"}
        assert not wrong, {state: told[tag, state] for state in wrong}
    assert set(seen["compiling"]) == {"starting", "compiling"}
    assert seen["slow"]["slow"] or seen["data-waiting"]["slow"]
