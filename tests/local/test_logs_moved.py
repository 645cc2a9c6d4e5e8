"""Run with: pytest tests/local/test_logs_moved.py. logrotate and people move a log away under the program,
which goes on writing to the file that it has open: that file is the log, whatever lies at its old place."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent import AgentError
from dflashctl.agent.history import listing, pull
from dflashctl.agent.logs import logread, logsearch, ownlog
from dflashctl.agent.runs import observe

STEPS = """
import os, time
number = 0
while True:
    number += 1
    print("step", number, flush=True)
    while not os.path.exists(f"go{number}"): time.sleep(0.01)
"""


def rotated(log: Path) -> None:
    """As logrotate's `create` does."""
    log.rename(log.with_name(log.name + ".1"))
    log.touch()


MOVES: dict[str, Callable[[Path], object]] = {
    "rotated": rotated,
    "renamed": lambda log: log.rename(log.with_name("away")),
    "removed": lambda log: log.unlink(),
    "removed and made anew": lambda log: (log.unlink(), log.touch()),
}


@pytest.fixture
def answer(box: Any, until: Callable[..., Any]) -> dict[str, Any]:
    made = box.python(STEPS, observe={"step_regex": r"step (?P<step>\d+)"})
    until(lambda: Path(made["log"]).read_text() == "step 1\n")
    return dict(made)


def go(box: Any, number: int) -> None:
    (box.root / f"go{number}").touch()


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_a_log_that_was_moved_is_read_where_the_program_writes_it(
    box: Any, until: Callable[..., Any], answer: dict[str, Any], move: Callable[[Path], object]
) -> None:
    run = box.run(answer)
    move(Path(answer["log"]))
    go(box, 1)
    file = ownlog.log_file(run, run.record().value)
    until(lambda: Path(file).read_text() == "step 1\nstep 2\n")
    request = {"state_dir": box.state_dir, "tag": "t"}
    (facts,) = observe.observe({**request, "known": [], "sample_s": 0.01}, lambda event: None)["runs"]
    assert (facts["log"]["exists"], facts["log"]["step"], facts["log"]["size"]) == (True, 2, 14)
    (listed,) = listing.list_runs({"state_dir": box.state_dir}, None)["runs"]
    assert listed["log"]["size"] == 14
    said: list[dict[str, Any]] = []
    logread.read_log({**request, "lines": 1}, said.append)
    assert b"".join(base64.b64decode(one.get("data", "")) for one in said) == b"step 2\n"
    assert logsearch.search_log({**request, "grep": "step 2"}, said.append)["matches"] == 1


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_who_follows_a_log_that_is_moved_hears_every_step_once(
    box: Any, until: Callable[..., Any], answer: dict[str, Any], move: Callable[[Path], object]
) -> None:
    got: list[bytes] = []
    place: dict[str, Any] = {}

    def heard(event: dict[str, Any]) -> None:
        if "data" in event:
            got.append(base64.b64decode(event["data"]))
            place.update(offset=event["offset"], inode=event["inode"])

    def follow(wait_s: float, **more: Any) -> threading.Thread:
        request = {"state_dir": box.state_dir, "tag": "t", "wait_s": wait_s, **more}
        thread = threading.Thread(target=logread.read_log, args=(request, heard))
        thread.start()
        return thread

    def steps() -> list[str]:
        return re.findall(r"\d+", b"".join(got).decode())

    first = follow(30.0)
    until(lambda: steps() == ["1"])
    move(Path(answer["log"]))
    go(box, 1)
    until(lambda: steps() == ["1", "2"])
    box.stop("t", grace_s=0.0)
    first.join(60)
    assert steps() == ["1", "2"]


def test_a_call_that_goes_on_after_a_move_repeats_nothing(
    box: Any, until: Callable[..., Any], answer: dict[str, Any]
) -> None:
    request = {"state_dir": box.state_dir, "tag": "t"}
    told = logread.read_log(request, lambda event: None)
    Path(answer["log"]).unlink()
    go(box, 1)
    run = box.run(answer)
    until(lambda: Path(ownlog.log_file(run, run.record().value)).read_text().endswith("step 2\n"))
    said: list[dict[str, Any]] = []
    logread.read_log({**request, "offset": told["offset"], "inode": told["inode"]}, said.append)
    assert b"".join(base64.b64decode(one.get("data", "")) for one in said) == b"step 2\n"


def test_a_log_that_was_removed_is_no_file_to_pull(box: Any, answer: dict[str, Any]) -> None:
    request = {"state_dir": box.state_dir, "tag": "t", "what": "log"}
    rotated(Path(answer["log"]))
    assert [one["path"] for one in pull.pull_list(request, None)["files"]] == ["train_t.log.1"]
    Path(answer["log"] + ".1").unlink()
    with pytest.raises(AgentError, match="only its program still has it") as caught:
        pull.pull_list(request, None)
    assert caught.value.next == "dflashctl logs t -n 0 > log"


def test_a_file_that_is_written_to_in_its_place_is_the_log(box: Any, answer: dict[str, Any]) -> None:
    """A program that opens its log by name again: then what lies there is not empty."""
    log = Path(answer["log"])
    rotated(log)
    log.write_text("step 9\n")
    run = box.run(answer)
    assert ownlog.log_file(run, run.record().value) == str(log)


def test_another_file_of_the_program_is_never_taken_for_the_log(box: Any, until: Callable[..., Any]) -> None:
    program = (
        "import os, time\nos.dup2(os.open('mine', os.O_CREAT | os.O_WRONLY), 1)\nprint('x' * 9, flush=True)\n"
    )
    answer = box.python(program + "os.dup2(1, 2); open('ready', 'w'); time.sleep(600)")
    until((box.root / "ready").exists)
    run = box.run(answer)
    assert ownlog.log_file(run, run.record().value) == answer["log"]
