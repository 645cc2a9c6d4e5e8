"""Which keys are offered: an explicit one alone, the agent's, those of ~/.ssh.

Run: python -m pytest tests/unit/test_remote_log_in.py
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from unproven import did_not_run

from dflashctl.errors import DflashError, Unreachable
from dflashctl.remote import keys

sys.path.insert(0, str(Path(__file__).parent))

from remote_box import new_key
from remote_house import House, at_home


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    with at_home(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real ssh-agent of our own; yields the path of its socket."""
    if shutil.which("ssh-agent") is None:
        did_not_run("logging in by an ssh-agent. It needs ssh-agent (apt-get install openssh-client)")
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
