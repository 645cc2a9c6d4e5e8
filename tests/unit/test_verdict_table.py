"""Run with: pytest tests/unit/test_verdict_table.py. A row a situation: facts, and what is said of them.

Programs that write no heartbeat: test_verdict_of_logs.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from verdict_kit import DEAD, TLS, Case, Table, beat, busy, idle, log, steps

from dflashctl.runs.facts import Ending, Family, GpuUse, Hit, KnownCause
from dflashctl.runs.verdict import Rules

CASE = Table()

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
CASE("a reason of several lines is told whole", ending=Ending("killed", None, 15, killed_by="ann@laptop",
     reason="wrong lr:\n3e-2"),
     state="killed", says=["killed by ann@laptop (wrong lr: 3e-2)"])
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

# fmt: on


@pytest.mark.parametrize("case", CASE, ids=lambda case: case.name)
def test_verdict(case: Case) -> None:
    case.check()


def test_the_table_is_large_and_covers_every_state() -> None:
    assert len(CASE) >= 40
    assert len({case.name for case in CASE}) == len(CASE)
    assert {case.state for case in CASE} == {
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
