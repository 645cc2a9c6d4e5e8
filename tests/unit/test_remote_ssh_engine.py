"""Engine `ssh`: a bare machine over a real ssh connection, with and without sudo.

Run: python -m pytest tests/unit/test_remote_ssh_engine.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflashctl.config.hosts import Ssh
from dflashctl.errors import NotFound, Unreachable, UsageError, VerificationFailed
from dflashctl.remote import transfer
from dflashctl.remote.agent_call import call
from dflashctl.remote.ssh import SshEngine

sys.path.insert(0, str(Path(__file__).parent))

from remote_box import Box


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    made = Box(tmp_path)
    (tmp_path / "staging").mkdir()
    monkeypatch.setattr(transfer, "STAGING_PARENT", str(tmp_path / "staging"))
    yield made
    made.close()


@pytest.fixture
def engine(box: Box) -> Iterator[SshEngine]:
    with SshEngine(box.host("ssh", python=sys.executable), box.target) as made:
        yield made


@pytest.fixture
def sudo_engine(box: Box) -> Iterator[SshEngine]:
    box.program("sudo", f'[ "$1 $2" = "-n --" ] || exit 9; echo x >>{box.root}/sudo; shift 2; exec "$@"')
    host = box.host("ssh", ssh=Ssh(host="127.0.0.1", user="me", sudo=True))
    with SshEngine(host, box.target) as made:
        yield made


def test_an_agent_call(engine: SshEngine) -> None:
    answer = call(engine, "ping", {"echo": "é\udc80"}, timeout_s=20)
    assert answer["echo"] == "é\udc80" and answer["python"] == sys.executable
    assert not engine.has_separate_host
    assert call(engine, "ping", {"echo": 2}, where="host", timeout_s=20)["echo"] == 2


def test_a_talkative_login_shell_does_not_matter(box: Box, engine: SshEngine) -> None:
    box.service.environment["SHELL"] = str(box.bin / "noisy-shell")
    box.program("noisy-shell", 'echo "Last login: today"; printf "no newline"; exec /bin/sh "$@"')
    assert call(engine, "ping", {"echo": 1}, timeout_s=20)["echo"] == 1


def test_the_environment_is_the_known_one(engine: SshEngine) -> None:
    lines = engine.run(["env"], timeout_s=10).stdout.decode().splitlines()
    assert sorted(lines) == sorted([f"PATH={engine.host.path}", f"HOME={engine.host.home}", "LANG=C.UTF-8"])


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(words=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=6))
def test_arguments_arrive_unchanged_through_ssh_and_a_real_shell(engine: SshEngine, words: list[str]) -> None:
    done = engine.run(["printf", "%s\\0", "-", *words], timeout_s=20)
    assert done.stdout.decode() == "".join(f"{word}\0" for word in ["-", *words])


def test_files_go_in_and_come_out(box: Box, engine: SshEngine) -> None:
    source = box.root / "source"
    source.write_bytes(os.urandom(1_000_000))
    seen: list[tuple[int, int]] = []
    engine.put(
        source,
        str(box.root / "there"),
        mode=0o755,
        timeout_s=20,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (box.root / "there").read_bytes() == source.read_bytes()
    assert (box.root / "there").stat().st_mode & 0o777 == 0o755
    assert seen[-1] == (1_000_000, 1_000_000)
    engine.get(str(box.root / "there"), box.root / "back", timeout_s=20)
    assert (box.root / "back").read_bytes() == source.read_bytes()
    leftovers = [
        path.name for path in box.root.iterdir() if ".dflashctl-" in path.name or ".part" in path.name
    ]
    assert leftovers == []


def test_a_file_that_is_replaced_is_never_seen_half_written(box: Box, engine: SshEngine) -> None:
    (box.root / "there").write_text("old")
    before = (box.root / "there").stat().st_ino
    engine.put(Path(__file__), str(box.root / "there"), timeout_s=20)
    assert (box.root / "there").stat().st_ino != before


def test_what_is_not_there(box: Box, engine: SshEngine) -> None:
    with pytest.raises(NotFound, match="no such file: /nope/x"):
        engine.get("/nope/x", box.root / "back", timeout_s=10)
    with pytest.raises(VerificationFailed, match="no such folder"):
        engine.put(Path(__file__), "/nope/x", timeout_s=10)
    with pytest.raises(UsageError, match="absolute"):
        engine.put(Path(__file__), "x", timeout_s=10)
    assert not (box.root / "back").exists()


def test_errors_of_the_laptop_s_own_files_are_told_as_such(box: Box, engine: SshEngine) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*/nope: No such file"):
        engine.put(box.root / "nope", str(box.root / "there"), timeout_s=10)
    with pytest.raises(UsageError, match=r"cannot write .*No such file"):
        engine.get(__file__, box.root / "nope" / "x", timeout_s=10)


def test_a_deadline_says_that_it_may_still_be_running(engine: SshEngine) -> None:
    with pytest.raises(Unreachable, match=r"sleep did not end within 0\.3 s; it may still be running"):
        engine.run(["sleep", "15"], timeout_s=0.3)


def test_with_sudo_commands_and_files_go_through_it(box: Box, sudo_engine: SshEngine) -> None:
    assert sudo_engine.run(["echo", "x"], timeout_s=10).stdout == b"x\n"
    sudo_engine.put(Path(__file__), str(box.root / "there"), mode=0o640, timeout_s=20)
    assert (box.root / "there").read_bytes() == Path(__file__).read_bytes()
    assert (box.root / "there").stat().st_mode & 0o777 == 0o640
    sudo_engine.get(str(box.root / "there"), box.root / "back", timeout_s=20)
    assert (box.root / "back").read_bytes() == Path(__file__).read_bytes()
    with pytest.raises(NotFound):
        sudo_engine.get("/nope/x", box.root / "back2", timeout_s=20)
    with pytest.raises(VerificationFailed, match="cannot write /nope/x"):
        sudo_engine.put(Path(__file__), "/nope/x", timeout_s=20)
    assert len((box.root / "sudo").read_text()) >= 10
    assert list((box.root / "staging").iterdir()) == []


def test_a_sudo_that_wants_a_password_is_told(box: Box, sudo_engine: SshEngine) -> None:
    box.program("sudo", "echo 'sudo: a password is required' >&2; exit 1")
    with pytest.raises(UsageError, match="a password is required") as caught:
        sudo_engine.run(["true"], timeout_s=10)
    assert "NOPASSWD" in caught.value.next
