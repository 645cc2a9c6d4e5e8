"""The ssh connection against a real server on the loopback address.

Run: python -m pytest tests/unit/test_remote_connection.py
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paramiko
import pytest
from paramiko.common import OPEN_FAILED_RESOURCE_SHORTAGE, cMSG_CHANNEL_SUCCESS

from dflashctl.errors import Unreachable, UsageError
from dflashctl.remote import connection as connection_module
from dflashctl.remote.channel import CallTimeout
from dflashctl.remote.connection import SshConnection
from dflashctl.remote.known_hosts import line_for

sys.path.insert(0, str(Path(__file__).parent))

from remote_box import Box, ForwardingSession, Server

BEGIN = "echo on; exec sleep 20"
"""A command that has begun when it prints, and is silent then."""


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()


@pytest.fixture
def connection(box: Box) -> Iterator[SshConnection]:
    made = SshConnection(box.target)
    yield made
    made.close()


def test_stdout_stderr_and_exit_status_are_kept_apart(connection: SshConnection) -> None:
    finished = connection.run(["sh", "-c", "cat; echo err >&2; exit 7"], stdin=b"in\0put", timeout_s=10)
    assert (finished.exit_status, finished.stdout, finished.stderr) == (7, b"in\0put", b"err\n")


def test_stdin_may_come_in_pieces_over_time(connection: SshConnection) -> None:
    heard = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield b"one\n"
        assert heard.wait(10)  # it arrived before the second one was made
        yield b"two\n"

    finished = connection.run(["cat"], stdin=pieces(), timeout_s=20, on_stdout=lambda data: heard.set())
    assert finished.stdout == b"one\ntwo\n"


def test_a_command_that_is_over_at_once_is_not_taken_for_a_refused_one(
    connection: SshConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's yes to the request comes late, as on a loaded machine: still before the command's end."""
    send = paramiko.Transport._send_user_message

    def late(self: paramiko.Transport, data: paramiko.Message) -> None:
        if self.server_mode and data.asbytes()[:1] == cMSG_CHANNEL_SUCCESS:
            time.sleep(0.3)
        send(self, data)

    monkeypatch.setattr(paramiko.Transport, "_send_user_message", late)
    assert connection.run(["true"], timeout_s=20).exit_status == 0


def test_one_connection_serves_many_commands(box: Box, connection: SshConnection) -> None:
    for number in range(5):
        assert connection.run(["echo", str(number)], timeout_s=10).stdout == f"{number}\n".encode()
    assert box.server.accepted == 1


def test_death_by_signal_is_told_by_the_shell_or_has_no_status(connection: SshConnection) -> None:
    assert connection.run(["sh", "-c", "kill -9 $$"], timeout_s=10).exit_status == 137
    assert connection.run(["sh", "-c", "kill -9 $PPID"], timeout_s=10).exit_status is None  # the shell itself


def test_50_mb_on_both_streams_and_on_stdin_at_once(connection: SshConnection) -> None:
    """Reading one stream at a time would deadlock: each is far larger than the channel's window."""
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
    seen = 0

    def count(data: bytes) -> None:
        nonlocal seen
        seen += len(data)

    finished = connection.run(
        [sys.executable, "-c", script], stdin=b"y" * 5_000_000, timeout_s=120, on_stdout=count
    )
    assert (len(finished.stderr), seen) == (size, size)
    assert finished.exit_status == 0


def test_stdin_that_nobody_reads_does_not_hang(connection: SshConnection) -> None:
    assert connection.run(["true"], stdin=b"z" * 8_000_000, timeout_s=20).exit_status == 0


def test_stdin_ends_even_when_it_is_empty(connection: SshConnection) -> None:
    assert connection.run(["cat"], timeout_s=10).stdout == b""


