"""How `doctor` reads its facts: the order, the number of remote commands, what stays known after a failure.

Run: python -m pytest tests/unit/test_doctor_gather.py
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doctor_kit import HOST, box, facts, inside, line, put, reading
from remote_box import Box as SshBox

from dflashctl.doctor import gather as gathering
from dflashctl.doctor import rules_contact
from dflashctl.doctor.checks import judge
from dflashctl.doctor.gather import gather, runnable_python
from dflashctl.errors import Unreachable
from dflashctl.remote.agent_call import AgentBug
from dflashctl.remote.connection import SshConnection
from dflashctl.remote.local import LocalEngine
from dflashctl.remote.ssh import SshEngine

INIT = "container/init"


class Script:
    """Answers in place of the other side; remembers what was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"doctor_host": box(), "doctor_inside": inside(), **answers}
        self.asked: list[tuple[str, str, str]] = []
        self.requests: dict[str, dict[str, Any]] = {}

    def __call__(self, engine: Any, op: str, request: dict[str, Any], **how: Any) -> Any:
        self.asked.append((op, how["where"], engine.host.python))
        self.requests[op] = request
        how["on_event"]({"clock": 0.0})
        answer = self.answers[op]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    def play(script: Script, **change: Any) -> Any:
        monkeypatch.setattr(gathering, "call", script)
        monkeypatch.setattr(gathering, "open_engine", LocalEngine)
        return gather(HOST.model_copy(update=change), lambda what: None)

    return play


def test_the_host_is_asked_first_then_the_inside(play: Any) -> None:
    script = Script()
    found = play(script, env={"HF_HOME": "/hf"})
    assert [asked[:2] for asked in script.asked] == [("doctor_host", "host"), ("doctor_inside", "inside")]
    assert found.box == box() and found.inside == inside()
    request = script.requests["doctor_inside"]
    assert request["env"] == {"HF_HOME": "/hf"} and request["python"] == HOST.python
    assert request["paths"] == ["/workspace", "/root/dflash", "/workspace/.dflashctl"]
    assert found.clocks["host"].offset_s < -1e9, "a clock of 1970 is behind"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"container/status": reading("status: stopped\n"), INIT: None}, "container 200 is stopped"),
        ({"container/status": reading("", 2)}, "could not be reached: see state"),
        ({f"{INIT}/freezer": "frozen 1\n"}, "container 200 is frozen"),
        ({f"{INIT}/python": {"exists": False, "other": None}}, "neither /root/venv/bin/python nor another"),
    ],
)
def test_an_inside_that_cannot_answer_is_not_asked(play: Any, change: dict[str, Any], why: str) -> None:
    answer = box()
    for path, value in change.items():
        answer = put(answer, path, value)
    script = Script(doctor_host=answer)
    found = play(script)
    assert [asked[0] for asked in script.asked] == ["doctor_host"]
    assert found.inside is None and why in found.inside_problem


def test_another_python_is_asked_where_the_configured_one_is_missing(play: Any) -> None:
    answer = put(box(), f"{INIT}/python", {"exists": False, "other": "/usr/bin/python3"})
    script = Script(doctor_host=answer)
    found = play(script)
    assert script.asked[1] == ("doctor_inside", "inside", "/usr/bin/python3")
    assert script.requests["doctor_inside"]["python"] is None, "its torch would be none of a run's"
    assert found.host.python == "/root/venv/bin/python"
    assert line(judge(found), "Python").status == "failure"


def test_a_side_that_fails_leaves_its_reason_and_the_other(play: Any) -> None:
    lost = Unreachable("the connection was lost", next="again")
    found = play(Script(doctor_inside=lost))
    assert found.box is not None and found.inside_problem == "the connection was lost (again)"
    found = play(Script(doctor_host=lost))
    assert found.inside is not None and found.box_problem == "the connection was lost (again)"
    assert line(judge(found), "torch").status in ("ok", "failure")
    assert line(judge(found), "Proxmox").found == "the connection was lost (again)"
    told = line(judge(found), "host")
    assert (told.found, told.mend) == ("the connection was lost", "again"), "not another mend than its own"


def test_a_bug_of_the_agent_leaves_the_rest(play: Any) -> None:
    found = play(Script(doctor_host=AgentBug("ct200: doctor_host: KeyError\nTraceback")))
    assert found.inside is not None and found.box_problem == "ct200: doctor_host: KeyError"
    assert line(judge(found), "host").status == "failure"


def test_without_a_container_this_machines_python_counts() -> None:
    bare = facts({"box/container": None}, host={"engine": "ssh", "container": None})
    assert runnable_python(bare) == ("/usr/bin/python3", "")


def bare_python(folder: Path) -> Path:
    """This Python without any package: no test waits for torch."""
    bare = folder / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    return bare


# --- over a real ssh connection


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshBox]:
    made = SshBox(tmp_path)
    yield made
    made.close()


def test_an_ssh_machine_takes_two_commands(
    server: SshBox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[str] = []
    real = SshConnection.run

    def counted(self: Any, argv: Any, **how: Any) -> Any:
        commands.append(argv[0])
        return real(self, argv, **how)

    host = server.host("ssh", python=str(bare_python(tmp_path)), container=None)
    monkeypatch.setattr(SshConnection, "run", counted)
    monkeypatch.setattr(rules_contact, "SLOW_S", 60.0)  # how loaded this machine is does not matter
    monkeypatch.setattr(gathering, "open_engine", lambda host: SshEngine(host, server.target))
    found = gather(host, lambda what: None)
    report = judge(found)
    assert len(commands) == 2, commands
    assert found.contact is not None and found.contact.latency_s is not None
    for name in ("ssh key", "known_hosts", "ssh", "clock", "folders", "Python"):
        assert line(report, name).status == "ok", line(report, name)
    assert {name for name, _ in report.left_out} >= {"state", "freezer", "NVML inside"}


def test_what_is_wrong_on_the_way_in_is_told_apart(server: SshBox, tmp_path: Path) -> None:
    from dflashctl.doctor.contact import look

    def trouble(**change: Any) -> tuple[str, str]:
        connection = SshConnection(server.targeted(**change))
        try:
            found = look(connection)
        finally:
            connection.close()
        return found.trouble, found.what

    assert trouble() == ("", "")
    empty = tmp_path / "empty"
    empty.touch()
    assert trouble(known_hosts=str(empty))[0] == "key unknown"
    kind, key = Path(f"{tmp_path}/id_ed25519.pub").read_text().split()[:2]
    other = tmp_path / "other"
    other.write_text(f"[127.0.0.1]:{server.port} {kind} {key}\n")
    assert trouble(known_hosts=str(other))[0] == "key changed"
    assert trouble(identity_file=str(tmp_path / "host_ed25519"))[0] == "not let in"
    assert trouble(identity_file=str(tmp_path / "none"))[0] == "setting"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert trouble(port=closed.getsockname()[1])[0] == "no contact"


def test_a_key_that_others_may_read_is_told(server: SshBox, tmp_path: Path) -> None:
    from dflashctl.doctor.contact import look

    (tmp_path / "id_ed25519").chmod(0o644)
    connection = SshConnection(server.target)
    try:
        found = look(connection)
    finally:
        connection.close()
    assert found.open_keys == (str(tmp_path / "id_ed25519"),) and found.host_key.startswith(
        "ssh-ed25519 SHA256:"
    )
