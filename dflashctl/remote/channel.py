"""One command over one ssh channel: stdin fed, both output streams drained together, a deadline on
everything."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import paramiko

from dflashctl.remote.engine import Stdin

CHUNK = 1 << 16
RECEIVED = 1 << 18
"""At most at once: paramiko moves what is left in its buffer at each."""

QUIET_AFTER_EXIT_S = 1.0
"""A command that has ended may have left a child that holds its output open; that child is not waited for."""

QUIET_FIRST_S = 1.0
"""A command that is silent for so long (then three times as long, and so on) makes the caller look after
it: a frozen container is told then, and to ask for it costs a tenth of a second."""

TICK_S = 1.0
"""How often a wait looks whether the connection still lives."""


HEARD_BYTES = CHUNK
"""What a listener has been told is kept up to here only: a checkpoint that is pulled has gigabytes."""


class CallTimeout(Exception):
    """The deadline passed; the command may still be running."""


class ChannelLost(Exception):
    """The channel or the connection ended without an exit status."""


@dataclass(frozen=True)
class Finished:
    """What came out of a command; with a listener its stdout is the beginning alone (HEARD_BYTES).
    exit_status is None when a signal ended it (the server then names no code)."""

    exit_status: int | None
    stdout: bytes
    stderr: bytes


def execute(
    channel: paramiko.Channel,
    command: str,
    *,
    stdin: Stdin,
    deadline: float,
    on_stdout: Callable[[bytes], None] | None = None,
    alive: Callable[[], None] = lambda: None,
    on_quiet: Callable[[], None] | None = None,
) -> Finished:
    """Run `command` on a fresh channel to its end; the channel is closed afterwards, whatever happens.

    `deadline` counts in time.monotonic(); `on_stdout` and `alive` are called in this thread whenever data
    comes, `on_quiet` when nothing came for a while, ever more seldom; it may raise to end the wait.
    Raises CallTimeout or ChannelLost, and what `on_stdout` raises: a disk that is full here, or a reader who
    has gone, says nothing about the connection.
    """
    failed = False

    def tell(data: bytes) -> None:
        nonlocal failed
        try:
            if on_stdout is not None:
                on_stdout(data)
        except BaseException:
            failed = True
            raise

    # exec_command waits for the server's consent without a time limit of its own.
    timer = threading.Timer(max(deadline - time.monotonic(), 0), channel.close)
    timer.daemon = True
    timer.start()
    try:
        channel.exec_command(command)
    except (paramiko.SSHException, EOFError, OSError) as error:
        if time.monotonic() >= deadline:
            raise CallTimeout from error
        raise ChannelLost(str(error) or "the server refused to run a command") from error
    finally:
        timer.cancel()
    try:
        threading.Thread(target=_feed, args=(channel, stdin), name="ssh-stdin", daemon=True).start()
        return _drain(channel, deadline, tell if on_stdout is not None else None, alive, on_quiet)
    except (paramiko.SSHException, EOFError, OSError) as error:
        if failed:
            raise
        raise ChannelLost(str(error)) from error
    finally:
        channel.close()


def _feed(channel: paramiko.Channel, stdin: Stdin) -> None:
    """Send all of stdin, then its end. A command that does not want it is no error."""
    try:
        for piece in (stdin,) if isinstance(stdin, bytes) else stdin:
            view = memoryview(piece)
            while view:
                sent = channel.send(view[:CHUNK].tobytes())
                if sent == 0:
                    return  # closed
                view = view[sent:]
    except (OSError, EOFError):
        pass
    finally:
        try:
            channel.shutdown_write()
        except (OSError, EOFError):
            pass


def _drain(
    channel: paramiko.Channel,
    deadline: float,
    on_stdout: Callable[[bytes], None] | None,
    alive: Callable[[], None],
    on_quiet: Callable[[], None] | None,
) -> Finished:
    out, err = bytearray(), bytearray()
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    quiet_since = time.monotonic()
    patience = QUIET_FIRST_S
    while True:
        # Asked before reading: what came before the end is then certain to be read.
        ended = channel.eof_received or channel.closed
        moved = False
        if channel.recv_ready():
            data = channel.recv(RECEIVED)
            moved = True
            if on_stdout is None or len(out) < HEARD_BYTES:
                out += data
            if on_stdout is not None and data:
                on_stdout(data)
        if channel.recv_stderr_ready():
            err += channel.recv_stderr(CHUNK)
            moved = True
        now = time.monotonic()
        if moved:
            quiet_since = now
            alive()
            if now >= deadline:
                raise CallTimeout
            continue
        if ended or (channel.exit_status_ready() and now - quiet_since >= QUIET_AFTER_EXIT_S):
            break
        if now >= deadline:
            raise CallTimeout
        if on_quiet is not None and now - quiet_since >= patience:
            patience *= 3
            on_quiet()
            continue
        look_after = quiet_since + patience - now if on_quiet is not None else TICK_S
        poller.poll(max(min(deadline - now, TICK_S, look_after), 0.001) * 1000)
    return Finished(_exit_status(channel, deadline), bytes(out), bytes(err))


def _exit_status(channel: paramiko.Channel, deadline: float) -> int | None:
    while not channel.exit_status_ready():
        left = deadline - time.monotonic()
        if left <= 0:
            raise CallTimeout
        channel.status_event.wait(min(left, TICK_S))
    status = channel.recv_exit_status()
    if status >= 0:
        return status
    transport = channel.get_transport()
    if transport is None or not transport.is_active():
        raise ChannelLost("the connection ended before the command did")
    return None
