"""One command of an ssh session, run as sshd runs it.

stdout and stderr are drained together; the channel stays open while anything holds them; the exit status
(or the signal) is sent when the command ends; and when the client goes, the pipes are closed, so the
command runs on and meets SIGPIPE at its next write. Memory is bounded by the channel's window: data is read
only as fast as it leaves.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paramiko
from paramiko.common import cMSG_CHANNEL_REQUEST

from dflashctl.lab.fds import ready, wait_writable

CHUNK = 64 * 1024
TICK_S = 0.2
"""How soon a vanished client is noticed when nothing moves."""


@dataclass
class Terminal:
    """What a pty request asked for."""

    term: str
    columns: int
    rows: int
    master: int = -1


def window_size(fd: int, columns: int, rows: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def run_command(
    channel: paramiko.Channel,
    command: bytes | None,
    environment: dict[str, str],
    home: str,
    terminal: Terminal | None,
) -> None:
    """Run `command` (None: a login shell) for the channel, to its end. To be called in its own thread."""
    shell = environment["SHELL"]
    argv = [shell, "-c", os.fsdecode(command)] if command is not None else [shell, "-l"]
    try:
        if terminal is None:
            _with_pipes(channel, argv, environment, home)
        else:
            _with_terminal(channel, argv, environment | {"TERM": terminal.term}, home, terminal)
    except OSError as error:
        with contextlib.suppress(OSError, EOFError):
            channel.sendall_stderr(f"the lab's ssh server cannot run this: {error.strerror}\n".encode())
            channel.send_exit_status(255)
    finally:
        with contextlib.suppress(OSError, EOFError):
            channel.close()


def _with_pipes(channel: paramiko.Channel, argv: list[str], environment: dict[str, str], home: str) -> None:
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=home,
        env=environment,
        start_new_session=True,
        bufsize=0,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    with process.stdin:
        stdin = os.dup(process.stdin.fileno())  # the feeding thread's own
    threading.Thread(target=_feed, args=(channel, stdin), daemon=True).start()
    sinks: dict[int, Callable[[bytes], object]] = {
        process.stdout.fileno(): channel.sendall,
        process.stderr.fileno(): channel.sendall_stderr,
    }
    with process.stdout, process.stderr:
        _pump(channel, process, sinks)
    _collect(process)


def _with_terminal(
    channel: paramiko.Channel, argv: list[str], environment: dict[str, str], home: str, terminal: Terminal
) -> None:
    master, slave = os.openpty()
    try:
        terminal.master = master
        window_size(master, terminal.columns, terminal.rows)
        # setsid(1) makes the terminal the controlling one; doing that between fork and exec is not safe here.
        process = subprocess.Popen(
            ["setsid", "--ctty", *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=home,
            env=environment,
        )
    except BaseException:
        os.close(master)
        raise
    finally:
        os.close(slave)
    threading.Thread(target=_feed, args=(channel, os.dup(master)), daemon=True).start()
    try:
        _pump(channel, process, {master: channel.sendall})
    finally:
        terminal.master = -1
        os.close(master)
    _collect(process)


def _pump(
    channel: paramiko.Channel, process: subprocess.Popen[bytes], sinks: dict[int, Callable[[bytes], object]]
) -> None:
    """Carry output to the client until all has come and the command has ended, or the client is gone."""
    ended = False
    while sinks or not ended:
        try:
            for fd in ready(sinks, TICK_S) if sinks else ():
                data = _read(fd)
                if data:
                    sinks[fd](data)
                elif data is not None:
                    del sinks[fd]
            if channel.closed:
                return
            if not ended:
                ended = _report_end(channel, process, wait_s=0 if sinks else TICK_S)
        except (OSError, EOFError):  # paramiko's word for "the channel is closed"
            return


def _read(fd: int) -> bytes | None:
    """b"" at the end, None when there is nothing at this moment (a terminal is read without blocking)."""
    try:
        return os.read(fd, CHUNK)
    except BlockingIOError:
        return None
    except OSError:  # a terminal whose last user has closed it says EIO
        return b""


def _report_end(channel: paramiko.Channel, process: subprocess.Popen[bytes], wait_s: float) -> bool:
    """Tell the client how the command ended, if it has."""
    try:
        code = process.wait(wait_s) if wait_s else process.poll()
    except subprocess.TimeoutExpired:
        return False
    if code is None:
        return False
    if code >= 0:
        channel.send_exit_status(code)
    else:
        _send_exit_signal(channel, -code)
    return True


def _send_exit_signal(channel: paramiko.Channel, number: int) -> None:
    """RFC 4254, 6.10: the signal's name without SIG; OpenSSH's client then ends with 255."""
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exit-signal")
    message.add_boolean(False)
    message.add_string(signal.Signals(number).name.removeprefix("SIG"))
    message.add_boolean(False)  # core dumped
    message.add_string("")
    message.add_string("")
    transport: Any = channel.transport  # paramiko can send an exit status only; this is how it sends that
    transport._send_user_message(message)


def _feed(channel: paramiko.Channel, fd: int) -> None:
    """Carry input to the command. When it no longer reads, drop the rest, as sshd does, so that a client that
    keeps sending is not stuck."""
    os.set_blocking(fd, False)
    open_fd: int | None = fd
    try:
        while True:
            try:
                data = channel.recv(CHUNK)
            except (OSError, EOFError):
                return
            if not data:
                return
            if open_fd is not None and not _write_all(channel, open_fd, data):
                os.close(open_fd)
                open_fd = None
    finally:
        if open_fd is not None:
            os.close(open_fd)


def _write_all(channel: paramiko.Channel, fd: int, data: bytes) -> bool:
    """False when the command does not take it any more, or the client is gone."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            wait_writable(fd, TICK_S)
            if channel.closed:
                return False
        except OSError:
            return False
    return True


def _collect(process: subprocess.Popen[bytes]) -> None:
    """After its client is gone a command runs on; its entry in the process table is ours to take away."""
    if process.poll() is None:
        threading.Thread(target=process.wait, daemon=True).start()
