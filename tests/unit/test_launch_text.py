"""Run with: pytest tests/unit/test_launch_text.py. What a launch says of itself, to people and programs."""

from __future__ import annotations

from typing import Any

import pytest

from dflashctl.cli.launchtext import end_document, show_answer, show_end
from dflashctl.runs.ending import End, ended_as
from dflashctl.runs.launch import LaunchPlan
from dflashctl.runs.news import News

RECORD = {
    "tag": "localtls", "recipe": "threadwarm", "variant": None, "release": None, "git": None, "gpus": [],
    "log": "/workspace/train.log", "cwd": "/workspace",
}  # fmt: skip
PLAN = LaunchPlan("20261130T120000000-abcdef", "ct200", RECORD, "", None, "/state", False)
EXITED = {"cause": "exited", "code": 0, "wall_s": 3.1}
FAILED = {"cause": "exited", "code": 1, "wall_s": 0.2}
KILLED = {"cause": "killed", "code": 0, "killed_by": {"who": "ann@laptop", "reason": ""}, "wall_s": 9.0}
LEFT_A_CAUSE = "failed: exit code 0 after 3.1 s, but the program left a root cause: ValueError: x"
EVIDENCE = ("no step for 251 s", "3 threads gone")
OOM = {"cause": "signalled", "signal": 9, "oom": True, "wall_s": 9.0}


def answer(**changes: Any) -> dict[str, Any]:
    usual = {"outcome": "started", "leader": {"pid": 40}, "log": "/workspace/train.log", "rotated": None}
    return {**usual, "exit": None, "log_tail": "", "root_cause": None, "why": None, **changes}


@pytest.mark.parametrize(
    ("given", "outcome", "why", "code"),
    [
        (answer(), "started", None, None),
        (answer(outcome="already_running"), "already_running", None, None),
        (answer(exit=EXITED), "finished", "exit code 0 after 3.1 s", None),
        (answer(exit=FAILED, log_tail="boom"), "failed", "failed: exit code 1 after 0.2 s", 7),
        (answer(exit=KILLED), "killed", "was killed by ann@laptop after 9.0 s", 7),
        (answer(outcome="already_ended", exit=FAILED), "failed", "failed: exit code 1 after 0.2 s", 7),
        (answer(exit=EXITED, root_cause="ValueError: x"), "failed", LEFT_A_CAUSE, 7),
        (answer(outcome="failed", why="cannot start pyhton"), "failed", "cannot start pyhton", 7),
        (answer(outcome="starting"), "starting", None, 7),
    ],
)
@pytest.mark.parametrize("quiet", [True, False])
def test_the_document_says_what_became_of_it(
    given: dict[str, Any], outcome: str, why: str | None, code: int | None, quiet: bool, capsys: Any
) -> None:
    """`started` is said of a run that lives, and of no other."""
    made = show_answer(PLAN, given, seconds=0.4, quiet=quiet)
    assert (made.document["outcome"], made.document["why"]) == (outcome, why)
    assert made.document["exit"] == given["exit"]
    assert (int(made.error.exit_code) if made.error else None) == code
    assert (capsys.readouterr().out == "") == (quiet or outcome == "starting" or given["outcome"] == "failed")


def test_the_end_that_was_waited_for_is_the_documents_last_word() -> None:
    assert end_document(End(OOM, None, "")) == {
        "outcome": "failed", "why": "died of SIGKILL after 9.0 s: out of memory", "exit": OOM,
    }  # fmt: skip
    lost = End(None, "the supervisor is gone, and nobody recorded the end", "")
    assert end_document(lost) == {"outcome": "lost", "why": lost.problem, "exit": None}


@pytest.mark.parametrize(
    ("ended", "state"),
    [(EXITED, "finished"), (FAILED, "failed"), (KILLED, "killed"), (OOM, "failed"), (None, "lost"),
     ({"cause": "spawn_failed", "why": "x"}, "failed"), ({}, "failed")],
)  # fmt: skip
def test_an_end_in_the_words_of_status(ended: dict[str, Any] | None, state: str) -> None:
    assert ended_as(ended) == state


def test_a_run_that_is_waited_for_and_gets_nowhere_fails_the_wait_and_has_not_ended() -> None:
    news = News("ct200", PLAN.run_id, "localtls", "wedged", EVIDENCE, ("a", "b"))
    end = End(None, None, "", wedged=news)
    assert end_document(end) == {"outcome": "wedged", "why": "; ".join(EVIDENCE), "exit": None}
    error = show_end(PLAN, end, quiet=True)
    assert error is not None and error.exit_code == 7 and error.next == "a · b"
    assert "goes on" in error.what and "no step for 251 s" in error.what
