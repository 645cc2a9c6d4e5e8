"""Engine `pct` against scripts that behave like the ugly sides of the real tool, over a real ssh connection.

Run: python -m pytest tests/unit/test_remote_pct_engine.py
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl.config.hosts import Ssh
from dflashctl.errors import ContainerDown, Locked, NotFound, Unreachable, UsageError, VerificationFailed
from dflashctl.remote import agent_call, channel, transfer
from dflashctl.remote import pct as pct_module
from dflashctl.remote.pct import PctEngine

sys.path.insert(0, str(Path(__file__).parent))

from remote_box import Box

WORKING = """\
case "$1" in
exec) shift 3; exec "$@" ;;
push) src=$3; dst=$4; cp "$src" "$dst" 2>/tmp/none || echo "failed to create file: $dst: gone" >&2; exit 0 ;;
pull) src=$3; dst=$4; : >"$dst"
      [ -e "$src" ] || { echo "failed to open $src: No such file or directory" >&2; exit 0; }
      cp "$src" "$dst"; exit 0 ;;
status) echo "status: running" ;;
esac
"""


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    made = Box(tmp_path)
    (tmp_path / "staging").mkdir()
    monkeypatch.setattr(transfer, "STAGING_PARENT", str(tmp_path / "staging"))
    yield made
    made.close()


@pytest.fixture
def engine(box: Box) -> Iterator[PctEngine]:
    box.program("pct", WORKING.replace("/tmp/none", str(box.root / "none")))
    with PctEngine(box.host("pct"), box.target) as made:
        yield made


def staged(box: Box) -> list[str]:
    return [path.name for path in (box.root / "staging").iterdir()]


def test_commands_start_in_a_known_environment(box: Box, engine: PctEngine) -> None:
    lines = engine.run(["env"], timeout_s=10).stdout.decode().splitlines()
    assert sorted(lines) == sorted([f"PATH={engine.host.path}", f"HOME={engine.host.home}", "LANG=C.UTF-8"])


def test_run_on_the_host_does_not_go_through_pct(box: Box, engine: PctEngine) -> None:
    box.program("pct", "echo through pct")
    assert engine.run_on_host(["echo", "direct"], timeout_s=10).stdout == b"direct\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["printf", "%s|", "a b", "$HOME", "*", "'", '"', "", "\\", "`id`", "$(id)", "!x", "~", "#", "-n"],
        ["printf", "%s|", "line\nbreak", "tab\there", ";", "&&", "|", ">f", "<f", "{a,b}", "[x]", "?"],
    ],
)
def test_arguments_arrive_unchanged(engine: PctEngine, argv: list[str]) -> None:
    assert engine.run(argv, timeout_s=10).stdout.decode() == "".join(f"{word}|" for word in argv[2:])


def test_arguments_that_are_not_ascii_are_refused(box: Box, engine: PctEngine) -> None:
    with pytest.raises(UsageError, match="not ASCII"):
        engine.run(["echo", "café"], timeout_s=10)
    assert box.server.accepted == 0


@pytest.mark.parametrize(
    ("said", "code", "kind"),
    [
        ("container '200' not running!", 255, ContainerDown),
        ("Configuration file 'nodes/pve/lxc/200.conf' does not exist", 2, NotFound),
        ("lxc-attach: 200: attach.c: lxc_attach: 993 Failed to get init pid", 1, ContainerDown),
        ("Traceback: the program's own", 1, Unreachable),
    ],
)
def test_a_talkative_host_hides_no_reason(
    box: Box, engine: PctEngine, said: str, code: int, kind: type[Exception]
) -> None:
    """A .bashrc that greets on stdout, and the complaints of Perl about a locale that is not there."""
    noise = 'echo "Welcome to pve"; echo "perl: warning: Setting locale failed." >&2'
    box.program("pct", f'{noise}\n[ "$1" = status ] && {{ echo "status: stopped"; exit 0; }}\n'
                       f'echo "{said}" >&2; exit {code}')  # fmt: skip
    with pytest.raises(kind) as caught:
        agent_call.call(engine, "ping", {}, timeout_s=20)
    assert type(caught.value) is kind


def test_the_words_of_a_program_that_answered_are_its_own(engine: PctEngine) -> None:
    script = "echo figures; echo \"container '200' not running!\" >&2; exit 3"
    assert engine.run(["sh", "-c", script], timeout_s=10).exit_code == 3


def test_a_file_goes_in_with_its_mode_and_nothing_stays_on_the_host(box: Box, engine: PctEngine) -> None:
    source = box.root / "source"
    source.write_bytes(os.urandom(3_000_000))
    seen: list[tuple[int, int]] = []
    engine.put(
        source,
        str(box.root / "inside"),
        timeout_s=20,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (box.root / "inside").read_bytes() == source.read_bytes()
    assert seen[-1] == (3_000_000, 3_000_000)
    assert staged(box) == []


def test_the_staging_folder_is_private_and_has_another_name_each_time(box: Box, engine: PctEngine) -> None:
    box.program(
        "pct", f'stat -c "%a %n" "$(dirname "$3")" >>{box.root}/seen; stat -c %a "$3" >>{box.root}/seen'
    )
    for _ in range(2):
        engine.put(Path(__file__), "/inside", timeout_s=20)
    folder1, file1, folder2, file2 = (box.root / "seen").read_text().splitlines()
    assert folder1.startswith("700 ") and folder2.startswith("700 ")
    assert file1 == file2 == "600"
    assert folder1 != folder2


def test_a_push_that_fails_with_exit_0_is_a_failure(box: Box, engine: PctEngine) -> None:
    with pytest.raises(VerificationFailed, match="failed to create file: /nope/x"):
        engine.put(Path(__file__), "/nope/x", timeout_s=20)
    assert staged(box) == []


def test_the_mode_is_given_to_push(box: Box, engine: PctEngine) -> None:
    box.program("pct", f'echo "$@" >>{box.root}/argv')
    engine.put(Path(__file__), "/inside/x", mode=0o755, timeout_s=20)
    words = (box.root / "argv").read_text().split()
    assert words[:2] == ["push", "200"] and words[3:] == ["/inside/x", "--perms", "0755"]


def test_a_held_lock_is_waited_for(box: Box, engine: PctEngine) -> None:
    box.program(
        "pct",
        f"n=$(cat {box.root}/n 2>{box.root}/e || echo 0); echo $((n + 1)) >{box.root}/n\n"
        '[ "$n" -ge 2 ] && exit 0\n'
        "echo 'trying to acquire lock...' >&2\n"
        "echo \"can't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout\" >&2; exit 4",
    )
    engine.put(Path(__file__), "/inside", timeout_s=20)
    assert (box.root / "n").read_text() == "3\n"


def test_a_lock_that_stays_is_given_up(box: Box, engine: PctEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pct_module, "LOCK_WAIT_S", 1.0)
    box.program(
        "pct", "echo \"can't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout\" >&2; exit 4"
    )
    with pytest.raises(Locked, match="locked by another pct command"):
        engine.put(Path(__file__), "/inside", timeout_s=60)
    assert staged(box) == []


def test_waiting_for_a_lock_that_is_granted_is_no_failure(box: Box, engine: PctEngine) -> None:
    box.program("pct", "echo 'trying to acquire lock...' >&2; echo ' OK' >&2")
    engine.put(Path(__file__), "/inside", timeout_s=20)


def test_a_file_comes_out(box: Box, engine: PctEngine) -> None:
    inside = box.root / "inside"
    inside.write_bytes(os.urandom(100_000))
    engine.get(str(inside), box.root / "copy", timeout_s=20)
    assert (box.root / "copy").read_bytes() == inside.read_bytes()
    assert staged(box) == []


def test_a_file_that_is_not_there_is_not_found_and_leaves_no_copy(box: Box, engine: PctEngine) -> None:
    with pytest.raises(NotFound, match="no such file: /nope"):
        engine.get("/nope", box.root / "copy", timeout_s=20)
    assert not (box.root / "copy").exists()
    assert staged(box) == []


def test_a_pull_that_was_cut_short_is_noticed(box: Box, engine: PctEngine) -> None:
    inside = box.root / "inside"
    inside.write_bytes(b"x" * 100_000)
    cut = WORKING.replace(
        'cp "$src" "$dst"; exit 0 ;;\nstatus', 'head -c 500 "$src" >"$dst"; exit 0 ;;\nstatus'
    )
    assert cut != WORKING
    box.program("pct", cut)
    with pytest.raises(VerificationFailed, match="arrived different"):
        engine.get(str(inside), box.root / "copy", timeout_s=20)
    assert not (box.root / "copy").exists()


def test_a_stopped_container_has_its_own_error(box: Box, engine: PctEngine) -> None:
    box.program("pct", "echo \"container '200' not running!\" >&2; exit 255")
    with pytest.raises(ContainerDown) as caught:
        engine.run(["true"], timeout_s=10)
    assert "pct start 200" in caught.value.next


def test_the_same_words_from_a_program_that_also_answers_are_its_own(box: Box, engine: PctEngine) -> None:
    done = engine.run(
        ["sh", "-c", "echo answer; echo \"container '200' not running!\" >&2; exit 3"], timeout_s=10
    )
    assert (done.exit_code, done.stdout) == (3, b"answer\n")


def test_a_container_stopped_under_a_command_is_found_out(box: Box, engine: PctEngine) -> None:
    box.program("pct", '[ "$1" = status ] && { echo "status: stopped"; exit 0; }\nexit 137')
    with pytest.raises(ContainerDown, match="was stopped"):
        engine.run(["sleep", "9"], timeout_s=10)


def test_a_killed_command_in_a_running_container_is_just_that(engine: PctEngine) -> None:
    assert engine.run(["sh", "-c", "kill -9 $$"], timeout_s=10).exit_code == 137


def test_after_a_deadline_the_command_may_still_be_running(engine: PctEngine) -> None:
    with pytest.raises(Unreachable, match=r"sleep did not end within 0\.4 s; it may still be running"):
        engine.run(["sleep", "15"], timeout_s=0.4)


def test_after_a_deadline_a_frozen_container_is_called_frozen(box: Box, engine: PctEngine) -> None:
    """`pct status` says running for a frozen one; its first process (here: one of ours, stopped) tells."""
    import signal
    import subprocess

    with subprocess.Popen(["sleep", "30"]) as stopped:
        try:
            stopped.send_signal(signal.SIGSTOP)
            box.program(
                "pct",
                f'[ "$1" = status ] || exec sleep 15\necho "pid: {stopped.pid}"\necho "status: running"',
            )
            with pytest.raises(ContainerDown, match="frozen") as caught:
                engine.run(["true"], timeout_s=0.4)
        finally:
            stopped.kill()
    assert caught.value.exit_code == 12


def test_a_frozen_container_is_found_out_long_before_the_deadline(
    box: Box, engine: PctEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal
    import subprocess

    monkeypatch.setattr(channel, "QUIET_FIRST_S", 0.5)
    with subprocess.Popen(["sleep", "60"]) as stopped:
        try:
            stopped.send_signal(signal.SIGSTOP)
            box.program("pct", f'[ "$1" = status ] || exec sleep 45\necho "pid: {stopped.pid}"')
            started = time.monotonic()
            with pytest.raises(ContainerDown, match="frozen"):
                engine.run(["true"], timeout_s=60)
            assert time.monotonic() - started < 40
        finally:
            stopped.kill()


def test_a_slow_silent_command_is_looked_after_and_goes_on(
    box: Box, engine: PctEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "QUIET_FIRST_S", 0.2)
    box.program("pct", f'[ "$1" = status ] && {{ echo x >>{box.root}/asked; exit 0; }}\nsleep 2; echo late')
    assert engine.run(["true"], timeout_s=20).stdout == b"late\n"
    assert 1 <= (box.root / "asked").read_text().count("x") <= 5  # ever more seldom


def test_sudo_is_put_before_every_command(box: Box) -> None:
    box.program("sudo", '[ "$1 $2" = "-n --" ] || exit 9; shift 2; echo via sudo; exec "$@"')
    box.program("pct", WORKING)
    host = box.host("pct", ssh=Ssh(host="127.0.0.1", user="me", sudo=True))
    with PctEngine(host, box.target) as engine:
        assert engine.run(["echo", "inside"], timeout_s=10).stdout == b"via sudo\ninside\n"
        assert engine.run_on_host(["echo", "host"], timeout_s=10).stdout == b"via sudo\nhost\n"


def test_a_user_who_is_not_root_gets_a_clear_word(box: Box, engine: PctEngine) -> None:
    box.program("pct", "echo please run as root >&2; exit 255")
    with pytest.raises(UsageError, match="only works for root") as caught:
        engine.run(["true"], timeout_s=10)
    assert "ssh.sudo: true" in caught.value.next


def test_a_full_host_disk_while_staging_is_a_failed_verification(
    box: Box, engine: PctEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STAGING_PARENT", str(box.root / "does-not-exist"))
    with pytest.raises(VerificationFailed, match="cannot make"):
        engine.put(Path(__file__), "/inside", timeout_s=20)


def test_a_copy_has_a_deadline(box: Box, engine: PctEngine) -> None:
    box.program("pct", '[ "$1" = status ] || exec sleep 45')
    started = time.monotonic()
    with pytest.raises(Unreachable):
        engine.put(Path(__file__), "/inside", timeout_s=1.0)
    assert time.monotonic() - started < 40
    assert staged(box) == []


def test_a_connection_that_breaks_in_the_middle_of_a_push(
    box: Box, engine: PctEngine, until: Callable[..., Any]
) -> None:
    began = box.root / "began"
    box.program("pct", f"touch {began}; exec sleep 20")

    def drop() -> None:
        until(began.exists)
        box.server.drop()

    dropping = threading.Thread(target=drop)
    dropping.start()
    with pytest.raises(Unreachable, match="the connection was lost"):
        engine.put(Path(__file__), "/inside", timeout_s=60)
    dropping.join(60)
    assert staged(box) == []  # through a connection of its own


def test_old_staging_folders_of_ours_are_swept(box: Box, engine: PctEngine) -> None:
    staging = box.root / "staging"
    for name, age_s in (("dflashctl-old", 2 * 86400), ("dflashctl-new", 60), ("other-old", 2 * 86400)):
        (staging / name).mkdir()
        (staging / name / "file").write_text("x")
        os.utime(staging / name, (time.time() - age_s,) * 2)
    engine.put(Path(__file__), str(box.root / "inside"), timeout_s=20)
    assert sorted(staged(box)) == ["dflashctl-new", "other-old"]


def test_relative_paths_are_refused(engine: PctEngine) -> None:
    with pytest.raises(UsageError, match="absolute"):
        engine.put(Path(__file__), "inside", timeout_s=10)
    with pytest.raises(UsageError, match="absolute"):
        engine.get("inside", Path("copy"), timeout_s=10)
