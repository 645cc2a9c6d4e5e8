"""One ssh connection to a host, through its jump hosts: opened when first needed, reused, watched, closed."""

from __future__ import annotations

import contextlib
import logging
import random
import shlex
import threading
import time
from collections.abc import Callable, Sequence

import paramiko

from dflashctl.errors import Unreachable
from dflashctl.remote.channel import ChannelLost, Finished, execute
from dflashctl.remote.engine import Stdin
from dflashctl.remote.hops import Hop, Target, hops_of
from dflashctl.remote.limits import check_argv, check_length
from dflashctl.remote.opening import open_hop
from dflashctl.remote.watch import DEAD_AFTER_S, Watch

SESSION_WAIT_S = 15.0

log = logging.getLogger("dflashctl.remote")
# paramiko prints tracebacks of its own thread through logging's last resort; ours say more.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class SshConnection:
    """A connection for commands (`run`) and files (`sftp`), usable from several threads at once."""

    def __init__(
        self,
        target: Target,
        *,
        config: paramiko.SSHConfig | None = None,
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        self.target = target
        self.dead_after_s = dead_after_s
        self._config = config
        self._lock = threading.Lock()
        self._hops: list[Hop] = []
        self._transport: paramiko.Transport | None = None
        self._watch: Watch | None = None

    def transport(self) -> paramiko.Transport:
        """The open transport; connects first where there is none (any more).

        Raises Unreachable, HostKeyChanged or UsageError.
        """
        with self._lock:
            if self._transport is None or not self._transport.is_active():
                self._shut()
                self._transport = self._open()
                self._watch = Watch(self._transport, self.dead_after_s)
            return self._transport

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: Stdin = b"",
        timeout_s: float,
        on_stdout: Callable[[bytes], None] | None = None,
        on_quiet: Callable[[], None] | None = None,
    ) -> Finished:
        """Run argv over there, without a terminal, in the environment that its login shell has.

        `on_quiet` is called in this thread while nothing comes (see channel.execute).

        Raises Unreachable when there is no contact or it is lost, CallTimeout when the deadline passed,
        UsageError for an argv that cannot travel.
        """
        command = command_string(argv)
        started = time.monotonic()
        deadline = started + timeout_s
        channel = self._channel(deadline)
        watch = self._watch
        try:
            finished = execute(
                channel,
                command,
                stdin=stdin,
                deadline=deadline,
                on_stdout=on_stdout,
                alive=watch.alive if watch else lambda: None,
                on_quiet=on_quiet,
            )
        except ChannelLost as error:
            reason = (watch.verdict if watch else "") or str(error)
            raise Unreachable(
                f"the connection was lost ({reason}); the command may still be running there",
                where=self.target.label,
            ) from error
        log.debug(
            "%s: exit %s after %.2f s", self.target.label, finished.exit_status, time.monotonic() - started
        )
        return finished

    def sftp(self, *, timeout_s: float) -> paramiko.SFTPClient:
        """A new sftp session whose every wait ends after `timeout_s`. The caller closes it."""
        deadline = time.monotonic() + timeout_s
        channel = self._channel(deadline)
        timer = threading.Timer(timeout_s, channel.close)
        timer.daemon = True
        timer.start()
        try:
            channel.invoke_subsystem("sftp")
            channel.settimeout(timeout_s)
            return paramiko.SFTPClient(channel)
        except (paramiko.SSHException, EOFError, OSError) as error:
            channel.close()
            raise Unreachable(
                f"the server offers no sftp ({error})",
                where=self.target.label,
                next="enable `Subsystem sftp internal-sftp` in its sshd_config",
            ) from error
        finally:
            timer.cancel()

    def alive(self) -> None:
        """Something came from the other side by another way than `run`."""
        if self._watch is not None:
            self._watch.alive()

    def close(self) -> None:
        """End the connection. Idempotent; a later `run` opens a new one."""
        with self._lock:
            self._shut()

    def _channel(self, deadline: float) -> paramiko.Channel:
        transport = self.transport()
        give_up = min(deadline, time.monotonic() + SESSION_WAIT_S)
        while True:
            try:
                return transport.open_session(timeout=max(deadline - time.monotonic(), 0.1))
            except (paramiko.SSHException, EOFError, OSError) as error:
                # MaxSessions (10 by default): another thread's command will end soon.
                pause = random.uniform(0.1, 0.4)
                if transport.is_active() and time.monotonic() + pause < give_up:
                    time.sleep(pause)
                    continue
                refused = isinstance(error, paramiko.ChannelException)
                raise Unreachable(
                    f"the server opens no session ({error})",
                    where=self.target.label,
                    next="a deploy or a launch runs two commands at once: MaxSessions in its sshd_config must"
                    " be 2 or more (10 is usual)"
                    if refused
                    else "it let us in and then hung up; its log says why: journalctl -u ssh",
                ) from error

    def _open(self) -> paramiko.Transport:
        self._hops = hops_of(self.target, self._config)
        for hop in self._hops:
            started = time.monotonic()
            open_hop(hop, self.target)
            log.debug(
                "%s: connected to %s in %.2f s", self.target.label, hop.name, time.monotonic() - started
            )
        transport = self._hops[-1].connection.transport
        assert transport is not None
        return transport

    def _shut(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        for hop in reversed(self._hops):
            with contextlib.suppress(Exception):
                hop.connection.client.close()
        self._hops, self._transport, self._watch = [], None, None


def command_string(argv: Sequence[str]) -> str:
    """The only place where argv becomes a string: ssh carries one string, and the login shell over there
    undoes it by the rules of POSIX. Raises UsageError for what cannot travel.
    """
    check_argv(argv)
    command = shlex.join(argv)
    check_length(command)
    return command
