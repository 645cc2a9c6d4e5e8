"""Real runs on this machine, for tests: `box` launches them, `until` waits for what they do."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent.processes import cgroup, proc
from dflashctl.agent.processes.signals import send_signal
from dflashctl.agent.records import runfolder
from dflashctl.agent.runs import launch, stop, waiting
from dflashctl.config.hosts import Host
from dflashctl.runs import watch


class RunBox:
    """A state folder in which real runs are launched on this machine; ends them all afterwards."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state_dir = str(root / "state")
        self.events: list[dict[str, Any]] = []

    def request(self, command: list[str], tag: str = "t", **changes: Any) -> dict[str, Any]:
        """A launch request for `command`; `changes` replace fields of the record, or of the request."""
        run_id = runfolder.new_id()
        record = {
            "tag": tag,
            "recipe": "r",
            "command": command,
            "cwd": str(self.root),
            "env": {"PATH": os.environ["PATH"], "DFLASH_RUN_ID": run_id},
            "log": str(self.root / f"train_{tag}.log"),
            "grace_s": 1.0,
            "gpus": [],
            "secrets": [],
        }
        request = {
            "id": run_id,
            "state_dir": self.state_dir,
            "record": record,
            "recipe_yaml": "version: 1\n",
            "secrets": {},
            "release_dir": None,
            "allow_busy": False,
            "settle_s": 0.0,
        }
        for key, value in changes.items():
            (request if key in request else record)[key] = value
        return request

    def launch(self, command: list[str], tag: str = "t", **changes: Any) -> dict[str, Any]:
        return launch.launch(self.request(command, tag, **changes), self.events.append)

    def python(self, program: str, tag: str = "t", **changes: Any) -> dict[str, Any]:
        """Launch a program of the standard library: `-S` starts in half the time."""
        return self.launch([sys.executable, "-S", "-c", program], tag, **changes)

    def stop(self, name: str, **changes: Any) -> dict[str, Any]:
        request = {"state_dir": self.state_dir, "name": name, "who": "ada@laptop", "reason": "", **changes}
        return stop.stop(request, self.events.append)

    def run(self, answer: dict[str, Any]) -> runfolder.RunFolder:
        return runfolder.folder_of(self.state_dir, answer["id"])

    def wait(self, answer: dict[str, Any], within_s: float = 60.0) -> dict[str, Any]:
        """exit.json of a run that ends by itself."""
        request = {"state_dir": self.state_dir, "id": answer["id"], "wait_s": within_s}
        ended = waiting.wait_end(request, None)
        assert ended["exit"] is not None, ended
        return ended["exit"]

    def family(self, answer: dict[str, Any]) -> list[proc.Process]:
        return [one for one in self.run(answer).family() if not one.dead]

    def log(self, answer: dict[str, Any]) -> str:
        return Path(answer["log"]).read_text()

    def close(self) -> None:
        """End whatever a test left, by identity."""
        for run in runfolder.list_runs(self.state_dir):
            supervisor, _ = run.identities()
            for _ in range(100):
                left = [one.identity for one in run.family() if not one.dead]
                if supervisor is not None and proc.living(supervisor) is not None and not left:
                    left = [supervisor]
                if not left:
                    break
                for identity in left:
                    send_signal(identity, signal.SIGKILL)
                time.sleep(0.02)
            cgroup.remove(run.group())  # its supervisor would have


@pytest.fixture
def box(tmp_path: Path) -> Iterator[RunBox]:
    made = RunBox(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def until_seen(box: RunBox, monkeypatch: pytest.MonkeyPatch) -> str:
    """The beginning of a program that goes on as soon as a watch in this process has had its first look."""
    real = watch.look

    def look(*args: Any, **more: Any) -> Any:
        seen = real(*args, **more)
        (box.root / "seen").touch()
        return seen

    monkeypatch.setattr(watch, "look", look)
    return "import os, time\nwhile not os.path.exists('seen'): time.sleep(0.02)\n"


@pytest.fixture
def until() -> Callable[..., Any]:
    """Poll until something is true; its value, or a failure after `within_s`."""

    def wait_for(look: Callable[[], Any], within_s: float = 60.0) -> Any:
        end = time.monotonic() + within_s
        while True:
            found = look()
            if found:
                return found
            assert time.monotonic() < end, f"not within {within_s} s"
            time.sleep(0.01)

    return wait_for


def local_host(box: Any) -> Host:
    """The box as an entry of hosts.yaml would name it, on engine `local`."""
    return Host(
        name="here",
        engine="local",
        python=sys.executable,
        code_root=str(box.root),
        workdir=str(box.root),
        log_dir=str(box.root),
        state_dir=box.state_dir,
    )
