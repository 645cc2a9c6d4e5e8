"""Run with: pytest tests/local/test_stacks.py. Where real processes stand, by py-spy and by faulthandler."""

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
from run_box import local_host

from dflashctl.agent import AgentError
from dflashctl.agent.processes import proc
from dflashctl.agent.runs import stacks
from dflashctl.cli.main import run
from dflashctl.remote.local import LocalEngine
from dflashctl.runs.stacks import Frame, Stacks, Thread, common_outer, parse, read_stacks

STUCK = """
import threading, time

def waits_for_ever():
    threading.Event().wait()

def works():
    while True:
LINES

threading.Thread(target=waits_for_ever, name="drafter-1").start()
threading.Thread(target=works, name="\\x1b[2Jloader").start()
print("up", flush=True)
waits_for_ever()
""".replace("LINES", "\n".join(f"        time.sleep({0.003 + 0.0007 * (line % 7)})" for line in range(40)))
REGISTERED = """
import faulthandler, os, signal
file = open(f"{FOLDER}/stacks-{os.getpid()}.txt", "w")
faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
"""


def look(box: Any, again_s: float = 0.5) -> Stacks:
    with LocalEngine(local_host(box)) as engine:
        return read_stacks(engine, "t", again_s=again_s)


def threads(found: Stacks) -> dict[str, Thread]:
    (process,) = found.processes
    return {each.name: each for each in process.threads}


