"""Engine `local`: this machine, the same promises as over ssh.

Run: python -m pytest tests/unit/test_remote_local.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_kit import local_host
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflashctl.errors import NotFound, Unreachable, UsageError
from dflashctl.remote.factory import open_engine
from dflashctl.remote.local import LocalEngine


def make_engine(root: Path, **changes: Any) -> LocalEngine:
    engine = open_engine(local_host(root, **changes))
    assert isinstance(engine, LocalEngine)
    return engine


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    return make_engine(tmp_path)


def test_neither_fabric_nor_paramiko_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from dflashctl.config.hosts import Host\n"
        "from dflashctl.remote.factory import open_engine\n"
        "from dflashctl.remote.agent_call import call\n"
        f"p = {str(tmp_path)!r}\n"
        "host = Host(name='h', engine='local', python=sys.executable, home=p, code_root=p, workdir=p,"
        " log_dir=p, state_dir=p)\n"
        "with open_engine(host) as engine:\n"
        "    assert call(engine, 'ping', {'echo': 5}, timeout_s=20)['echo'] == 5\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'fabric', 'paramiko', 'invoke', 'torch'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.strip() == "[]"


def test_the_environment_is_the_known_one(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAK", "1")
    lines = engine.run(["env"], timeout_s=10).stdout.decode().splitlines()
    assert sorted(lines) == sorted([f"PATH={engine.host.path}", f"HOME={engine.host.home}", "LANG=C.UTF-8"])


def test_streams_and_exit_code(engine: LocalEngine) -> None:
    done = engine.run(["sh", "-c", "cat; echo err >&2; exit 7"], stdin=b"in\0", timeout_s=10)
    assert (done.exit_code, done.stdout, done.stderr) == (7, b"in\0", b"err\n")


def test_death_by_a_signal_is_told_as_a_shell_does(engine: LocalEngine) -> None:
    assert engine.run(["sh", "-c", "kill -9 $$"], timeout_s=10).exit_code == 137


def test_a_missing_program_and_one_that_cannot_run(engine: LocalEngine, tmp_path: Path) -> None:
    assert engine.run(["/nope/nothing"], timeout_s=10).exit_code == 127
    (tmp_path / "file").write_text("x")
    assert engine.run([str(tmp_path / "file")], timeout_s=10).exit_code == 126


def test_50_mb_on_both_streams_with_stdin_at_once(engine: LocalEngine) -> None:
    size = 50_000_000
    script = (
        "import sys, threading\n"
        f"n = {size}\n"
        "def write(s):\n"
        "    for _ in range(n // 100000): s.write(b'x' * 100000)\n"
        "    s.flush()\n"
        "t = threading.Thread(target=write, args=(sys.stderr.buffer,)); t.start()\n"
        "write(sys.stdout.buffer); t.join()\n"
        "sys.exit(len(sys.stdin.buffer.read()) != 5_000_000)\n"
    )
    done = engine.run([sys.executable, "-c", script], stdin=b"y" * 5_000_000, timeout_s=60)
    assert (done.exit_code, len(done.stdout), len(done.stderr)) == (0, size, size)


def test_stdin_that_nobody_reads_does_not_hang(engine: LocalEngine) -> None:
    assert engine.run(["true"], stdin=b"z" * 8_000_000, timeout_s=10).exit_code == 0


def test_stdin_may_come_in_pieces_over_time(engine: LocalEngine) -> None:
    heard = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield b"one\n"
        assert heard.wait(10)  # it arrived before the second one was made
        yield b"two\n"

    done = engine.run_on_host(["cat"], stdin=pieces(), timeout_s=20, on_stdout=lambda data: heard.set())
    assert done.stdout == b"one\ntwo\n"


def test_a_deadline_says_that_it_may_still_be_running(engine: LocalEngine) -> None:
    with pytest.raises(Unreachable, match="may still be running"):
        engine.run(["sleep", "15"], timeout_s=0.3)


def test_a_child_that_keeps_the_output_open_is_not_waited_for(engine: LocalEngine) -> None:
    child = engine.run(["sh", "-c", "sleep 60 & echo $!"], timeout_s=40).stdout
    os.kill(int(child), signal.SIGKILL)  # it is still there


def test_a_command_that_closes_its_output_early_is_waited_for(engine: LocalEngine) -> None:
    done = engine.run(["sh", "-c", "exec >&- 2>&-; sleep 0.5; exit 5"], timeout_s=10)
    assert done.exit_code == 5
    assert done.seconds >= 0.5


def test_a_ctrl_c_here_does_not_reach_what_was_started(engine: LocalEngine) -> None:
    group = engine.run([sys.executable, "-c", "import os; print(os.getpgid(0))"], timeout_s=10).stdout
    assert int(group) != os.getpgid(0)


def test_what_cannot_travel_is_refused(engine: LocalEngine) -> None:
    for argv in (["echo", "a\0b"], ["echo", "x" * 200_000], ["echo", "\udc80"], []):
        with pytest.raises(UsageError):
            engine.run(argv, timeout_s=10)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(words=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=6))
def test_arguments_arrive_unchanged(engine: LocalEngine, words: list[str]) -> None:
    script = "import sys, os; sys.stdout.buffer.write(b'\\0'.join(os.fsencode(w) for w in sys.argv[1:]))"
    done = engine.run([sys.executable, "-I", "-S", "-c", script, *words], timeout_s=20)
    assert done.stdout.decode() == "\0".join(words)


def test_files_are_copied_with_their_mode_and_progress(engine: LocalEngine, tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(os.urandom(2_500_000))
    seen: list[tuple[int, int]] = []
    engine.put(
        source, str(tmp_path / "b"), mode=0o750, timeout_s=10, progress=lambda d, t: seen.append((d, t))
    )
    assert (tmp_path / "b").read_bytes() == source.read_bytes()
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o750
    assert seen[-1] == (2_500_000, 2_500_000)
    engine.get(str(tmp_path / "b"), tmp_path / "c", timeout_s=10)
    assert (tmp_path / "c").read_bytes() == source.read_bytes()


def test_copying_a_file_onto_itself_does_not_empty_it(engine: LocalEngine, tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("content")
    (tmp_path / "link").symlink_to(file)
    for name in ("a", "link"):
        engine.put(file, str(tmp_path / name), timeout_s=10)
    assert file.read_text() == "content"


def test_a_folder_that_is_not_there_is_told(engine: LocalEngine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        engine.put(Path(__file__), str(tmp_path / "nope" / "x"), timeout_s=10)


def test_a_missing_file_is_not_found_and_nothing_is_made(engine: LocalEngine, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file"):
        engine.get(str(tmp_path / "nope"), tmp_path / "copy", timeout_s=10)
    assert not (tmp_path / "copy").exists()
    with pytest.raises(UsageError, match="absolute"):
        engine.get("nope", tmp_path / "copy", timeout_s=10)
