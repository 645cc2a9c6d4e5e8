"""Run with: pytest tests/unit/test_stop_onepid.py. One process that belongs to no run, and nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dflashctl.agent import AgentError
from dflashctl.agent.processes import proc
from dflashctl.agent.runs import onepid

DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"


@pytest.fixture
def orphan() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", DEAF, "train.py"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def look(box: Any, pid: int) -> dict[str, Any]:
    process = onepid.look_process({"pid": pid, "state_dir": box.state_dir}, None)["process"]
    assert isinstance(process, dict)
    return process


def end(box: Any, pid: int, start: int, grace_s: float = 0.2) -> dict[str, Any]:
    request = {"pid": pid, "start": start, "grace_s": grace_s, "state_dir": box.state_dir}
    return onepid.stop_process(request, None)


def test_it_is_shown_and_exactly_it_is_ended(box: Any, orphan: subprocess.Popen[bytes]) -> None:
    sibling = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "train.py"])
    try:
        shown = look(box, orphan.pid)
        assert shown["cmdline"][-1] == "train.py" and shown["uid"] == os.getuid()
        assert shown["nspid"] == orphan.pid and shown["pidns"] == proc.pid_namespace()
        assert abs(shown["started_at"] - time.time()) < 30
        assert 0 <= shown["age_s"] < 30, "by the clock there"
        told = end(box, orphan.pid, shown["start"])
        assert told == {"outcome": "killed", "signalled": ["SIGTERM", "SIGKILL"], "process": None}
        assert orphan.wait(60) == -9
        assert sibling.poll() is None
        assert end(box, orphan.pid, shown["start"])["outcome"] == "already_gone"
    finally:
        sibling.kill()
        sibling.wait()


def test_another_process_with_that_pid_is_left_alone(box: Any, orphan: subprocess.Popen[bytes]) -> None:
    shown = look(box, orphan.pid)
    assert end(box, orphan.pid, shown["start"] - 1)["outcome"] == "already_gone"
    assert orphan.poll() is None


def test_a_process_of_a_run_is_the_runs(box: Any, until: Callable[..., Any]) -> None:
    answer = box.launch(["sh", "-c", "sleep 60 & wait"])
    family = until(lambda: len(found := box.family(answer)) == 2 and found)
    supervisor = box.run(answer).identities()[0]
    for pid in (family[0].pid, family[1].pid, supervisor[0]):
        with pytest.raises(AgentError, match="belongs to run") as error:
            look(box, pid)
        assert (error.value.kind, error.value.next) == ("locked", "dflashctl kill t")
    with pytest.raises(AgentError, match="belongs to run"):
        end(box, family[1].pid, family[1].start)
    assert len(box.family(answer)) == 2


@pytest.mark.parametrize("pid", [1, os.getpid(), os.getppid()], ids=["init", "self", "parent"])
def test_never_init_nor_the_way_to_ourselves(box: Any, pid: int) -> None:
    with pytest.raises(AgentError, match="init or this call itself"):
        look(box, pid)


def test_a_pid_of_nobody(box: Any) -> None:
    with pytest.raises(AgentError, match="no process 4194309 inside"):
        look(box, 2**22 + 5)
