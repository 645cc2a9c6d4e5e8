"""Run with: pytest tests/local/test_probe_local.py. The whole of `probe` on engine `local`: launched as a
run, watched to its end, in three remote commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflashctl.agent.processes import proc
from dflashctl.agent.processes.signals import send_signal
from dflashctl.agent.records import runfolder
from dflashctl.cli import main as frame
from dflashctl.errors import Unreachable
from dflashctl.gpus import facts as gpufacts
from dflashctl.gpus.idle import Box
from dflashctl.probe import running
from dflashctl.probe.cases import PROBES, Case, Probe
from dflashctl.probe.document import AnyProbeDocument
from dflashctl.remote.local import LocalEngine


class Place:
    """A host that is this machine, without GPUs unless a test says otherwise."""

    def __init__(self, root: Path, capture: Any) -> None:
        self.root, self.capture = root, capture
        self.state = root / "state"
        (root / "work").mkdir()
        host = {
            "engine": "local",
            "python": sys.executable,
            "state_dir": str(self.state),
            "workdir": str(root / "work"),
            "env": {"FROM_HOSTS": "1"},
        }
        (root / "hosts.yaml").write_text(
            yaml.safe_dump({"version": 1, "defaults": {"host": "here"}, "hosts": {"here": host}})
        )
        self.calls: list[str] = []

    def run(self, *words: str) -> tuple[int, str, str]:
        code = frame.run(list(words))
        shown = self.capture.readouterr()
        return code, shown.out, shown.err

    def file(self, text: str, name: str = "mine.py") -> str:
        path = self.root / name
        path.write_text(text)
        return str(path)

    def close(self) -> None:
        for run in runfolder.list_runs(str(self.state)):
            supervisor, _ = run.identities()
            for one in [*run.family(), *([proc.living(supervisor)] if supervisor else [])]:
                if one is not None and not one.dead:
                    send_signal(one.identity, signal.SIGKILL)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Iterator[Place]:
    made = Place(tmp_path, capsys)
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(tmp_path / "hosts.yaml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    genuine = LocalEngine.run

    def counted(self: Any, *args: Any, **how: Any) -> Any:
        made.calls.append("command")
        return genuine(self, *args, **how)

    monkeypatch.setattr(LocalEngine, "run", counted)
    try:
        yield made
    finally:
        made.close()


SHOWS = """
import os, sys
given = [os.environ[name] for name in ("FROM_HOSTS", "GIVEN", "CUDA_VISIBLE_DEVICES")]
print("said by", sys.argv[1:], given)
"""


def test_a_file_is_run_and_recorded_like_a_run(place: Place) -> None:
    words = ["probe", place.file(SHOWS), "--gpus", "none", "--env", "GIVEN=2", "--", "-x", "a b"]
    code, out, _ = place.run(*words)
    assert code == 0 and "said by ['-x', 'a b'] ['1', '2', '']" in out and "probe-mine finished" in out
    assert len(place.calls) == 2  # without GPUs the machine around is not asked
    _, out, _ = place.run("runs", "--json")
    (run,) = json.loads(out)["runs"]
    assert (run["tag"], run["recipe"], run["state"]) == ("probe-mine", "probe", "finished")
    code, out, _ = place.run(*words[:2], "--json", *words[2:])
    document = AnyProbeDocument.model_validate_json(out).root
    assert code == 0 and "said by" in (document.log_tail or "") and document.exit["code"] == 0
    code, out, _ = place.run("logs", "probe-mine")
    assert code == 0 and "said by" in out
    folder = runfolder.folder_of(str(place.state), run["id"])
    assert Path(folder.file("files/mine.py")).read_text() == SHOWS
    assert Path(folder.record().value["log"]).name == "probe-mine.log"


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("raise ValueError('odd')", (), "exit code 1"),
        ("import time\ntime.sleep(600)", ("--deadline", "1s"), "not done within 1 s and was killed"),
        ("import os\nos.kill(os.getpid(), 11)", (), "exit code 139"),
    ],
)
def test_a_file_that_fails_hangs_or_crashes_is_exit_code_7(
    place: Place, text: str, options: tuple[str, ...], words: str
) -> None:
    code, out, err = place.run("probe", place.file(text), "--gpus", "none", *options)
    assert code == 7 and words in err, err
    assert ("ValueError: odd" in out) == ("odd" in text)


def test_what_cannot_be_sent(place: Place) -> None:
    assert place.run("probe", "no-such-thing")[0] == 6
    assert place.run("probe", place.file("def f(:\n"))[0] == 2
    assert place.run("probe", place.file("1"), "--case", "x")[0] == 2
    assert place.run("probe", "threads", "--case", "nothing")[0] == 2
    assert place.run("probe", "threads", "--gpu", "1", "--gpus", "2")[0] == 2
    assert place.run("probe", "threads", "--", "argument")[0] == 2
    assert place.calls == []


def test_a_dry_run_starts_nothing(place: Place) -> None:
    code, out, _ = place.run("probe", "threads", "--gpus", "none", "--dry-run", "--json")
    document = json.loads(out)
    AnyProbeDocument.model_validate(document)
    assert code == 0 and document["schema"] == "dflashctl.probe/1" and document["dry_run"]
    assert document["cases"] == [case.name for case in PROBES["threads"].cases]
    assert runfolder.list_runs(str(place.state)) == []


def test_a_probe_can_be_killed_and_its_tag_is_its_own(place: Place, until: Callable[..., Any]) -> None:
    ready = place.root / "ready"
    program = place.file(f"import time\nopen({str(ready)!r}, 'w').close()\ntime.sleep(600)")
    argv = [sys.executable, "-m", "dflashctl", "probe", program, "--gpus", "none", "--tag", "stuck"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(ready.exists, 120)
        code, _, err = place.run("probe", program, "--gpus", "none", "--tag", "stuck")
        assert code == 8 and "stuck is in use" in err
        assert place.run("kill", "stuck")[0] == 0
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 7 and "killed by" in err, (out, err)
    _, out, _ = place.run("runs", "--json")
    assert [run["state"] for run in json.loads(out)["runs"]] == ["killed"]


ASKS = Probe("ipc", 1, (Case("host-memory", "?", gpus=0), Case("one-gpu", "?")))
SEEN = {"torch": "2.13.0+cpu", "python": "3.11", "gpus": 0, "compiler": False}
LOOK = f"from .common import write\nwrite({SEEN})\n"
IPC = "from .common import run\nrun({'host-memory': lambda: {'ran': 'here'}, 'one-gpu': lambda: {}})\n"


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe whose programs need no torch: what is tested is the way there and back."""
    from dflashctl.inspect.sources import package_files
    from dflashctl.probe import plan

    def lighter(package: str, *, sent_as: str) -> dict[str, str]:
        files = package_files(package, sent_as=sent_as)
        return {**files, f"{sent_as}/look.py": LOOK, f"{sent_as}/ipc.py": IPC}

    monkeypatch.setattr(plan, "package_files", lighter)
    monkeypatch.setitem(PROBES, "ipc", ASKS)


