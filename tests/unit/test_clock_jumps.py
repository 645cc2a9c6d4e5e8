"""Run with: pytest tests/unit/test_clock_jumps.py. The wall clock jumps (libfaketime) under a supervisor: the
grace, the wall time and the killer are right all the same, for the monotonic clock tells them."""

from __future__ import annotations

import ctypes.util
import glob
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unproven import did_not_run

from dflashctl.agent.processes import proc
from dflashctl.agent.runs import spawn

DAY = 86400


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`clock("+30d")` sets the supervisor's wall clock; the monotonic one stays true."""
    found = [*glob.glob("/usr/lib/*/faketime/libfaketime.so.1"), ctypes.util.find_library("faketime")]  # noqa: PTH207
    library = next((path for path in found if path), None)
    if library is None:
        did_not_run("clock jumps. apt install libfaketime")
    file = tmp_path / "clock"
    file.write_text("+0\n")
    real = subprocess.Popen

    def faked(argv: list[str], **how: Any) -> Any:
        if "supervise" in argv:
            fake = {"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_NO_CACHE": "1"}
            how["env"] = {
                **how["env"],
                **fake,
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "DONT_FAKE_MONOTONIC": "1",
            }
        return real(argv, **how)

    monkeypatch.setattr(spawn.subprocess, "Popen", faked)

    def jump(offset: str) -> None:
        file.write_text(offset + "\n")

    return jump


@pytest.mark.parametrize("offset", ["+30d", "-30d"])
def test_a_jump_moves_no_deadline(
    box: Any, until: Callable[..., Any], clock: Callable[[str], None], offset: str
) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); open('ready', 'w'); time.sleep(600)"
    answer = box.python(deaf, grace_s=1.0)
    until((box.root / "ready").exists)
    run = box.run(answer)
    before = len(run.events())
    clock(offset)
    began = time.monotonic()
    told = box.stop("t", grace_s=1.0, reason="the clock")
    assert told["outcome"] == "killed" and 0.9 < time.monotonic() - began < 120
    assert told["signalled"]["KILL"] == [answer["leader"]["pid"]]
    ended = told["exit"]
    assert ended["cause"] == "killed" and ended["killed_by"]["reason"] == "the clock"
    assert 0 < ended["wall_s"] < 600, "as long as it took, not a month"
    jumped = [event for event in run.events()[before:] if event.get("by") == "supervisor"]
    assert all(abs(event["at"] - time.time()) > 20 * DAY for event in jumped), "the clock did jump there"
    assert jumped


def test_an_end_by_itself_after_a_jump(box: Any, until: Callable[..., Any], clock: Any) -> None:
    answer = box.python("import time; open('ready', 'w'); time.sleep(600)")
    until((box.root / "ready").exists)
    clock("-30d")
    leader = proc.as_identity(answer["leader"])
    assert leader is not None
    os.kill(leader[0], signal.SIGTERM)
    ended = box.wait(answer)
    assert (ended["cause"], ended["signal"]) == ("signalled", signal.SIGTERM), "nobody asked for it"
    assert 0 < ended["wall_s"] < 600
