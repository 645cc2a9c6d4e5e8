"""Run with: pytest tests/unit/test_verdict_soak.py. Half an hour of simulated time, no false alarm.

Each simulated run is looked at every two seconds. It writes heartbeats, reports and log lines as the trainer
does; the pauses are those of real life: compiles, checkpoints, evaluations, waits for data, slow stretches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from dflashctl.runs.facts import Family, Heartbeat, Log, RunFacts, Steps
from dflashctl.runs.verdict import judge

LOOK_S, END_S, BEAT_S, MEDIAN_S = 2.0, 1800.0, 5.0, 3.6


@dataclass
class Moment:
    """What the run does now, and since when."""

    phase: str
    since: float
    step: int
    last_step_at: float
    queue: int = 4
    busy: bool = True


Behaviour = Callable[[random.Random], Iterator[tuple[str, float, int, bool]]]
"""Yields (phase, seconds, queue depth, busy); in phase training, one step ends with it."""


def healthy(rng: random.Random) -> Iterator[tuple[str, float, int, bool]]:
    yield "loading", rng.uniform(5, 90), 0, True
    yield "compiling", rng.uniform(30, 400), 0, rng.random() < 0.5
    while True:
        yield "training", rng.gauss(MEDIAN_S, 0.2), rng.randint(0, 8), True


def saving(rng: random.Random) -> Iterator[tuple[str, float, int, bool]]:
    while True:
        for _ in range(rng.randint(5, 60)):
            yield "training", MEDIAN_S, 4, True
        yield "saving", rng.uniform(1, 280), 8, False


def evaluating(rng: random.Random) -> Iterator[tuple[str, float, int, bool]]:
    while True:
        for _ in range(20):
            yield "training", MEDIAN_S, 4, True
        yield "evaluating", rng.uniform(20, 600), 0, True


def waiting_for_data(rng: random.Random) -> Iterator[tuple[str, float, int, bool]]:
    while True:
        for _ in range(rng.randint(3, 30)):
            yield "training", MEDIAN_S, 4, True
        yield "training", rng.uniform(20, 280), 0, False


def slow(rng: random.Random) -> Iterator[tuple[str, float, int, bool]]:
    for _ in range(40):
        yield "training", MEDIAN_S, 4, True
    while True:
        yield "training", rng.uniform(5, 14) * MEDIAN_S, 3, True


def wedging(rng: random.Random) -> Iterator[tuple[str, float, int, bool]]:
    for _ in range(40):
        yield "training", MEDIAN_S, 4, True
    yield "training", 10 * END_S, 8, False


def simulate(behaviour: Behaviour, seed: int) -> Iterator[tuple[float, str]]:
    """(time, state) at every look."""
    rng = random.Random(seed)
    parts = behaviour(rng)
    now = until = 0.0
    moment = Moment("loading", 0.0, 0, 0.0)
    while now < END_S:
        while until <= now:
            if moment.phase == "training" and until > 0:
                moment.step, moment.last_step_at = moment.step + 1, until
            phase, takes, queue, busy = next(parts)
            if phase != moment.phase:
                moment.phase, moment.since = phase, until
            moment.queue, moment.busy = queue, busy
            until += max(takes, 0.05)
        yield now, judge(look(moment, now)).state
        now += LOOK_S


def look(moment: Moment, now: float) -> RunFacts:
    beat = Heartbeat(
        moment.phase,
        now % BEAT_S,
        phase_age_s=now - moment.since,
        deadline_s=60.0,
        step=moment.step,
        queues={"hidden": (moment.queue, 8)},
    )
    steps = Steps(moment.step, now - moment.last_step_at, MEDIAN_S, MEDIAN_S) if moment.step else None
    cpu_s = 0.5 if moment.busy else 0.0
    return RunFacts(
        id="20261130T120000000-abcdef",
        tag="soak",
        started_age_s=now,
        heartbeat=beat,
        steps=steps,
        log=Log(size=1, quiet_s=now - moment.last_step_at),
        family=Family(2, cpu_s, 2**30, {"S": 2}),
        sample_s=0.5,
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("behaviour", [healthy, saving, evaluating, waiting_for_data, slow])
def test_no_false_alarm_in_half_an_hour(behaviour: Behaviour, seed: int) -> None:
    states = [state for _, state in simulate(behaviour, seed)]
    assert len(states) == END_S / LOOK_S
    assert set(states) <= {"starting", "compiling", "running", "slow"}


def test_a_slow_stretch_is_called_slow() -> None:
    states = [state for now, state in simulate(slow, 1) if now > 400]
    assert states.count("slow") > 0.4 * len(states)


def test_a_wedge_is_found_within_two_minutes_and_stays() -> None:
    stuck_at = 41 * MEDIAN_S
    states = list(simulate(wedging, 1))
    assert all(state != "wedged" for now, state in states if now < stuck_at)
    assert all(state == "wedged" for now, state in states if now > stuck_at + 120)
