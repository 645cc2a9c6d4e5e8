"""Key files: every kind is read, one that is none is told, and where a passphrase comes from.

Run: python -m pytest tests/unit/test_remote_key_files.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from unproven import did_not_run

from dflashctl.errors import UsageError
from dflashctl.remote import keys

sys.path.insert(0, str(Path(__file__).parent))

from remote_box import new_key
from remote_house import House, at_home


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    with at_home(tmp_path, monkeypatch) as made:
        yield made


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
        did_not_run("reading every kind of key. It needs ssh-keygen (apt-get install openssh-client)")
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