def test_several_channels_at_once_from_threads(box: Box, connection: SshConnection) -> None:
    """Each waits until all eight have begun: one after the other they would wait for ever."""
    begun = box.root / "begun"
    begun.mkdir()
    together = f"touch {begun}/$0; until [ -e {begun}/0 -a -e {begun}/1 -a -e {begun}/2 -a -e {begun}/3"
    together += f" -a -e {begun}/4 -a -e {begun}/5 -a -e {begun}/6 -a -e {begun}/7 ]; do sleep 0.05; done"

    def work(number: int) -> bytes:
        return connection.run(["sh", "-c", f"{together}; echo $0", str(number)], timeout_s=60).stdout

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(work, range(8))) == [f"{n}\n".encode() for n in range(8)]
    assert box.server.accepted == 1


def test_more_threads_than_the_server_takes_sessions_wait_for_each_other(box: Box) -> None:
    class Narrow(ForwardingSession):
        """MaxSessions 2."""

        def check_channel_request(self, kind: str, chanid: int) -> int:
            if len(self.transport._channels) >= 2:
                return OPEN_FAILED_RESOURCE_SHORTAGE
            return super().check_channel_request(kind, chanid)

    box.server.session = Narrow
    connection = SshConnection(box.target)
    try:
        with ThreadPoolExecutor(6) as pool:
            work = [pool.submit(connection.run, ["sleep", "0.3"], timeout_s=30) for _ in range(6)]
            assert [each.result(30).exit_status for each in work] == [0] * 6
    finally:
        connection.close()
    assert box.server.accepted == 1


