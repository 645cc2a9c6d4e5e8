"""`dflashctl doctor` as a person types it, without a lab: a dead ssh, a terminal, this machine itself.

Run: python -m pytest tests/local/test_doctor_local.py
"""

from __future__ import annotations

import io
import json
import re
import socket
import sys
from pathlib import Path

import pytest

from dflashctl.cli import main as frame
from dflashctl.doctor.document import DoctorDocument


def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str, *words: str) -> int:
    file = tmp_path / "hosts.yaml"
    file.write_text(f"version: 1\n{hosts}")
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(file))
    monkeypatch.setenv("DFLASHCTL_LOG", str(tmp_path / "log"))
    return frame.run(["doctor", *words])


def test_a_dead_ssh_is_a_failure_with_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        hosts = f"hosts:\n  far: {{engine: pct, container: 200, ssh: {{host: 127.0.0.1, port: {port}}}}}\n"
        code = command(tmp_path, monkeypatch, hosts, "-H", "far", "--json")
    out, err = capsys.readouterr()
    document = DoctorDocument.model_validate(json.loads(out))
    assert code == 4 and document.counts.failure == 1
    assert f"nothing listens on 127.0.0.1 port {port}" in err
    (ssh,) = [each for each in document.lines if each.name == "ssh"]
    assert ssh.status == "failure" and ssh.mend
    (torch,) = [each for each in document.lines if each.name == "torch"]
    assert torch.status == "not known" and "no connection" in torch.found


def test_a_lab_that_is_not_up_is_no_contact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASHCTL_LAB_DIR", str(tmp_path / "lab"))
    assert command(tmp_path, monkeypatch, "hosts:\n  lab: {engine: lab}\n") == 4
    out, err = capsys.readouterr()
    assert re.search(r"failure +ssh ", out) and "the lab is not up" in err and "next: dflashctl lab up" in err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_it_tells_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    hosts = f"hosts:\n  here: {{engine: local, python: {tmp_path}/none, workdir: {tmp_path}}}\n"
    command(tmp_path, monkeypatch, hosts, "-H", "here")
    assert "here: " in terminal.getvalue() and "checks in" in capsys.readouterr().out


def test_this_machine_by_engine_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No GPU is expected, and torch of a Python without packages fails."""
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    hosts = f"hosts:\n  here: {{engine: local, python: {bare}, workdir: {tmp_path}, gpus: {{expect: 0}}}}\n"
    code = command(tmp_path, monkeypatch, hosts, "-H", "here")
    out = capsys.readouterr().out
    assert code == 4
    assert "left out (engine local is this machine: no ssh, and the same clock): ssh key, known_hosts" in out
    assert "left out (hosts.yaml expects no GPU): driver" in out
    assert re.search(r"failure +packages", out) and "mend:" in out
    assert str(bare) in out
