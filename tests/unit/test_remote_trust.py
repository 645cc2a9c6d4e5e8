"""`host trust`: what is shown, what is asked, what is stored.

Run: python -m pytest tests/unit/test_remote_trust.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflashctl.cli import main as frame
from dflashctl.errors import HostKeyChanged, Unreachable, UsageError
from dflashctl.remote.connection import SshConnection
from dflashctl.remote.known_hosts import fingerprint, line_for
from dflashctl.remote.trust import Finding, target_for, trust

sys.path.insert(0, str(Path(__file__).parent))

from remote_box import Box, new_key


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    monkeypatch.setenv("HOME", str(tmp_path / "home-of-me"))
    monkeypatch.setenv("DFLASHCTL_LOG", str(tmp_path / "log"))
    monkeypatch.delenv("COLUMNS", raising=False)
    made = Box(tmp_path)
    made.known_hosts.unlink()
    yield made
    made.close()


def yes(finding: Finding) -> bool:
    return True


def refuse(finding: Finding) -> bool:
    return False


def never(finding: Finding) -> bool:
    raise AssertionError("nothing to ask")


def test_a_key_that_was_agreed_to_is_stored_and_then_known(box: Box) -> None:
    (finding,) = trust(box.target, yes)
    assert not finding.known
    assert finding.offered.blob == box.host_key.asbytes()
    connection = SshConnection(box.target)
    try:
        assert connection.run(["echo", "in"], timeout_s=10).stdout == b"in\n"
    finally:
        connection.close()
    (again,) = trust(box.target, never)
    assert again.known


def test_a_key_that_was_not_agreed_to_is_not_stored(box: Box) -> None:
    with pytest.raises(UsageError, match="was not stored"):
        trust(box.target, refuse)
    assert not box.known_hosts.exists()


def test_a_changed_key_is_only_replaced_when_that_is_asked_for(box: Box) -> None:
    other = new_key(box.root / "other")
    line = line_for(f"[127.0.0.1]:{box.port}", other.get_name(), other.asbytes())
    box.known_hosts.write_text(line)
    with pytest.raises(HostKeyChanged):
        trust(box.target, yes)
    assert box.known_hosts.read_text() == line
    (finding,) = trust(box.target, yes, replace=True)
    assert fingerprint(other.asbytes()) in finding.before
    assert line not in box.known_hosts.read_text()
    (again,) = trust(box.target, never)
    assert again.known


def test_nobody_logs_in_to_look_at_a_key(box: Box) -> None:
    trust(box.targeted(identity_file="/nope"), yes)
    assert not any(transport.is_authenticated() for transport in box.server.transports)


def test_a_host_that_is_not_there_is_unreachable(box: Box) -> None:
    box.server.close()
    with pytest.raises(Unreachable):
        trust(box.target, yes)


def test_this_machine_has_no_host_key(box: Box) -> None:
    with pytest.raises(UsageError, match="no host key"):
        target_for(box.host("local"))


@pytest.fixture
def hosts(box: Box, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = box.root / "hosts.yaml"
    path.write_text(
        "version: 1\ndefaults: {host: gpu}\nhosts:\n  gpu:\n    engine: ssh\n"
        f"    ssh: {{host: 127.0.0.1, port: {box.port}, user: root, known_hosts: {box.known_hosts},"
        f" identity_file: {box.root}/id_ed25519}}\n"
    )
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(path))
    return path


def test_the_command_stores_by_fingerprint(box: Box, hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = fingerprint(box.host_key.asbytes())
    assert frame.run(["host", "trust", "gpu", "--fingerprint", "SHA256:wrong"]) == 11
    assert not box.known_hosts.exists()
    assert right in capsys.readouterr().err
    assert frame.run(["host", "trust", "gpu", "--fingerprint", right]) == 0
    assert f"stored in {box.known_hosts}" in capsys.readouterr().out
    assert frame.run(["host", "trust", "gpu"]) == 0
    assert "already known" in capsys.readouterr().out


def test_the_command_asks_nobody_without_a_terminal(
    box: Box, hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.run(["host", "trust", "gpu"]) == 2
    err = capsys.readouterr().err
    assert fingerprint(box.host_key.asbytes()) in err and "--fingerprint" in err
    assert not box.known_hosts.exists()


def test_the_command_shows_the_fingerprint_before_it_stores(
    box: Box, hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.run(["host", "trust", "gpu", "--yes"]) == 0
    assert fingerprint(box.host_key.asbytes()) in capsys.readouterr().err
    assert box.known_hosts.exists()


def test_the_command_knows_its_hosts(hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["host", "trust", "nope"]) == 6
    assert frame.run(["host", "list"]) == 0
    out = capsys.readouterr().out
    assert "gpu*" in out and "root@127.0.0.1" in out
    assert frame.run(["host", "list", "--json"]) == 0
    import json

    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dflashctl.hosts/1"
    assert [host["name"] for host in document["hosts"]] == ["gpu"]


def test_the_whole_way_from_unknown_to_trusted(
    box: Box, hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message of an unknown key names the command that is right."""
    assert frame.run(["gpu", "--host", "gpu"]) == 3
    err = capsys.readouterr().err
    assert "dflashctl host trust gpu" in err
