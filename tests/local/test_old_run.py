"""Run with: pytest tests/local/test_old_run.py. A run that an older dflashctl launched: `old_run/` holds the
folder that it left, with its supervisor's own code. It stays as it is; a later one gets its own beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent import AgentError
from dflashctl.agent.gpus import insidefacts
from dflashctl.agent.history import listing
from dflashctl.agent.processes import proc
from dflashctl.agent.processes.signals import send_signal
from dflashctl.agent.records import runfolder
from dflashctl.agent.runs import launch, observe, stop, waiting
from dflashctl.runs import known
from dflashctl.runs.readfacts import read_answer
from dflashctl.runs.verdict import judge

ID = "20261130T050002626-c78f88"
RECORDED = Path(__file__).parent / "old_run" / ID
PROGRAM = """
import os, subprocess, sys, time
me = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", me], start_new_session=True, env={"PATH": "/usr/bin"})
print("step 7 loss 0.5", flush=True)
time.sleep(600)
"""


class Old:
    """The recorded folder in a state folder of today, its supervisor at work as it was then."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state_dir = str(root / "state")
        self.run = runfolder.folder_of(self.state_dir, ID)
        self.log = root / "train.log"

    def start(self) -> None:
        """As the older `launch` did it: record, event, supervisor, its word."""
        folder = Path(self.run.path)
        folder.mkdir(parents=True)
        for name in ("recipe.yaml", "supervisor.pyz"):
            (folder / name).write_bytes((RECORDED / name).read_bytes())
        record = json.loads((RECORDED / "record.json").read_text())
        record |= {"cwd": str(self.root), "log": str(self.log), **proc.here()}
        record |= {"command": [sys.executable, "-c", PROGRAM]}
        (folder / "record.json").write_text(json.dumps(record))
        (folder / "events.jsonl").write_text((RECORDED / "events.jsonl").read_text().splitlines()[0] + "\n")
        supervisor = subprocess.Popen(
            [sys.executable, "-I", str(folder / "supervisor.pyz"), "supervise", self.run.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert supervisor.stdin is not None and supervisor.stdout is not None
        supervisor.stdin.write(b"{}")
        supervisor.stdin.close()
        assert "started" in json.loads(supervisor.stdout.readline())

    def stop(self) -> dict[str, Any]:
        request = {
            "state_dir": self.state_dir,
            "name": "old",
            "who": "ada@laptop",
            "reason": "",
            "grace_s": 1.0,
        }
        return stop.stop(request, lambda event: None)

    def state(self) -> str:
        request = {"state_dir": self.state_dir, "sample_s": 0.1, "known": known.patterns(), "scan_s": 0.5}
        [facts] = read_answer(observe.observe(request, lambda event: None))
        return judge(facts).state

    def close(self) -> None:
        for process in self.run.family():
            send_signal(process.identity, signal.SIGKILL)
        supervisor = self.run.identities()[0]
        if supervisor is not None:
            send_signal(supervisor, signal.SIGKILL)


@pytest.fixture
def old(tmp_path: Path, until: Callable[..., Any]) -> Iterator[Old]:
    made = Old(tmp_path)
    made.start()
    until(lambda: made.log.exists() and made.log.read_text() and len(made.run.family()) == 2)
    try:
        yield made
    finally:
        made.close()


def test_it_is_seen_with_its_whole_family(old: Old) -> None:
    facts = insidefacts.inside_facts({"state_dir": old.state_dir, "code_root": None}, None)
    [run] = facts["runs"]
    assert (run["id"], run["tag"], run["live"]) == (ID, "old", True)
    assert run["gpus"] == [{"index": 5, "uuid": "GPU-old-5"}]
    assert len(run["family"]) == 3, "leader, a child in its own session without our environment, supervisor"
    assert old.state() in ("starting", "running")


def test_its_tag_its_log_and_its_gpus_are_its_own(old: Old) -> None:
    record = {"tag": "new", "log": str(old.root / "other.log"), "gpus": [{"index": 5, "uuid": "GPU-old-5"}]}
    for changes, kind in (({"tag": "old"}, "locked"), ({"log": str(old.log)}, "locked"), ({}, "gpus_busy")):
        with pytest.raises(AgentError) as error:
            new = runfolder.folder_of(old.state_dir, runfolder.new_id())
            launch.refuse_conflicts(new, {**record, **changes}, allow_busy=False)
        assert error.value.kind == kind and ID in error.value.what


def test_it_is_killed_by_its_own_supervisor(old: Old) -> None:
    family = [one.identity for one in old.run.family()]
    told = old.stop()
    assert told["outcome"] == "killed"
    assert [identity for identity in family if proc.living(identity)] == []
    assert told["exit"]["cause"] == "killed" and told["exit"]["killed_by"]["who"] == "ada@laptop"
    assert old.state() == "killed"


def test_its_orphans_are_found_when_its_supervisor_was_killed(old: Old, until: Callable[..., Any]) -> None:
    until(lambda: old.run.has("members.json"))
    family = [one.identity for one in old.run.family()]
    supervisor = old.run.identities()[0]
    assert supervisor is not None
    os.kill(supervisor[0], signal.SIGKILL)
    until(lambda: not old.run.live())
    assert old.state() == "lost"
    assert old.stop()["outcome"] == "killed"
    assert [identity for identity in family if proc.living(identity)] == []


def test_its_end_is_waited_for(old: Old) -> None:
    leader = old.run.supervisor().value["leader"]  # type: ignore[index]
    os.kill(leader["pid"], signal.SIGSEGV)
    request = {"state_dir": old.state_dir, "id": ID, "wait_s": 20.0}
    ended = waiting.wait_end(request, None)["exit"]
    assert (ended["cause"], ended["signal"]) == ("signalled", signal.SIGSEGV)
    assert old.state() == "failed"


def test_an_ended_one_is_listed_as_it_was_recorded(tmp_path: Path) -> None:
    there = tmp_path / "state" / "runs" / ID
    there.mkdir(parents=True)
    for file in RECORDED.iterdir():
        (there / file.name).write_bytes(file.read_bytes())
    answer = listing.list_runs({"state_dir": str(tmp_path / "state"), "tag": None}, None)
    [run] = answer["runs"]
    assert run["id"] == ID and run["exit"]["code"] == 0
    assert runfolder.folder_of(str(tmp_path / "state"), ID).group() is None, "it had no group of its own"
