"""Run with: pytest tests/local/test_verdict_real.py. The test bed's programs as real runs on this machine:
each gets the right state within two heartbeats, and none a wrong one before.

Programs that only write a log: once with their recipe's word for how long it may be silent, which is their
heartbeat; once by the usual thresholds divided by ten, so that the test takes seconds.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent.runs import observe
from dflashctl.config.rules import Rules
from dflashctl.runs import known
from dflashctl.runs.readfacts import read_answer
from dflashctl.runs.verdict import Verdict, judge

JOB = Path(__file__).parents[1] / "bed" / "jobs" / "job.py"
SECONDS = {name: value for name, value in vars(Rules()).items() if name.endswith("_s")}
TEN_TIMES_FASTER = {name: value / 10 for name, value in SECONDS.items() if name != "long_phase_s"}
BEAT_S = 10.0
"""The heartbeat's deadline in these jobs; a log's is the usual 60 s, here a tenth of it."""
LOOK_S = 0.5


@dataclass
class Job:
    """A program, the state that it must come to, and what it may be called before."""

    kind: str
    right: str
    before: set[str]
    args: tuple[str, ...] = ()
    says: str = ""
    rules: dict[str, float] = field(default_factory=lambda: TEN_TIMES_FASTER)
    within_s: float = 2 * BEAT_S
    observed: list[str] = field(default_factory=list)
    right_after_s: float | None = None
    verdict: Verdict | None = None

    @property
    def tag(self) -> str:
        marks = [each[2:] for each in self.args if each in ("--beat", "--leave")]
        return "-".join([self.kind, *marks, *(["log"] if self.rules is LOG_BEATS else [])])


BEATS = ("--beat", str(BEAT_S))
LOG_BEATS = {"log_deadline_s": BEAT_S}
EARLY = {"starting", "running"}
JOBS = [
    Job("steady", "running", EARLY),
    Job("heartbeat", "running", EARLY),
    Job("ranks", "running", EARLY),
    Job("renames", "running", EARLY),
    Job("ignores-term", "running", EARLY),
    Job("double-forks", "running", EARLY),
    Job("progress", "running", EARLY),
    Job("escapes", "running", EARLY),
    Job("double-forks", "finished", EARLY, ("--leave",)),
    Job("floods", "finished", EARLY, ("--megabytes", "20")),
    Job("crashes", "failed", EARLY, says="tap layer 61"),
    Job("exits", "failed", EARLY, says="exit code 3"),
    Job("stops", "wedged", EARLY, says="SIGSTOP"),
    Job("stalls", "wedged", {*EARLY, "slow"}, BEATS, "no CPU time", rules={}),
    Job("spins", "wedged", {*EARLY, "slow"}, BEATS, "no heartbeat for", rules={}),
    Job("wedges", "wedged", EARLY, BEATS, "3 drafter threads gone", rules={}),
    Job("stalls", "wedged", {*EARLY, "slow"}, says="(the recipe allows 10 s)", rules=LOG_BEATS),
    Job("spins", "wedged", {*EARLY, "slow"}, says="(the recipe allows 10 s)", rules=LOG_BEATS),
    Job("wedges", "wedged", {*EARLY, "slow"}, says="_is_key_in_tls", rules=LOG_BEATS),
    Job("stops", "wedged", EARLY, says="SIGSTOP", rules=LOG_BEATS),
    Job("progress", "running", EARLY, rules=LOG_BEATS),
    Job("stalls", "wedged", {*EARLY, "slow"}, says="no step for at least"),
    Job("spins", "slow", EARLY, says="of a core busy"),
    Job("wedges", "wedged", EARLY, says="_is_key_in_tls"),
]


@pytest.mark.alone
@pytest.mark.timeout(180)
def test_each_program_gets_the_right_state_within_two_heartbeats(box: Any) -> None:
    gpus = box.root / "gpus"
    gpus.mkdir()
    (gpus / "uuids").write_text("")
    for index in range(2):
        (gpus / f"nvidia{index}").touch()
    for job in JOBS:
        env = {"PATH": os.environ["PATH"], "NVIDIA_LAB_RPC": str(gpus), "NVIDIA_LAB_DEV": str(gpus)}
        request = box.request([sys.executable, str(JOB), job.kind, "--seconds", "120", *job.args], job.tag)
        run_dir = f"{box.state_dir}/runs/{request['id']}"
        request["record"]["env"] |= {**env, "DFLASH_RUN_DIR": run_dir}
        request["record"]["observe"] = {"step_regex": r"step (?P<step>\d+)", "rules": job.rules}
        observe_launch(box, request)
    until = time.monotonic() + 2 * BEAT_S + 4
    while time.monotonic() < until and any(job.right_after_s is None for job in JOBS):
        look(box)
        time.sleep(LOOK_S)
    for _ in range(3):  # it stays so
        look(box)
    for job in JOBS:
        told = f"{job.tag}: {job.observed}, {job.verdict}"
        assert job.right_after_s is not None and job.right_after_s <= job.within_s, told
        at = job.observed.index(job.right)
        assert set(job.observed[:at]) <= job.before, told
        assert set(job.observed[at:]) == {job.right}, told
        assert job.verdict is not None and job.says in "; ".join(job.verdict.evidence), told
    print("\n".join(f"{job.tag:20} {job.right:9} after {job.right_after_s:5.1f} s" for job in JOBS))


def observe_launch(box: Any, request: dict[str, Any]) -> None:
    from dflashctl.agent.runs import launch

    launch.launch(request, box.events.append)


def look(box: Any) -> None:
    request = {"state_dir": box.state_dir, "sample_s": 0.4, "known": known.patterns(), "limit": 99}
    seen = {facts.tag: facts for facts in read_answer(observe.observe(request, None))}
    for job in JOBS:
        facts = seen[job.tag]
        job.verdict = judge(facts)
        job.observed.append(job.verdict.state)
        if job.verdict.state == job.right and job.right_after_s is None:
            job.right_after_s = facts.started_age_s or 0.0
