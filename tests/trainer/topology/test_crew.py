"""Threads that wait for each other: deadlines, first failures, order and bounds of the hand-over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from trainer.topology.crew import Crew, WaitedTooLong
from trainer.topology.handover import Handover

LONG_S = 60.0


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew(lambda: None)
    yield made
    made.end()
    assert made.alive() == []


def test_a_failure_ends_the_main_threads_wait_with_that_very_error(crew: Crew) -> None:
    def fails() -> None:
        raise ValueError("tap 61 is out of range")

    crew.start("target-3", fails)
    with pytest.raises(ValueError, match="tap 61") as caught:
        crew.wait(lambda: False, LONG_S, "what never comes")
    assert caught.value.__notes__ == ["in thread target-3"]
    assert any(frame.name == "fails" for frame in caught.traceback)


def test_the_first_failure_is_told_and_the_other_threads_leave_their_waits(crew: Crew) -> None:
    waiting = threading.Barrier(3)

    def waits() -> None:
        waiting.wait(LONG_S)
        crew.wait(lambda: False, LONG_S, "what never comes")
        raise AssertionError("not reached")

    def fails() -> None:
        waiting.wait(LONG_S)
        raise KeyError("the cause")

    for name, work in (("a", waits), ("b", waits), ("c", fails)):
        crew.start(name, work)
    with pytest.raises(KeyError, match="the cause"):
        crew.wait(lambda: False, LONG_S, "what never comes")


def test_a_wait_that_is_too_long_says_for_what_and_who_lives(crew: Crew) -> None:
    stop = threading.Event()
    crew.start("drafter-1", lambda: stop.wait(LONG_S) and None)
    with pytest.raises(
        WaitedTooLong, match=r"step 7 of drafter-1: nothing for 0 s; alive: drafter-1"
    ) as caught:
        crew.wait(lambda: False, 0.05, "step 7 of drafter-1")
    assert caught.value.where == "MainThread"
    stop.set()


def test_a_worker_that_waits_too_long_ends_the_run_under_its_name(crew: Crew) -> None:
    crew.start("target-0", lambda: crew.wait(lambda: False, 0.05, "room"))
    with pytest.raises(WaitedTooLong, match="room: nothing") as caught:
        crew.wait(lambda: False, LONG_S, "anything")
    assert caught.value.where == "target-0"


def test_the_main_thread_beats_while_it_waits_and_a_signal_ends_the_wait() -> None:
    class Asked(Exception):
        pass

    beats: list[float] = []

    def beat() -> None:
        beats.append(time.monotonic())
        if len(beats) == 3:
            raise Asked

    with pytest.raises(Asked):
        Crew(beat).wait(lambda: False, LONG_S, "anything")
    assert len(beats) == 3


@pytest.mark.parametrize("producers", [1, 3])
def test_batches_come_in_order_and_never_more_than_the_window_ahead(crew: Crew, producers: int) -> None:
    handover: Handover[int] = Handover(crew, depth=2, wait_s=LONG_S, first=5)
    made: list[int] = []

    def produce() -> None:
        while True:
            number = handover.claim()
            made.append(number)
            handover.put(number, number * 10)

    for number in range(producers):
        crew.start(f"target-{number}", produce)
    for number in range(5, 105):
        assert handover.take() == number * 10
        assert handover.waiting() <= 2
        # What is being made, or waits for room, is one batch a producer.
        assert max(made) <= number + 1 + 2 + producers
    assert sorted(made)[:100] == list(range(5, 105)) and len(set(made)) == len(made)


def test_a_producer_that_is_late_keeps_its_place(crew: Crew) -> None:
    handover: Handover[str] = Handover(crew, depth=2, wait_s=LONG_S)
    first, second = handover.claim(), handover.claim()
    handover.put(second, "second")
    crew.start("late", lambda: handover.put(first, "first"))
    assert [handover.take(), handover.take()] == ["first", "second"]


def test_no_producer_is_said_with_the_batchs_number(crew: Crew) -> None:
    with pytest.raises(WaitedTooLong, match="batch 3 of hidden states, of no thread: nothing"):
        Handover[int](crew, depth=1, wait_s=0.05, first=3).take()


def test_a_batch_that_does_not_come_is_said_with_who_makes_it(crew: Crew) -> None:
    """And not by a producer that waits for room meanwhile, however long."""
    handover: Handover[int] = Handover(crew, depth=1, wait_s=0.3)
    claimed, release = threading.Event(), threading.Event()

    def hangs() -> None:
        number = handover.claim()
        claimed.set()
        handover.put(number, release.wait(LONG_S))

    def produces() -> None:
        while True:
            number = handover.claim()
            handover.put(number, number)

    crew.start("target-0", hangs)
    assert claimed.wait(LONG_S)
    crew.start("target-1", produces)
    with pytest.raises(WaitedTooLong, match="batch 0 of hidden states, of target-0: nothing for 0 s"):
        handover.take()
    release.set()
    assert [handover.take() for _ in range(3)] == [True, 1, 2]
