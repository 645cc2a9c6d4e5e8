"""Which keys are offered: an explicit one alone, the agent's, those of ~/.ssh; passphrases.

Run: python -m pytest tests/unit/test_remote_log_in.py
"""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from paramiko.common import AUTH_FAILED, AUTH_PARTIALLY_SUCCESSFUL, AUTH_SUCCESSFUL

from dflashctl.errors import DflashError, Unreachable, UsageError
from dflashctl.remote import keys, sshconfig
from dflashctl.remote.connection import SshConnection
from dflashctl.remote.hops import Target
from dflashctl.remote.known_hosts import line_for

sys.path.insert(0, str(Path(__file__).parent))

from remote_box import new_key


class Door(paramiko.ServerInterface):
    """Lets one key in, and no certificate; writes down everything that was shown."""

    def __init__(self, right: paramiko.PKey | None) -> None:
        self.right = right
        self.shown: list[bytes] = []
        self.partial = False
        self.methods = "publickey"

    def get_allowed_auths(self, username: str) -> str:
        return "password" if self.partial else self.methods

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        certificate = getattr(key, "public_blob", None)
        self.shown.append(certificate.key_blob if certificate else key.asbytes())
        if certificate or self.right is None or key != self.right:
            return AUTH_FAILED
        return AUTH_PARTIALLY_SUCCESSFUL if self.partial else AUTH_SUCCESSFUL


