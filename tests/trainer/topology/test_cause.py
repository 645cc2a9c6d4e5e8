"""Whose failure was the first: rules over what ranks leave."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.topology.cause import Trace, despite_stop, root_cause

KILL, TERM = -9, -15


def error(text: str, wall: float) -> dict[str, Any]:
    return {"error": text, "wall": wall, "where": "x.py:1"}


LOST = error("PeerLost: rank 0 of 3: gradients of step 5: Connection closed by peer", 1.0)


@pytest.mark.parametrize(
    ("traces", "rank", "words"),
    [
        ([Trace(0, phase="done"), Trace(1, phase="done")], None, ""),
        # Whose own error came first, although a peer's consequence was written before it.
        ([Trace(0, 76, LOST), Trace(1, 1, error("KeyError: 3", 2.0)), Trace(2, TERM)], 1, "KeyError: 3"),
        ([Trace(0, 1, error("B: late", 9.0)), Trace(1, 1, error("A: early", 2.0))], 1, "A: early"),
        (
            [Trace(0, 2, error("ConfigError: both", 1.0)), Trace(1, 2, error("ConfigError: both", 1.1))],
            0,
            "both",
        ),
        # Killed: by a signal that the agent did not send, and before the agent's own SIGKILL.
        (
            [Trace(0, 76, LOST), Trace(1, KILL, phase="training", step=5)],
            1,
            "training, step 5: ended by SIGKILL",
        ),
        ([Trace(0, KILL, died_at=30.0), Trace(1, KILL, died_at=14.0), Trace(2, TERM)], 1, "ended by SIGKILL"),
        (
            [Trace(0, 76, LOST), Trace(1, -11), Trace(2, 143)],
            1,
            "before its first heartbeat: ended by SIGSEGV",
        ),
        # Left early with a good exit status.
        ([Trace(0, 76, LOST), Trace(1, 0, phase="training")], 1, "exit status 0 before the run was complete"),
        ([Trace(0, 0, phase="done"), Trace(1, 0, phase="loading")], 1, "exit status 0 before"),
        ([Trace(0, 76, LOST), Trace(1, 3, phase="training"), Trace(2, TERM)], 1, "exit status 3 and no word"),
        # Hung: the one that came least far, not one that waited for it; killed for that, not by a stranger.
        (
            [
                Trace(0, KILL, phase="training", step=6, hung_s=61.0),
                Trace(1, KILL, phase="training", step=5, hung_s=60.5),
            ],
            1,
            "no heartbeat for 60 s",
        ),
        (
            [Trace(0, 76, LOST), Trace(1, KILL, phase="training", step=5, hung_s=64.0)],
            1,
            "no heartbeat for 64 s",
        ),
        # Found to hang when another had gone already: in a long call, and nobody answers it any more.
        (
            [
                Trace(0, KILL, LOST, phase="training", step=2, hung_s=4.1, hung_at=13.5),
                Trace(1, 0, phase="training", step=2, died_at=12.0),
            ],
            1,
            "exit status 0 before",
        ),
        (
            [
                Trace(0, KILL, phase="training", step=2, hung_s=4.1, hung_at=13.5),
                Trace(1, KILL, phase="training", step=2, died_at=12.0),
            ],
            1,
            "ended by SIGKILL",
        ),
        # Gone because one hangs: with a word of its lost peer, by the agent's signal, or only afterwards.
        (
            [
                Trace(0, KILL, phase="training", step=5, hung_s=61.0, hung_at=13.5),
                Trace(1, 76, LOST, phase="training", step=5, died_at=12.0),
                Trace(2, TERM, phase="training", step=5, died_at=13.0),
                Trace(3, KILL, phase="training", step=5, died_at=14.0),
                Trace(4, phase="done", died_at=11.0),
            ],
            0,
            "no heartbeat for 61 s",
        ),
        # Nothing but consequences: the earliest death.
        ([Trace(0, 76, LOST, died_at=5.0), Trace(1, TERM, died_at=5.2)], 0, "PeerLost"),
        ([Trace(0, 76, LOST, died_at=5.0), Trace(1, 143, died_at=4.9)], 1, "ended by SIGTERM"),
    ],
)
def test_the_first_failure(traces: list[Trace], rank: int | None, words: str) -> None:
    found = root_cause(traces)
    if rank is None:
        assert found is None
        return
    assert found is not None and found["rank"] == rank and words in found["error"]


def test_an_error_may_be_anothers_fault() -> None:
    """Each rank knows that the sum is not finite, and whose part of it was not; the first one says so."""
    told = error("TrainerError: the gradient is not finite: rank 2 (3)", 1.0) | {"rank": 2}
    found = root_cause([Trace(0, 1, told), Trace(1, 1, told | {"wall": 1.1}), Trace(2, TERM)])
    assert found is not None and found["rank"] == 2


def test_where_a_rank_hung_is_its_traceback() -> None:
    found = root_cause([Trace(0, KILL, phase="loading", hung_s=301.0, stacks="Current thread 0x1")])
    assert found is not None and found["traceback"] == "Current thread 0x1"


@pytest.mark.parametrize(
    ("traces", "words"),
    [
        ([Trace(0, 143), Trace(1, 130), Trace(2, KILL)], None),
        ([Trace(0, 143), Trace(1, 76, LOST)], None),
        ([Trace(0, 1, error("TrainerError: cannot be written", 3.0)), Trace(1, 143)], "cannot be written"),
        (
            [Trace(0, KILL, phase="saving", hung_s=300.5, allowed_s=300.0), Trace(1, 143)],
            "saving: no heartbeat for 300 s (saving allows 300 s): it hung",
        ),
    ],
)
def test_a_run_that_was_told_to_stop_may_still_fail(traces: list[Trace], words: str | None) -> None:
    found = despite_stop(traces)
    assert found is None if words is None else found is not None and words in found["error"]