def test_a_server_that_takes_one_session_is_told_with_the_setting(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Single(ForwardingSession):
        def check_channel_request(self, kind: str, chanid: int) -> int:
            if self.transport._channels:
                return OPEN_FAILED_RESOURCE_SHORTAGE
            return super().check_channel_request(kind, chanid)

    box.server.session = Single
    monkeypatch.setattr(connection_module, "SESSION_WAIT_S", 0.5)
    connection = SshConnection(box.target)
    try:
        with ThreadPoolExecutor(1) as pool:
            began = threading.Event()
            first = pool.submit(
                connection.run,
                ["sh", "-c", "echo; sleep 3"],
                timeout_s=30,
                on_stdout=lambda data: began.set(),
            )
            assert began.wait(30)
            with pytest.raises(Unreachable, match="opens no session") as caught:
                connection.run(["true"], timeout_s=30)
            assert "MaxSessions" in caught.value.next
            assert first.result(30).exit_status == 0, "and the other command goes on"
    finally:
        connection.close()


def test_a_deadline_ends_the_wait_at_once(connection: SshConnection) -> None:
    connection.run(["true"], timeout_s=10)
    started = time.monotonic()
    with pytest.raises(CallTimeout):
        connection.run(["sleep", "15"], timeout_s=0.5)
    assert 0.4 < time.monotonic() - started < 12


def test_a_deadline_also_ends_a_command_that_never_stops_talking(connection: SshConnection) -> None:
    with pytest.raises(CallTimeout):
        connection.run(["timeout", "15", "yes"], timeout_s=0.5)


def test_a_child_that_keeps_the_output_open_is_not_waited_for(connection: SshConnection) -> None:
    finished = connection.run(["sh", "-c", "sleep 60 & echo $!"], timeout_s=40)
    os.kill(int(finished.stdout), signal.SIGKILL)  # it is still there
    assert finished.exit_status == 0


def test_a_connection_that_breaks_says_that_the_command_may_run_on(
    box: Box, connection: SshConnection
) -> None:
    drop = threading.Thread(target=box.server.drop)
    with pytest.raises(Unreachable, match="may still be running"):
        connection.run(["sh", "-c", BEGIN], timeout_s=40, on_stdout=lambda data: drop.start())
    drop.join(20)


def test_after_a_break_the_next_command_connects_anew(
    box: Box, connection: SshConnection, until: Callable[..., Any]
) -> None:
    connection.run(["true"], timeout_s=10)
    broken = connection.transport()
    box.server.drop()
    until(lambda: not broken.is_active())
    assert connection.run(["echo", "again"], timeout_s=10).stdout == b"again\n"
    assert box.server.accepted == 2


def test_a_peer_that_says_nothing_any_more_is_given_up(box: Box) -> None:
    """A stalled link: bytes go in, nothing comes out, no reset. Only our own watch can notice."""
    stall = Stall(box.port)
    box.known_hosts.write_text(
        line_for(f"[127.0.0.1]:{stall.port}", box.host_key.get_name(), box.host_key.asbytes())
    )
    connection = SshConnection(box.targeted(port=stall.port), dead_after_s=1.5)
    try:
        with pytest.raises(Unreachable, match="no sign of life"):
            connection.run(["sh", "-c", BEGIN], timeout_s=60, on_stdout=lambda data: stall.stalled.set())
    finally:
        connection.close()
        stall.close()


class Stall:
    """Passes bytes on until `stalled` is set; then it swallows them."""

    def __init__(self, port: int) -> None:
        self.stalled = threading.Event()
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        far = socket.create_connection(("127.0.0.1", self._to))
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if not self.stalled.is_set():
                    sink.sendall(data)
        except OSError:
            pass
        finally:
            if not self.stalled.is_set():
                sink.close()

    def close(self) -> None:
        self._listener.close()


def test_a_busy_server_is_tried_a_second_time(box: Box, connection: SshConnection) -> None:
    box.server.turn_away = 1
    assert connection.run(["echo", "ok"], timeout_s=10).stdout == b"ok\n"
    assert box.server.accepted == 2


def test_a_server_that_stays_busy_is_unreachable(box: Box, connection: SshConnection) -> None:
    box.server.turn_away = 9
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1"):
        connection.run(["true"], timeout_s=10)
    assert box.server.accepted == 2


def test_ctrl_c_ends_at_once_and_cleanly(box: Box, until: Callable[..., Any]) -> None:
    """In the real program, in the middle of a remote command."""
    (box.root / "hosts.yaml").write_text(
        "version: 1\ndefaults: {host: gpu}\nhosts:\n  gpu:\n    engine: ssh\n"
        f"    python: {box.bin}/slow-python\n"
        f"    ssh: {{host: 127.0.0.1, port: {box.port}, user: root, known_hosts: {box.known_hosts},"
        f" identity_file: {box.root}/id_ed25519}}\n"
    )
    box.program("slow-python", f"echo $$ >{box.root}/began; exec sleep 60")
    with subprocess.Popen(
        [sys.executable, "-m", "dflashctl", "status"],
        env={**os.environ, "DFLASHCTL_HOSTS": str(box.root / "hosts.yaml"), "HOME": str(box.home)},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        began = box.root / "began"
        until(lambda: process.poll() is not None or (began.exists() and began.read_text()), within_s=40)
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 130  # sooner than the command over there
        os.kill(int(began.read_text()), signal.SIGKILL)
        assert process.stderr is not None
        assert process.stderr.read() == "interrupted\n"


def test_arguments_that_cannot_travel_are_refused_before_anything_connects(box: Box) -> None:
    connection = SshConnection(box.target)
    for argv in (["echo", "a\0b"], ["echo", "x" * 200_000], ["echo", "\udc80"], [], [""]):
        with pytest.raises(UsageError):
            connection.run(argv, timeout_s=10)
    many = ["echo", *("y" * 1000 for _ in range(140))]
    with pytest.raises(UsageError, match="on stdin"):
        connection.run(many, timeout_s=10)
    assert box.server.accepted == 0


def test_closing_twice_is_fine_and_ends_the_threads(box: Box, until: Callable[..., Any]) -> None:
    connection = SshConnection(box.target)
    connection.run(["true"], timeout_s=10)
    connection.close()
    connection.close()
    until(lambda: not {t.name for t in threading.enumerate()} & {"ssh-keepalive", "ssh-watch"})


def test_a_server_without_sftp_says_so(box: Box) -> None:
    class NoFiles(Server):
        def _greet(self, connection: socket.socket) -> None:
            transport = paramiko.Transport(connection)
            transport.add_server_key(self.service.host_key)
            transport.start_server(server=self.session(self.service))

    server = NoFiles(box.service)
    box.known_hosts.write_text(
        line_for(f"[127.0.0.1]:{server.port}", box.host_key.get_name(), box.host_key.asbytes())
    )
    try:
        with pytest.raises(Unreachable, match="no sftp"):
            SshConnection(box.targeted(port=server.port)).sftp(timeout_s=20)
    finally:
        server.close()