class House:
    """A server with a Door, the home folder of the person who knocks, and the target."""

    def __init__(self, root: Path) -> None:
        self.home = root / "me"
        (self.home / ".ssh").mkdir(parents=True)
        self.host_key = new_key(root / "host_key")
        self.door = Door(None)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = int(self._listener.getsockname()[1])
        known = root / "known_hosts"
        known.write_text(line_for(f"[127.0.0.1]:{port}", self.host_key.get_name(), self.host_key.asbytes()))
        self.target = Target(label="box", host="127.0.0.1", user="root", port=port, known_hosts=str(known))
        self._transports: list[paramiko.Transport] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        transport = paramiko.Transport(connection)
        self._transports.append(transport)
        transport.add_server_key(self.host_key)
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            transport.start_server(server=self.door)

    def knock(self, **changes: Any) -> None:
        """Log in, or raise."""
        from dataclasses import replace

        connection = SshConnection(replace(self.target, **changes))
        try:
            connection.transport()
        finally:
            connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for transport in self._transports:
            transport.close()


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    made = House(tmp_path)
    monkeypatch.setenv("HOME", str(made.home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv(keys.PASSPHRASE_VARIABLE, raising=False)
    monkeypatch.setattr(sshconfig, "SYSTEM_CONFIG", tmp_path / "etc" / "ssh_config")
    yield made
    made.close()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real ssh-agent of our own; yields the path of its socket."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("ssh-agent (openssh-client) is not here")
    sock = Path(str(tmp_path)[:80]) / "agent"
    with subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(sock)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it prints where it is once it listens
            monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
            yield sock
        finally:
            process.terminate()


def add_to_agent(path: Path) -> None:
    subprocess.run(["ssh-add", "-q", str(path)], timeout=60, check=True, capture_output=True)


def test_an_explicit_key_is_the_only_one_offered(house: House, agent: Path) -> None:
    new_key(house.home / ".ssh" / "id_ed25519")
    held = house.home / "held"
    new_key(held)
    add_to_agent(held)
    explicit = new_key(house.home / "explicit")
    with pytest.raises(Unreachable, match="did not let root in"):
        house.knock(identity_file=str(house.home / "explicit"))
    assert set(house.door.shown) == {explicit.asbytes()}
    house.door.right = explicit
    house.knock(identity_file=str(house.home / "explicit"))


def test_the_agent_s_keys_come_first_and_then_those_of_the_home(house: House, agent: Path) -> None:
    at_home = new_key(house.home / ".ssh" / "id_ed25519")
    held = new_key(house.home / "held")
    add_to_agent(house.home / "held")
    house.door.right = at_home
    house.knock()
    assert list(dict.fromkeys(house.door.shown)) == [held.asbytes(), at_home.asbytes()]
    house.door.shown.clear()
    house.door.right = held
    house.knock()
    assert set(house.door.shown) == {held.asbytes()}


def test_the_agent_s_key_that_the_configuration_names_comes_first(house: House, agent: Path) -> None:
    """sshd hangs up after six (MaxAuthTries): who held ten was not let in by the one that was named."""
    for number in range(8):
        new_key(house.home / f"other{number}")
        add_to_agent(house.home / f"other{number}")
    house.door.right = new_key(house.home / "mine")
    add_to_agent(house.home / "mine")
    (house.home / ".ssh" / "config").write_text(f"Host *\n IdentityFile {house.home}/mine\n")
    house.knock()
    assert set(house.door.shown) == {house.door.right.asbytes()}


def certify(house: House, key: Path, *options: str) -> bytes:
    """KEY-cert.pub beside the key; returns what of it a server sees."""
    if not (house.home / "ca").exists():
        new_key(house.home / "ca")
    sign = [
        "ssh-keygen",
        "-q",
        "-s",
        str(house.home / "ca"),
        "-I",
        "me",
        "-n",
        "root",
        *options,
        f"{key}.pub",
    ]
    subprocess.run(sign, timeout=60, check=True)
    return base64.b64decode(Path(f"{key}-cert.pub").read_text().split()[1])


@pytest.mark.parametrize("how", ["beside", "named", "agent"])
def test_a_certificate_is_offered_with_its_key_and_the_key_alone_after_it(
    house: House, how: str, request: pytest.FixtureRequest
) -> None:
    """Who kept an expired certificate beside a key that the server knows was not let in."""
    path = house.home / ".ssh" / "id_ed25519"
    house.door.right = new_key(path)
    certificate = certify(house, path)
    if how != "beside":
        elsewhere = house.home / "signed today.pub"
        Path(f"{path}-cert.pub").rename(elsewhere)
        (house.home / ".ssh" / "config").write_text(f'Host *\n CertificateFile "%d/{elsewhere.name}"\n')
    if how == "agent":
        request.getfixturevalue("agent")
        add_to_agent(path)
        path.unlink()
    house.knock()
    assert list(dict.fromkeys(house.door.shown)) == [certificate, house.door.right.asbytes()]


def test_a_certificate_of_another_key_is_not_offered(house: House) -> None:
    path = house.home / ".ssh" / "id_ed25519"
    house.door.right = new_key(path)
    new_key(house.home / "other")
    certify(house, house.home / "other")
    for name in ("other-cert.pub", "other.pub", "nothing", "other"):
        house.door.shown.clear()
        (house.home / ".ssh" / "config").write_text(f"Host *\n CertificateFile ~/{name}\n")
        house.knock()
        assert set(house.door.shown) == {house.door.right.asbytes()}


def test_a_locked_key_works_through_the_agent(house: House, agent: Path) -> None:
    path = house.home / ".ssh" / "id_ed25519"
    house.door.right = new_key(path)
    add_to_agent(path)
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-N", "secret", "-P", "", "-f", str(path)], timeout=60, check=True
    )
    house.knock()


@pytest.mark.parametrize("how", ["locked", "public", "private gone"])
def test_an_explicit_key_that_only_the_agent_can_use(house: House, agent: Path, how: str) -> None:
    """As ssh -i does: a passphrase was asked for although the agent held the key; for who keeps keys in an
    agent alone, a .pub is all there is to name."""
    path = house.home / "mine"
    house.door.right = new_key(path)
    add_to_agent(path)
    new_key(house.home / "other")
    add_to_agent(house.home / "other")
    if how == "locked":
        change = ["ssh-keygen", "-q", "-p", "-N", "secret", "-P", "", "-f", str(path)]
        subprocess.run(change, timeout=60, check=True)
    if how == "private gone":
        path.unlink()
    house.knock(identity_file=f"{path}.pub" if how == "public" else str(path))
    assert set(house.door.shown) == {house.door.right.asbytes()}, "and no other key of the agent"


def test_identities_only_may_name_a_public_key_of_the_agent(house: House, agent: Path) -> None:
    path = house.home / "mine"
    house.door.right = new_key(path)
    add_to_agent(path)
    path.unlink()
    config = f"Host *\n IdentitiesOnly yes\n IdentityFile {path}.pub\n"
    (house.home / ".ssh" / "config").write_text(config)
    house.knock()


def test_identities_only_leaves_other_keys_of_the_agent_alone(house: House, agent: Path) -> None:
    wanted = new_key(house.home / "wanted")
    add_to_agent(house.home / "wanted")
    other = new_key(house.home / "other")
    add_to_agent(house.home / "other")
    (house.home / ".ssh" / "config").write_text(
        f"Host *\n IdentitiesOnly yes\n IdentityFile {house.home}/wanted\n"
    )
    house.door.right = wanted
    house.knock()
    assert other.asbytes() not in house.door.shown
    house.door.right = None
    with pytest.raises(Unreachable):
        house.knock()
    assert other.asbytes() not in house.door.shown


def test_identity_agent_names_another_agent_or_none(
    house: House, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.door.right = new_key(house.home / "held")
    add_to_agent(house.home / "held")
    monkeypatch.delenv("SSH_AUTH_SOCK")
    with pytest.raises(Unreachable):
        house.knock()
    (house.home / ".ssh" / "config").write_text(f"Host *\n IdentityAgent {agent}\n")
    house.knock()
    monkeypatch.setenv("MY_AGENT", str(agent))
    (house.home / ".ssh" / "config").write_text("Host *\n IdentityAgent $MY_AGENT\n")
    house.knock()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
    (house.home / ".ssh" / "config").write_text("Host *\n IdentityAgent none\n")
    with pytest.raises(Unreachable):
        house.knock()


def test_an_agent_that_is_gone_is_no_error(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(house.home / "gone"))
    house.door.right = new_key(house.home / ".ssh" / "id_ed25519")
    house.knock()


def test_no_key_at_all_says_so(house: House) -> None:
    with pytest.raises(Unreachable, match="no key") as caught:
        house.knock()
    assert caught.value.exit_code == 3
    first = "make a key and bring it there: ssh-keygen -t ed25519 && ssh-copy-id -p "
    assert (
        caught.value.next.startswith(first) and "root@127.0.0.1; or check with: ssh -v" in caught.value.next
    )


def test_a_passphrase_comes_from_the_environment(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.door.right = new_key(house.home / "locked", "correct horse")
    monkeypatch.setenv(keys.PASSPHRASE_VARIABLE, "correct horse")
    house.knock(identity_file=str(house.home / "locked"))


def test_a_wrong_passphrase_in_the_environment_is_told_without_showing_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_key(house.home / "locked", "correct horse")
    monkeypatch.setenv(keys.PASSPHRASE_VARIABLE, "battery staple")
    with pytest.raises(UsageError, match="does not open") as caught:
        house.knock(identity_file=str(house.home / "locked"))
    assert "battery staple" not in str(caught.value)


def test_without_a_terminal_nobody_is_asked(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    new_key(house.home / "locked", "correct horse")
    monkeypatch.setattr(keys.getpass, "getpass", lambda *a, **k: pytest.fail("asked"))
    with pytest.raises(UsageError, match="no terminal to ask") as caught:
        house.knock(identity_file=str(house.home / "locked"))
    assert keys.PASSPHRASE_VARIABLE in caught.value.next


class Terminal:
    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


def test_on_a_terminal_the_person_is_asked_up_to_three_times(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.door.right = new_key(house.home / "locked", "correct horse")
    answers = iter(["wrong", "correct horse"])
    monkeypatch.setattr(keys.sys, "stdin", Terminal())
    monkeypatch.setattr(keys.sys, "stderr", Terminal())
    monkeypatch.setattr(keys.getpass, "getpass", lambda prompt, stream: next(answers))
    house.knock(identity_file=str(house.home / "locked"))
    assert next(answers, None) is None
    monkeypatch.setattr(keys.getpass, "getpass", lambda prompt, stream: "wrong")
    with pytest.raises(UsageError, match="three wrong passphrases"):
        house.knock(identity_file=str(house.home / "locked"))


def test_a_locked_key_of_the_home_is_only_opened_when_the_others_did_not_do(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_key(house.home / ".ssh" / "id_ed25519", "secret")
    open_key = house.home / "open"
    house.door.right = new_key(open_key)
    (house.home / ".ssh" / "config").write_text(
        f"Host *\n IdentityFile ~/.ssh/id_ed25519\n IdentityFile {open_key}\n"
    )
    monkeypatch.setattr(keys.getpass, "getpass", lambda *a, **k: pytest.fail("asked"))
    house.knock()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read the key"),
        ("not a key\n", "not a private key"),
        ("PuTTY-User-Key-File-3: ssh-ed25519\n", "it is a key of PuTTY"),
        ("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAi6Z96c me@laptop\n", "it is a public key, and no ssh agent"),
    ],
)
def test_a_key_file_that_is_none_is_told(house: House, content: str | None, words: str) -> None:
    path = house.home / "key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=words) as caught:
        house.knock(identity_file=str(path))
    assert str(path) in caught.value.where
    assert "http" not in caught.value.what
    assert any(word in caught.value.next for word in ("identity_file", "puttygen", "ssh-add"))


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
@pytest.mark.parametrize("form", ["RFC4716", "PEM"])
def test_every_kind_of_key_file_is_read(tmp_path: Path, kind: str, form: str) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen (openssh-client) is not here")
    for phrase in ("", "secret"):
        path = tmp_path / f"{kind}{bool(phrase)}"
        small = ["-b", "2048"] if kind == "rsa" else []
        subprocess.run(
            ["ssh-keygen", "-q", "-a", "1", "-t", kind, *small, "-m", form, "-N", phrase, "-f", str(path)],
            timeout=60,
            check=True,
        )
        if phrase:
            with pytest.raises(keys.Encrypted):
                keys.read_key(path, None)
            with pytest.raises(keys.Encrypted):
                keys.read_key(path, "wrong")
        key = keys.read_key(path, phrase or None)
        assert key.asbytes() == keys.public_blob(path)


def test_a_server_that_wants_more_than_a_key_is_told(house: House) -> None:
    house.door.right = new_key(house.home / "key")
    house.door.partial = True
    with pytest.raises(DflashError, match="it also wants password"):
        house.knock(identity_file=str(house.home / "key"))


def test_a_server_that_takes_no_keys_is_told(house: House) -> None:
    new_key(house.home / "key")
    house.door.methods = "password"
    with pytest.raises(Unreachable, match="did not let root in"):
        house.knock(identity_file=str(house.home / "key"))
