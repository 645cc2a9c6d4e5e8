"""Run with: pytest tests/unit/test_stop_paused.py. Processes that somebody paused with SIGSTOP are ended in
order, too."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from dflashctl.agent.processes import proc
from dflashctl.agent.processes.signals import send_signal


@pytest.mark.parametrize("stopped", ["supervisor", "leader", "both"])
def test_who_was_stopped_wakes_to_hear_the_term(box: Any, until: Callable[..., Any], stopped: str) -> None:
    """`pkill -STOP python` pauses supervisors, too; one that never wakes would keep tag and GPUs for ever."""
    polite = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\nopen('ready', 'w')\n"
    answer = box.python(polite + "time.sleep(600)", grace_s=60.0)
    until((box.root / "ready").exists)
    run = box.run(answer)
    supervisor, leader = run.identities()[0], proc.as_identity(answer["leader"])
    for identity in {"supervisor": [supervisor], "leader": [leader], "both": [supervisor, leader]}[stopped]:
        send_signal(identity, signal.SIGSTOP)
        until(lambda pid=identity[0]: proc.read_process(pid).state == "T")
    told = box.stop("t")
    assert told["outcome"] == "killed" and told["signalled"] == {"TERM": [leader[0]], "KILL": []}
    assert (told["exit"]["code"], told["exit"]["cause"], told["problems"]) == (7, "killed", [])
    assert not run.live()
