"""Run with: pytest tests/unit/test_verdict_of_logs.py. Verdicts on programs without a heartbeat.

A row a situation: facts, and what is said of them.
"""

from __future__ import annotations

import pytest
from verdict_kit import TLS, Case, Table, beat, busy, idle, log, steps

from dflashctl.runs.facts import Family, Hit, Log, Process

CASE = Table()

# fmt: off
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


@pytest.mark.parametrize("case", CASE, ids=lambda case: case.name)
def test_verdict(case: Case) -> None:
    case.check()