@pytest.fixture
def launched(box: Any, until: Callable[..., Any]) -> Callable[[str], Any]:
    """Start a program as run `t` and wait for its word `up`."""

    def start(program: str) -> Any:
        answer = box.python(program)
        until(lambda: "up" in box.log(answer))
        return answer

    return start


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation as it travels, looking for another program."""
    source = Path(stacks.__file__).read_text()
    assert source.count('which("py-spy"') == 1
    changed = _payload_with("runs/stacks.py", source.replace('which("py-spy"', 'which("no-such-program"'))
    monkeypatch.setattr("dflashctl.remote.agent_call.payload", lambda: changed)


def _payload_with(name: str, text: str) -> bytes:
    import io
    import zipfile

    from dflashctl.agent.payload import PACKAGE, build_payload

    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(build_payload())) as old, zipfile.ZipFile(out, "w") as new:
        for each in old.namelist():
            new.writestr(each, text if each == f"{PACKAGE}/{name}" else old.read(each))
    return out.getvalue()


def test_py_spy_shows_each_thread_and_marks_those_that_do_not_move(launched: Any, box: Any) -> None:
    launched(STUCK)
    found = look(box)
    by_name = threads(found)
    assert found.processes[0].how == "py-spy"
    assert by_name["drafter-1"].unmoved and by_name["MainThread"].unmoved
    assert "waits_for_ever" in [frame.function for frame in by_name["drafter-1"].frames]
    assert not by_name["\x1b[2Jloader"].is_new


def test_a_thread_that_works_is_not_called_unmoved(launched: Any, box: Any) -> None:
    """It is in another one of forty lines at each look: of six pairs of looks at least one differs."""
    launched(STUCK)
    assert any(not threads(look(box, 0.1))["\x1b[2Jloader"].unmoved for _ in range(6))


def test_the_command_line_shows_them_escaped(
    launched: Any, box: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    launched(STUCK)
    hosts = tmp_path / "hosts.yaml"
    entry = f"{{engine: local, python: {sys.executable}, state_dir: {box.state_dir}}}"
    hosts.write_text(f"version: 1\ndefaults: {{host: here}}\nhosts:\n  here: {entry}\n")
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(hosts))
    assert run(["stacks", "t", "--again", "0.2"]) == 0
    out = capfd.readouterr().out
    assert "\x1b" not in out and "\\x1b[2Jloader" in out
    assert "drafter-1 (has not moved)" in out
    assert any(line.startswith("    = waits_for_ever (") for line in out.splitlines())
    assert run(["stacks", "--again", "0.2", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["schema"] == "dflashctl.stacks/1"
    assert {"drafter-1", "MainThread"} <= {each["name"] for each in document["processes"][0]["threads"]}


@pytest.mark.usefixtures("no_py_spy")
def test_without_py_spy_a_program_that_registered_writes_its_own(box: Any, until: Callable[..., Any]) -> None:
    where = f"import os; FOLDER = {box.state_dir!r} + '/runs/' + os.environ['DFLASH_RUN_ID']\n"
    answer = box.python(where + REGISTERED + STUCK)
    folder = box.run(answer)
    until(lambda: "up" in box.log(answer))
    found = look(box)
    (process,) = found.processes
    assert process.how == "faulthandler"
    assert process.problems == ("py-spy is not installed there",)
    stuck = [each for each in process.threads if "waits_for_ever" in [f.function for f in each.frames]]
    assert len(stuck) == 2 and all(each.unmoved for each in stuck)
    assert len(list(Path(folder.path).glob("stacks-*.txt"))) == 1
    assert len(box.family(answer)) == 1, "it lives"


@pytest.mark.usefixtures("no_py_spy")
def test_the_trainer_registers(box: Any, until: Callable[..., Any]) -> None:
    program = (
        "import os; from pathlib import Path; from trainer.process.runfiles import RunFiles\n"
        f"RunFiles(Path({box.state_dir!r}) / 'runs' / os.environ['DFLASH_RUN_ID']).listen()\n"
    )
    whole = [sys.executable, "-c", program + STUCK]  # with the packages that the trainer needs
    answer = box.launch(whole, cwd=str(Path(__file__).parents[2]))
    until(lambda: "up" in box.log(answer))
    (process,) = look(box).processes
    assert process.how == "faulthandler"
    functions = [frame.function for each in process.threads for frame in each.frames]
    assert functions.count("waits_for_ever") == 2 and "works" in functions
    assert len(box.family(answer)) == 1


@pytest.mark.usefixtures("no_py_spy")
def test_one_that_did_not_register_gets_no_signal(launched: Any, box: Any) -> None:
    answer = launched(STUCK)
    (process,) = look(box).processes
    assert process.how == "" and process.threads == ()
    assert process.problems[0] == "py-spy is not installed there"
    assert process.problems[1].startswith("it did not register faulthandler (no stacks-")
    assert len(box.family(answer)) == 1, "SIGUSR1 would have ended it"


def test_one_that_registered_and_took_it_back_gets_no_signal(launched: Any, box: Any) -> None:
    answer = launched(STUCK)
    (leader,) = box.family(answer)
    Path(box.run(answer).file(f"stacks-{leader.pid}.txt")).touch()
    found = stacks.by_signal(box.run(answer), [(leader.identity, leader.pid)])
    assert found[leader.identity] == {"problem": "it does not catch SIGUSR1 now, which would end it"}
    assert len(box.family(answer)) == 1


def test_a_program_that_is_no_python_is_said_to_be_none(box: Any, until: Callable[..., Any]) -> None:
    answer = box.launch(["sleep", "600"])
    until(lambda: [one.comm for one in box.family(answer)] == ["sleep"])
    (process,) = look(box).processes
    assert process.problems == ("it runs no Python that py-spy knows",)
    assert process.thread_names == ("sleep",)


def test_a_run_that_has_ended_has_no_stacks(box: Any) -> None:
    box.wait(box.python("pass"))
    with pytest.raises(AgentError, match="has no process any more"):
        stacks.stacks({"state_dir": box.state_dir, "tag": "t"}, None)


def test_a_process_that_answers_nobody_costs_a_deadline_and_no_more(
    launched: Any, box: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = launched(STUCK)
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(stacks, "PY_SPY_S", 0.3)
    (leader,) = box.family(answer)
    found = stacks.by_py_spy(str(slow), [(leader.identity, leader.pid)])
    assert found[leader.identity]["problem"].startswith("py-spy did not end within")


@pytest.fixture
def other_namespace() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A Python as pid 2 of a pid namespace of its own; (its pid there, the process to end)."""
    argv = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child", "--"]
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    started = subprocess.Popen([*argv, sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert started.stdout is not None
        yield int(started.stdout.readline()), started
    finally:
        started.kill()
        started.wait(10)


@pytest.mark.lab
def test_a_process_of_another_pid_namespace_is_found_from_outside(
    other_namespace: tuple[int, subprocess.Popen[bytes]], until: Callable[..., Any]
) -> None:
    inner, started = other_namespace
    below = until(lambda: [p for p in proc.table().values() if p.ppid == started.pid])
    (outside,) = below
    assert outside.pid != inner
    wanted = {"pid": inner, "start": outside.start, "pidns": proc.pid_namespace(outside.pid)}
    answer = stacks.host_stacks({"wanted": [wanted], "again_s": 0.1}, None)
    (looks,) = answer["looks"].values()
    assert "time.sleep" in looks[0]["text"] or "<module>" in looks[0]["text"]
    stranger = {**wanted, "start": outside.start + 1}
    assert stacks.host_stacks({"wanted": [stranger], "again_s": 0.1}, None)["looks"] == {}
    elsewhere = {**wanted, "pidns": proc.pid_namespace()}
    assert stacks.find_outside([elsewhere]) == []


PERMISSION = """\
Error: Failed to get process executable name. Check that the process is running.

Caused by:
    0: Permission denied (os error 13)
"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (PERMISSION, "not permitted"),
        ("Error: Operation not permitted (os error 1)", "not permitted"),
        ("Error: Failed to find python version from target process", "no Python that py-spy knows"),
        ("Error: No such process (os error 3)", "has ended"),
        ("", "no word about why"),
        ("Error: something new", "py-spy: Error: something new"),
    ],
)
def test_the_reason_is_said_in_a_line(said: str, told: str) -> None:
    assert told in stacks.why_not(said)


def test_signals_that_are_caught() -> None:
    assert not stacks.catches(os.getpid(), signal.SIGUSR2)
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        assert stacks.catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)


FAULTHANDLER = """\
Thread 0x00007f10 [drafter-1] (most recent call first):
  File "/a/threading.py", line 331 in wait
  File "/a/x.py", line ??? in run

Current thread 0x00007f20 (most recent call first):
  File "/a/x.py", line 7 in <module>
"""


def test_faulthandlers_text_is_read() -> None:
    first, second = parse(FAULTHANDLER)
    assert first.name == "drafter-1" and second.name == "thread 0x00007f20"
    assert first.frames == (Frame("wait", "/a/threading.py", 331), Frame("run", "/a/x.py", None))
    assert second.holds_gil


@pytest.mark.parametrize("dump", ["", "[", "[1]", "[{}]", "no stacks", '[{"frames": 3}]'])
def test_anything_else_is_no_stack(dump: str) -> None:
    assert all(each.frames == () for each in parse(dump))


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [("abc", "abc", 3), ("xbc", "abc", 2), ("bc", "abc", 2), ("abc", "bc", 1), ("abc", "xyz", 0)],
)
def test_frames_are_compared_from_the_outermost(first: str, second: str, same: int) -> None:
    def frames(names: str) -> tuple[Frame, ...]:
        return tuple(Frame(name, "f", 1) for name in names)

    assert common_outer(frames(first), frames(second)) == same