def no_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no nvidia-smi, whatever it is."""
    genuine = running.Attempt.facts

    def without(self: Any) -> gpufacts.Facts:
        nothing = Box((), problem="there is no nvidia-smi")
        return gpufacts.Facts(genuine(self).inside, nothing, gpufacts.unreadable("missing"))

    monkeypatch.setattr(running.Attempt, "facts", without)


def test_without_a_gpu_the_rest_runs_in_three_commands(
    place: Place, light: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_smi(monkeypatch)
    code, out, err = place.run("probe", "ipc", "--json")
    assert code == 5 and "one-gpu: needs a GPU: torch sees none" in err
    assert "no GPU is there: there is no nvidia-smi" in err
    assert len(place.calls) == 3
    document = json.loads(out)
    AnyProbeDocument.model_validate(document)
    assert document["torch"] == "2.13.0+cpu" and document["gpus"] == []
    ran, lacking = document["cases"]
    assert (ran["answer"], ran["figures"]) == ("passes", {"ran": "here"})
    assert (lacking["answer"], lacking["said"]) == ("needs", "a GPU: torch sees none")


def test_the_table_on_the_terminal(place: Place, light: None) -> None:
    code, out, _ = place.run("probe", "ipc", "--gpus", "none", "--case", "host-memory")
    assert code == 0 and len(place.calls) == 2
    lines = [line.split() for line in out.splitlines()]
    assert lines[1] == ["torch", "2.13.0+cpu", "·", "Python", "3.11", "·", "torch", "sees", "0", "GPUs"]
    assert lines[2][:3] == ["CASE", "ANSWER", "EXPECTED"] and lines[3][:3] == ["host-memory", "passes", "-"]
    assert "host-memory: ran here" in out


def test_a_look_at_torch_that_fails_is_shown(
    place: Place, light: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LOOK", "raise ImportError('libcudart.so.13: cannot open')")
    code, out, err = place.run("probe", "ipc", "--gpus", "none")
    assert code == 2 and out.count("needs torch: ImportError: libcudart.so.13") == len(PROBES["ipc"].cases)
    assert "ImportError: libcudart.so.13: cannot open" in err and "Traceback" not in err
    assert "sees" not in out + err


def test_each_case_is_told_while_the_probe_runs(
    place: Place, light: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflashctl.cli import probetext

    heard: list[Any] = []
    genuine = running.watch

    def listening(*args: Any, on_line: Callable[[Any], None], **how: Any) -> Any:
        def both(line: Any) -> None:
            heard.append((line.get("case", "look"), line.get("state")))
            on_line(line)

        return genuine(*args, on_line=both, **how)

    monkeypatch.setattr(probetext, "watch", listening)
    assert place.run("probe", "ipc", "--gpus", "none", "--case", "host-memory")[0] == 0
    assert heard == [("look", None), ("host-memory", "began"), ("host-memory", "ended")]


def test_ctrl_c_leaves_the_probe_which_ends_by_itself(place: Place, until: Callable[..., Any]) -> None:
    ready, go = place.root / "ready", place.root / "go"
    program = place.file(
        "import pathlib, time\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\n"
        "print('to the end')\n"
    )
    argv = [sys.executable, "-m", "dflashctl", "probe", program, "--gpus", "none", "--tag", "left"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(ready.exists, 120)
        assert "left · run" in process.stdout.readline()  # type: ignore[union-attr]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "dflashctl kill left" in err
    (run,) = runfolder.list_runs(str(place.state))
    assert run.live()
    go.touch()
    until(lambda: run.exit().value, 120)
    assert run.exit().value["code"] == 0


def test_lost_contact_is_no_verdict(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any, **how: Any) -> Any:
        raise Unreachable("the connection was lost", where="here")

    monkeypatch.setattr(running, "call", lost)
    code, _, err = place.run("probe", place.file("1"), "--gpus", "none", "--tag", "away")
    assert code == 3 and "goes on and ends by itself: dflashctl status away" in err
