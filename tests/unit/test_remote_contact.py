"""Who answers at an ssh host's address, if anybody does: host keys, and what is said when there is no log-in.

Run: python -m pytest tests/unit/test_remote_contact.py
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from dflashctl.errors import HostKeyChanged, Unreachable
from dflashctl.remote.connection import SshConnection
from dflashctl.remote.hostkeys import UnknownHostKey
from dflashctl.remote.known_hosts import fingerprint, line_for

sys.path.insert(0, str(Path(__file__).parent))

from remote_box import Box, new_key


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()


def test_an_unknown_key_is_refused_with_its_fingerprint_and_the_way_out(box: Box) -> None:
    box.known_hosts.write_text("")
    with pytest.raises(UnknownHostKey) as caught:
        SshConnection(box.target).run(["true"], timeout_s=10)
    assert fingerprint(box.host_key.asbytes()) in caught.value.what
    assert "dflashctl host trust box" in caught.value.next
    assert caught.value.exit_code == 3


def test_a_changed_key_has_its_own_error(box: Box) -> None:
    other = new_key(box.root / "other")
    box.known_hosts.write_text(line_for(f"[127.0.0.1]:{box.port}", other.get_name(), other.asbytes()))
    with pytest.raises(HostKeyChanged) as caught:
        SshConnection(box.target).run(["true"], timeout_s=10)
    assert fingerprint(box.host_key.asbytes()) in caught.value.what
    assert fingerprint(other.asbytes()) in caught.value.what
    assert f"{box.known_hosts}:1" in caught.value.what
    assert caught.value.exit_code == 11


def test_nothing_is_sent_to_a_server_with_a_wrong_key(box: Box) -> None:
    """Not even the log-in is tried."""
    box.known_hosts.write_text("")
    with pytest.raises(UnknownHostKey):
        SshConnection(box.target).run(["true"], timeout_s=10)
    time.sleep(0.2)
    assert not any(transport.is_authenticated() for transport in box.server.transports)


def test_a_refused_connection_says_so(box: Box) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(Unreachable, match=f"nothing listens on 127.0.0.1 port {port}"):
            SshConnection(box.targeted(port=port)).run(["true"], timeout_s=10)


def test_a_port_that_never_greets_ends_with_the_connect_timeout(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = box.targeted(port=silent.getsockname()[1], connect_timeout_s=0.4)
        started = time.monotonic()
        with pytest.raises(Unreachable, match="takes connections, but does not answer as an ssh server"):
            SshConnection(target).run(["true"], timeout_s=60)
        assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("code", "host", "what", "mend"),
    [
        (
            socket.EAI_NONAME,
            "no-such-box",
            "the name no-such-box is not known",
            "correct ssh.host in hosts.yaml, or add `Host no-such-box` with its HostName to ~/.ssh/config",
        ),
        (
            socket.EAI_AGAIN,
            "box",
            "box cannot be looked up now",
            "see whether this machine is online, with its VPN if it needs one",
        ),
    ],
)
def test_a_name_that_is_not_found_is_told_apart_from_a_network_that_is_not_there(
    box: Box, monkeypatch: pytest.MonkeyPatch, code: int, host: str, what: str, mend: str
) -> None:
    def not_found(*args: object, **options: object) -> list[object]:
        raise socket.gaierror(code, "as the C library words it")

    monkeypatch.setattr(socket, "getaddrinfo", not_found)
    with pytest.raises(Unreachable, match=what) as caught:
        SshConnection(box.targeted(host=host)).run(["true"], timeout_s=10)
    assert caught.value.next == mend


def test_a_resolver_that_hangs_ends_with_the_connect_timeout(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: release.wait(60) and [])
    started = time.monotonic()
    with pytest.raises(Unreachable, match="did not answer within"):
        SshConnection(box.targeted(connect_timeout_s=0.3)).run(["true"], timeout_s=50)
    assert time.monotonic() - started < 30
    release.set()


def test_a_wrong_key_is_told_with_what_was_offered(box: Box) -> None:
    new_key(box.root / "stranger")
    with pytest.raises(Unreachable, match="did not let root in") as caught:
        SshConnection(box.targeted(identity_file=str(box.root / "stranger"))).run(["true"], timeout_s=10)
    assert str(box.root / "stranger") in caught.value.what
    port = box.targeted().port
    assert caught.value.next.startswith(
        f"bring your key there: ssh-copy-id -p {port} root@127.0.0.1; or check"
    )


def test_a_failed_connection_leaves_no_transport_behind(box: Box, until: Callable[..., Any]) -> None:
    before = sum(isinstance(thread, paramiko.Transport) for thread in threading.enumerate())
    box.known_hosts.write_text("")
    with pytest.raises(UnknownHostKey):
        SshConnection(box.target).run(["true"], timeout_s=10)
    box.server.drop()
    until(lambda: sum(isinstance(thread, paramiko.Transport) for thread in threading.enumerate()) <= before)
