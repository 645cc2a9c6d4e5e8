"""Run with: pytest tests/unit/test_verdict_table.py. A row a situation: facts, and what is said of them.

A row is CASE("what it is", facts..., state=..., sure=..., says=[...]): `sure` is the confidence, `says` are
pieces of the evidence, in any order, and `never` pieces that must not be there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflashctl.runs.facts import (
    Ending,
    Family,
    GpuUse,
    Heartbeat,
    Hit,
    KnownCause,
    Log,
    Process,
    RunFacts,
    Steps,
)
from dflashctl.runs.verdict import Rules, judge


@dataclass
class Case:
    name: str
    facts: RunFacts
    state: str
    sure: str | None
    says: list[str]
    never: list[str]
    next: list[str] | None


CASES: list[Case] = []


def CASE(
    name: str,
    *,
    state: str,
    sure: str | None = None,
    says: list[str] | None = None,
    never: list[str] | None = None,
    next: list[str] | None = None,
    **facts: Any,
) -> None:
    base: dict[str, Any] = {
        "id": "20261130T120000000-abcdef",
        "tag": "localtls",
        "created_age_s": 602.0,
        "started_age_s": 600.0,
        "sample_s": 0.5,
        "family": busy(),
    }
    CASES.append(Case(name, RunFacts(**(base | facts)), state, sure, says or [], never or [], next))


def busy(cpu_s: float = 0.6, count: int = 3) -> Family:
    return Family(
        count, cpu_s, 20 * 2**30, {"S": count - 1, "R": 1}, (Process(40, "python", "R", "", cpu_s),)
    )


def idle(state: str = "S", wchan: str = "futex_wait_queue", rss: int = 124 * 2**30) -> Family:
    return Family(1, 0.0, rss, {state: 1}, (Process(40, "python", state, wchan, 0.0, rss, 34),))


def beat(phase: str = "training", age_s: float = 1.0, **more: Any) -> Heartbeat:
    return Heartbeat(phase, age_s, **({"phase_age_s": 500.0, "deadline_s": 60.0, "step": 118} | more))


def steps(age_s: float = 2.0, **more: Any) -> Steps:
    return Steps(118, age_s, **({"median_step_s": 3.6, "gap_s": 3.6} | more))


def log(quiet_s: float = 2.0, **more: Any) -> Log:
    return Log(path="/workspace/train.log", size=9000, quiet_s=quiet_s, **more)


TLS_TEXT = "AssertionError … assert torch._C._is_key_in_tls(attr_name)"
TLS = {
    "exceptions": 6,
    "first_exception": Hit(TLS_TEXT, 214),
    "known": (Hit("assert torch._C._is_key_in_tls(attr_name)", 212, "cudagraph-trees-tls", 6, True),),
}
DEAD = ("drafter-0", "drafter-1", "drafter-2")

# fmt: off
# --- no contact ---------------------------------------------------------------------------------------------
CASE("unreachable is unknown, whatever was known before", contact="lost",
     contact_detail="ssh: no route to host",
     last_seen="running at step 118", last_seen_age_s=34.0, state="unknown",
     says=["no route to host", "last seen running at step 118 34 s ago"])
CASE("unreachable beats a failure seen earlier", contact="lost", ending=Ending("exited", 1), state="unknown")
CASE("a frozen container", contact="frozen", heartbeat=beat(age_s=900.0), state="frozen", sure="high",
     says=["its container is frozen"])
CASE("a stopped container hides how the run ended", contact="stopped", state="unknown", says=["stopped"])
CASE("a damaged record is named, not guessed", recorded=False, problems=("record.json: not JSON",),
     state="unknown",
     says=["record.json: not JSON"])

# --- ended --------------------------------------------------------------------------------------------------
CASE("a clean end with what was learnt", ending=Ending("exited", 0, wall_s=252.0, age_s=60.0),
     headline="acceptance length 1.02 -> 2.44", state="finished", sure="high",
     says=["exit code 0", "acceptance length 1.02 -> 2.44", "ran 4m12s"],
     next=["dflashctl runs show localtls"])
CASE("exit code 3", ending=Ending("exited", 3), log=log(), state="failed", says=["exit code 3"],
     next=["dflashctl logs localtls"])
CASE("a root cause on disk names the error", ending=Ending("exited", 1),
     root_cause="ValueError: NaN at step.py:80",
     state="failed", says=["exit code 1", "ValueError: NaN at step.py:80"])
CASE("a root cause that is known says what it means, once", ending=Ending("exited", 1), log=log(**TLS),
     root_cause="OutOfMemoryError: CUDA out of memory at step.py:80",
     root_cause_known=(KnownCause("cuda-oom", "A GPU has no room. The line says more.", do=("fewer",)),),
     state="failed", says=["known failure cuda-oom: A GPU has no room (dflashctl explain localtls)"],
     never=["The line says more", "log line 214"],
     next=["dflashctl explain localtls", "dflashctl logs localtls"])
CASE("a path with a release is shortened, and of more lines the first is told",
     ending=Ending("spawn_failed", why=f"cannot start /r/{'7f3a91c2' * 8}/x: no\nnext: deploy"),
     state="failed",
     says=["could not be started: cannot start /r/7f3a91c2/x: no"], never=["next:", "7f3a91c27f"])
CASE("exit code 0 with a root cause is no success", ending=Ending("exited", 0), root_cause="ValueError: x",
     state="failed", says=["ValueError: x"])
CASE("a known failure explains the exit", ending=Ending("exited", 1), log=log(**TLS), state="failed",
     says=["log line 214", "known: dflashctl explain localtls", "6 exceptions"],
     next=["dflashctl explain localtls", "dflashctl logs localtls"])
CASE("a traceback that nobody knows is shown", ending=Ending("exited", 1),
     log=log(exceptions=1, first_exception=Hit("KeyError: 'x'", 9)), state="failed",
     says=["log line 9: KeyError"])
CASE("killed by us, by whom and why", ending=Ending("killed", None, 15, killed_by="ann@laptop",
     reason="wrong lr"),
     state="killed", says=["killed by ann@laptop (wrong lr)"])
CASE("a kill of ours that ended with code 0 is still a kill", ending=Ending("killed", 0,
     killed_by="ann@laptop"),
     state="killed")
CASE("out of memory", ending=Ending("signalled", None, 9, oom=True), state="failed",
     says=["out-of-memory killer"])
CASE("a signal from a stranger, the container counted no kill", ending=Ending("signalled", None, 9,
     oom_kills=0, oom_kills_machine=3), state="failed",
     says=["SIGKILL, which dflashctl did not send"], never=["out-of-memory"])
CASE("a signal from a stranger, nobody counts", ending=Ending("signalled", None, 9), state="failed",
     says=["which dflashctl did not send; perhaps the kernel's out-of-memory killer did", "`dmesg`"])
CASE("a signal from a stranger, the machine counts", ending=Ending("signalled", None, 9, oom_kills_machine=2),
     state="failed",
     says=["did not send; the kernel's out-of-memory killer struck 2 times on this machine meanwhile"],
     never=["perhaps"])
CASE("a signal from a stranger, the machine counted none", ending=Ending("signalled", None, 9,
     oom_kills_machine=0), state="failed", says=["nor did the kernel's out-of-memory killer strike"],
     never=["perhaps", "dmesg"])
CASE("a SIGTERM from a stranger is nobody's lack of memory", ending=Ending("signalled", None, 15),
     state="failed", says=["SIGTERM, which dflashctl did not send"], never=["memory"])
CASE("a worker died for lack of memory and the program gave up", ending=Ending("exited", 1, oom_kills=1),
     state="failed", says=["exit code 1", "out-of-memory killer struck 1 time in its container meanwhile"])
CASE("a segmentation fault", ending=Ending("signalled", None, 11), state="failed", says=["SIGSEGV"])
CASE("a real-time signal has no name", ending=Ending("signalled", None, 64), state="failed",
     says=["SIGRTMAX"])
CASE("the program was not there", ending=Ending("spawn_failed", why="cannot start pyhton: not found"),
     state="failed",
     says=["could not be started: cannot start pyhton: not found"], never=["ran"])
CASE("an end that recorded nothing about itself", ending=Ending("exited"), state="failed",
     says=["neither code"])
CASE("cancelled before it began", cancelled=True, supervisor_recorded=False, state="cancelled")
CASE("an exit record wins over a reboot since", ending=Ending("exited", 0), rebooted=True, state="finished")

# --- not there yet, or gone ---------------------------------------------------------------------------------
CASE("queued", queued=True, supervisor_recorded=False, supervisor_alive=False, state="queued")
CASE("just launched", created_age_s=2.0, supervisor_recorded=False, supervisor_alive=False, state="starting")
CASE("launched long ago, and never heard of again", created_age_s=300.0, supervisor_recorded=False,
     supervisor_alive=False, state="lost", says=["the launch was cut off"])
CASE("rebooted before it started", created_age_s=300.0, supervisor_recorded=False, supervisor_alive=False,
     rebooted=True, state="lost", says=["restarted"])
CASE("the container was restarted under it", rebooted=True, supervisor_alive=False, family=Family(),
     heartbeat=beat(age_s=1.0), state="lost", says=["the container was restarted",
     "last reported step is 118"])
CASE("a restart does not look like a failure, whatever the log says", rebooted=True, supervisor_alive=False,
     log=log(**TLS), state="lost")
CASE("the supervisor is gone without a trace", supervisor_alive=False, family=Family(), state="lost",
     says=["gone without an exit record"])
CASE("the supervisor is gone and its orphans live", supervisor_alive=False, heartbeat=beat(), steps=steps(),
     state="lost", says=["3 processes of it still live"], next=["dflashctl kill localtls"])

# --- starting and compiling ---------------------------------------------------------------------------------
CASE("loading", heartbeat=beat("loading", step=None, phase_age_s=20.0), state="starting", sure="high",
     says=["loading for 20 s"])
CASE("reading data", heartbeat=beat("data", step=None, phase_age_s=30.0), state="starting")
CASE("a compile is no wedge", heartbeat=beat("compiling", 150.0, deadline_s=600.0, phase_age_s=150.0, step=0),
     family=busy(), log=log(150.0), state="compiling", sure="high", says=["compiling for 150 s"])
CASE("a compile without CPU time (a compiler in a pool)", heartbeat=beat("compiling", 3.0, phase_age_s=200.0),
     family=idle(), log=log(200.0), state="compiling")
CASE("a compile past its deadline", heartbeat=beat("compiling", 700.0, deadline_s=600.0, phase_age_s=700.0),
     family=idle(), log=log(700.0), state="wedged",
     says=["no heartbeat for 11m40s in phase compiling (it allows 10m00s)"])
CASE("a compile that takes half an hour but beats", heartbeat=beat("compiling", 2.0, phase_age_s=2000.0),
     state="slow", says=["compiling for 33m20s"])
CASE("threads died while compiling", heartbeat=beat("compiling", 2.0, phase_age_s=90.0, dead_threads=DEAD),
     log=log(80.0, **TLS), state="wedged", says=["3 drafter threads gone"])
CASE("a thread that died a moment ago is not a wedge yet",
     heartbeat=beat("compiling", 2.0, phase_age_s=9.0, dead_threads=DEAD), state="compiling", sure="medium")

# --- running ------------------------------------------------------------------------------------------------
CASE("healthy", heartbeat=beat(total_steps=600), steps=steps(), log=log(), state="running", sure="high",
     says=["step 118 of 600, 3.6 s each", "heartbeat 1.0 s old"], next=[])
CASE("healthy, GPU at 0 % at the moment of the look", heartbeat=beat(), steps=steps(),
     gpus=(GpuUse(0, 0, 60000),), state="running", sure="high", never=["0 %"])
CASE("reports each tenth step: a pause of 30 s is usual", heartbeat=beat(), steps=steps(30.0, gap_s=36.0),
     state="running", sure="high")
CASE("the heartbeat is ahead of the last report", heartbeat=beat(step=125), steps=steps(200.0),
     state="running")
CASE("evaluating takes long and makes no step", heartbeat=beat("evaluating", phase_age_s=300.0),
     steps=steps(300.0),
     log=log(300.0), state="running", sure="high", says=["evaluating for 300 s"])
CASE("saving a checkpoint over a slow disk", heartbeat=beat("saving", phase_age_s=240.0), steps=steps(240.0),
     family=idle("D", "balance_dirty_pages"), state="running")
CASE("training again after an evaluation of five minutes", heartbeat=beat(phase_age_s=2.0),
     steps=steps(305.0),
     state="running", sure="high")
CASE("no step yet, training began a moment ago", heartbeat=beat(step=None, phase_age_s=5.0), state="running",
     sure="medium")
CASE("an exception was handled and steps go on", heartbeat=beat(), steps=steps(),
     log=log(exceptions=1, first_exception=Hit("ConnectionError: retry", 3)), state="running")
CASE("a fatal line while steps go on lowers the confidence", heartbeat=beat(), steps=steps(), log=log(**TLS),
     state="running", sure="medium", says=["log line 214"], next=["dflashctl explain localtls"])
CASE("the queue is full because the drafter is the slower half", heartbeat=beat(queues={"hidden": (8, 8)}),
     steps=steps(), state="running", sure="high", never=["queue"])
CASE("a wall clock set back an hour changes nothing", heartbeat=beat(), steps=steps(), log=log(0.0),
     state="running",
     created_age_s=0.0, started_age_s=0.0, sure="high")
CASE("killed a moment ago", heartbeat=beat(), steps=steps(), kill_requested_age_s=4.0, state="running",
     says=["its end was asked for 4.0 s ago"])
CASE("the leader has ended, ranks remain", heartbeat=beat(), leader_alive=False, state="running", sure="low",
     says=["the program has ended; 3 processes are left"])
CASE("everybody has ended, the record is being written", leader_alive=False, family=Family(), state="running",
     sure="low", says=["about to record"])

CASE("the loss is NaN: it runs, and it is said", heartbeat=beat(not_finite=("loss",)), steps=steps(),
     state="running", says=["not a finite number: loss"])

# --- slow ---------------------------------------------------------------------------------------------------
CASE("late, but not yet wedged", heartbeat=beat(), steps=steps(20.0), state="slow",
     says=["no step for 20 s (median 3.6 s)"])
CASE("steps take five times as long as before", heartbeat=beat(), steps=steps(recent_step_s=18.0),
     state="slow",
     says=["a step takes 18 s now, 3.6 s over the run"])
CASE("waiting for data: the queue is empty", heartbeat=beat(queues={"hidden": (0, 8)}), steps=steps(130.0),
     family=idle(), state="slow", says=["waiting for input: queue hidden empty (0 of 8)"])
CASE("a fast step of 20 ms: two seconds are no pause", heartbeat=beat(),
     steps=steps(2.0, median_step_s=0.02, gap_s=0.02), state="running")
CASE("the heartbeat thread is starved, but steps come", heartbeat=beat(age_s=70.0), steps=steps(3.0),
     state="slow",
     sure="low", says=["but steps are still reported"])
CASE("the heartbeat is late, but the log grows", heartbeat=beat(age_s=70.0), steps=steps(70.0),
     log=log(grown=400),
     state="slow", sure="low", says=["but its log grows"])

# --- wedged -------------------------------------------------------------------------------------------------
CASE("the historical one: threads dead, queues full, GPU at 100 %",
     heartbeat=beat(dead_threads=DEAD, queues={"hidden": (8, 8)}), steps=steps(251.0), log=log(250.0, **TLS),
     family=idle(), gpus=tuple(GpuUse(i, 100, 65000) for i in range(8)), state="wedged", sure="high",
     says=["no step for 251 s (median 3.6 s)", "3 drafter threads gone", "log line 214: AssertionError",
           "known: dflashctl explain localtls", "6 exceptions", "queue hidden full (8 of 8)",
           "no CPU time in 0.5 s (state S in futex_wait_queue)",
           "GPU 0-7 at 100 %, which alone proves nothing"],
     next=["dflashctl explain localtls", "dflashctl stacks localtls", "dflashctl logs localtls -n 50",
           "dflashctl kill localtls"])
CASE("drafters that died before the first step", heartbeat=beat(step=None, phase_age_s=20.0,
     dead_threads=DEAD, queues={"hidden": (2, 2)}), log=log(20.0, **TLS), state="wedged", sure="high",
     says=["no step since training began 20 s ago", "3 drafter threads gone", "queue hidden full"])
CASE("the first step takes long, and everybody lives", heartbeat=beat(step=None, phase_age_s=200.0),
     family=idle(), state="running", sure="medium")
CASE("dead threads shorten the patience", heartbeat=beat(dead_threads=("loader",)), steps=steps(20.0),
     state="wedged",
     sure="high", says=["1 loader thread gone"])
CASE("a full queue and a pause", heartbeat=beat(queues={"hidden": (8, 8)}), steps=steps(70.0), state="wedged",
     says=["queue hidden full"])
CASE("it beats, it computes, it makes no step (a spin)", heartbeat=beat(), steps=steps(200.0),
     family=busy(3.0),
     gpus=(GpuUse(0, 100, 65000),), state="wedged", sure="medium", says=["though its heartbeat 1.0 s old"])
CASE("no CPU time and no step for a minute", heartbeat=beat(), steps=steps(70.0), family=idle(),
     state="wedged")
CASE("an empty queue explains a long pause, not an endless one", heartbeat=beat(queues={"hidden": (0, 8)}),
     steps=steps(1300.0), family=idle(), state="wedged", started_age_s=3000.0)
CASE("heartbeat gone, no CPU", heartbeat=beat(age_s=95.0), steps=steps(95.0), log=log(95.0), family=idle(),
     state="wedged", sure="high", says=["no heartbeat for 95 s in phase training (it allows 60 s)"])
CASE("heartbeat just gone, process busy", heartbeat=beat(age_s=65.0), steps=steps(65.0), log=log(65.0),
     state="wedged", sure="medium")
CASE("stopped by a signal", heartbeat=beat(age_s=5.0), family=idle("T", "do_signal_stop"),
     steps=steps(5.0), log=log(5.0),
     state="wedged", sure="high", says=["SIGSTOP"])
CASE("in uninterruptible sleep", heartbeat=beat(age_s=130.0), steps=steps(130.0), family=idle("D",
     "nfs_wait_bit_killable"),
     log=log(130.0), state="wedged", says=["state D in nfs_wait_bit_killable"])
CASE("a watcher has seen one step for long, and there are no reports", heartbeat=beat(median_step_s=2.0),
     step_seen_age_s=150.0, state="wedged")
CASE("an NCCL timeout while the processes linger", heartbeat=beat(), steps=steps(30.0), state="wedged",
     sure="high",
     log=log(known=(Hit("Watchdog caught collective operation timeout", 900, "nccl-timeout", 8, True),)),
     says=["log line 900"])

# --- programs without a heartbeat ---------------------------------------------------------------------------
CASE("started a moment ago", started_age_s=3.0, log=Log(size=0, quiet_s=3.0), state="starting")
CASE("its log grows", log=log(grown=80), state="running", sure="low",
     says=["no heartbeat: judged by its log and CPU"])
CASE("its log tells steps", log=log(step=118), step_regex=True, state="running", sure="medium",
     says=["step 118", "judged by the steps in its log"])
CASE("silent but busy", log=log(200.0), state="running", sure="low", says=["120 % of a core busy"])
CASE("busy and silent for an hour", log=log(3600.0), started_age_s=4000.0, state="slow", sure="low")
CASE("silent and idle for six minutes: waiting or stuck, nobody can tell", log=log(360.0), family=idle(),
     state="slow",
     sure="low", says=["silent for 360 s"])
CASE("silent and idle for an hour", log=log(3600.0), started_age_s=4000.0, family=idle(), state="wedged",
     sure="low")
CASE("exceptions in the log, then silence (no heartbeat)", log=log(130.0, **TLS), family=idle(),
     state="wedged",
     sure="medium", says=["log line 214", "6 exceptions"])
CASE("a fatal line, then silence, one thread still polling", log=log(130.0, **TLS), family=busy(0.05),
     state="wedged")
CASE("an unknown exception and two idle minutes", family=idle(), state="wedged", sure="low",
     log=log(130.0, exceptions=1, first_exception=Hit("KeyError: 'x'", 3)))
CASE("regular steps, then silence and no CPU", log=log(200.0, step=100), family=idle(), state="wedged",
     sure="low",
     says=["no step for at least 200 s (usually 4.0 s)"])
CASE("a step each 5 s, then 20 s of silence", log=log(20.0, step=118), state="slow", sure="low",
     says=["no step for at least 20 s (usually 4.9 s)"])
CASE("it computes for five minutes and tells no step: perhaps an evaluation", log=log(300.0, step=118),
     state="slow")
CASE("it computes for half an hour and tells no step", log=log(1800.0, step=118), started_age_s=2400.0,
     state="wedged")
CASE("a fatal line and half a minute without CPU time", log=log(40.0, **TLS), family=idle(), state="wedged")
CASE("a fatal line, and it goes on", log=log(2.0, grown=10, **TLS), state="running", sure="low",
     says=["log line 214"])
CASE("its log announces a compile: silence after it says little", family=idle(), state="running", sure="low",
     log=log(200.0, step=118), announced="compiling forward (cudagraphs=False)",
     says=["its log announces a pause: compiling forward (cudagraphs=False)"])
CASE("no CPU time on a machine that has none to spare is no sign", heartbeat=beat(), steps=steps(70.0),
     family=Family(1, 0.0, 2**30, {"R": 1}, (Process(40, "python", "R"),)), state="slow")
CASE("a program of logs alone that waits a minute and a half for data", family=idle(), state="slow",
     log=log(90.0, step=118), says=["no CPU time in 0.5 s"])
CASE("the same silence without that line", family=idle(), state="wedged", log=log(200.0, step=118))
CASE("an announced pause does not excuse an hour without CPU time", family=idle(), state="wedged",
     log=log(3600.0, step=118), started_age_s=4000.0, announced="evaluating")
CASE("the recipe shortens the patience with a program that spins", log=log(40.0, step=118), state="wedged",
     rules={"busy_quiet_s": 30.0, "alone_factor": 5.0})
CASE("a watcher sees the log grow and the step stay", log=log(1.0, step=118, grown=80), state="slow",
     sure="low", step_seen_age_s=130.0, says=["step 118 for 130 s (usually 5.1 s), though its log grows"])
CASE("and for less than two minutes it says nothing", log=log(1.0, step=118, grown=80), state="running",
     step_seen_age_s=110.0)
CASE("nor while the log announces a pause", log=log(1.0, step=118, grown=80), state="running",
     step_seen_age_s=900.0, announced="evaluating 3 of 24")
CASE("the recipe makes the log its heartbeat: a program that spins", log=log(21.0, step=118), state="wedged",
     sure="medium", rules={"log_deadline_s": 20.0},
     says=["no step for at least 21 s", "the recipe allows 20 s", "120 % of a core busy", "no heartbeat: "])
CASE("that deadline has not passed", log=log(19.0, step=118), state="slow", rules={"log_deadline_s": 20.0})
CASE("nor does it count while the log announces a pause", log=log(200.0, step=118), state="running",
     rules={"log_deadline_s": 20.0}, announced="evaluating")
CASE("nor for a program that does write a heartbeat", heartbeat=beat("evaluating"), log=log(200.0),
     state="running", rules={"log_deadline_s": 20.0})
CASE("it counts for a program whose steps nobody finds", log=log(21.0), family=idle(), state="wedged",
     rules={"log_deadline_s": 20.0}, says=["its log is silent for 21 s (the recipe allows 20 s)"])
CASE("the recipe lengthens the patience with a slow one", heartbeat=beat(), steps=steps(250.0), family=idle(),
     state="running", rules={"slow_min_s": 300.0, "weak_min_s": 600.0, "alone_min_s": 600.0})
CASE("a threshold of a later version is left out", heartbeat=beat(), steps=steps(), state="running",
     rules={"brand_new_s": 1.0})
CASE("no log at all", log=None, state="running", sure="low", says=["it has no log"])
CASE("the log was removed", log=Log(exists=False), state="running", sure="low")

# fmt: on


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdict(case: Case) -> None:
    verdict = judge(case.facts)
    told = "\n".join(verdict.evidence)
    assert (verdict.state, case.sure or verdict.confidence) == (case.state, verdict.confidence), told
    for piece in case.says:
        assert piece in told
    for piece in case.never:
        assert piece not in told
    assert verdict.evidence, "no state without its evidence"
    if case.next is not None:
        assert list(verdict.next) == case.next


def test_the_table_is_large_and_covers_every_state() -> None:
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.state for case in CASES} == {
        "queued", "starting", "compiling", "running", "slow", "wedged", "frozen", "finished", "failed",
        "killed", "cancelled", "lost", "unknown",
    }  # fmt: skip


def test_the_page_names_each_threshold_with_its_usual_value() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verdict.md").read_text()
    told = {}
    for names, values in re.findall(r"^\| (`.*?`) \| ([\d., ]+|none) \|", page, re.MULTILINE):
        usual = map(float, values.replace("none", "inf").split(","))
        told |= dict(zip(re.findall(r"`(\w+)`", names), usual, strict=True))
    assert told == vars(Rules())
