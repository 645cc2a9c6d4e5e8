"""One ssh connection to a host, through its jump hosts: opened when first needed, reused, watched, closed."""

from __future__ import annotations

import contextlib
import logging
import random
import shlex
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import paramiko

from dflashctl.errors import DflashError, Unreachable
from dflashctl.remote import hostkeys
from dflashctl.remote.channel import ChannelLost, Finished, execute
from dflashctl.remote.hops import Hop, Target, hops_of
from dflashctl.remote.keys import KeyAuthentication
from dflashctl.remote.limits import check_argv, check_length

KEEPALIVE_EVERY_S = 5.0
DEAD_AFTER_S = 20.0
"""Without a sign of life for this long, the connection is given up: a pulled cable sends no goodbye."""

AUTH_TIMEOUT_S = 60.0
"""A key on a token wants to be touched."""

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
        stdin: bytes = b"",
        timeout_s: float,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Finished:
        """Run argv over there, without a terminal, in the environment that its login shell has.

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
        try:
            return transport.open_session(timeout=max(deadline - time.monotonic(), 0.1))
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise Unreachable(f"the server opens no session ({error})", where=self.target.label) from error

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


def open_hop(hop: Hop, target: Target) -> None:
    """Connect to one hop, through the one before it; tries a second time when the server was too busy to
    greet."""
    try:
        _connect(hop, target)
    except (Busy, paramiko.SSHException, EOFError, ConnectionResetError) as first:
        if (
            not isinstance(first, Busy)
            and "banner" not in str(first).lower()
            and not isinstance(first, OSError)
        ):
            raise _lost(hop, target, first) from first
        time.sleep(random.uniform(0.3, 1.0))  # several laptops may have been turned away at once
        try:
            _connect(hop, target)
        except (Busy, paramiko.SSHException, EOFError, OSError) as error:
            raise _lost(hop, target, error) from error
    except OSError as error:
        raise _lost(hop, target, error) from error


def offered_key(hop: Hop, target: Target) -> hostkeys.Offered:
    """The key that a hop's server shows, without logging in; jump hosts before it must be open.

    Raises Unreachable.
    """
    checker = _checker(hop, target)
    try:
        sock = _socket(hop, target)
        with contextlib.closing(checker.transport(sock)) as transport:
            transport.banner_timeout = target.connect_timeout_s
            transport.start_client(timeout=target.connect_timeout_s)
            return checker.offered(transport.get_remote_server_key())
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise _lost(hop, target, error) from error


def _checker(hop: Hop, target: Target) -> hostkeys.HostKeyChecker:
    return hostkeys.HostKeyChecker(*hop.address, hop.rules, label=target.label, where=_place(hop, target))


def _place(hop: Hop, target: Target) -> str:
    return target.label if hop.name == target.host else f"{target.label} (jump host {hop.name})"


def _socket(hop: Hop, target: Target) -> Any:
    if hop.connection.gateway:
        return hop.connection.open_gateway()
    return dial(*hop.address, target.connect_timeout_s)


class Busy(Exception):
    """The server closed the connection before its greeting (MaxStartups), or said nothing."""


def _connect(hop: Hop, target: Target) -> None:
    timeout = target.connect_timeout_s
    host, port = hop.address
    checker = _checker(hop, target)
    client: paramiko.SSHClient = hop.connection.client
    client.set_missing_host_key_policy(checker)
    sock = _socket(hop, target)
    authentication: Any = KeyAuthentication(
        user=hop.user,
        where=_place(hop, target),
        explicit=hop.explicit_key,
        files=hop.identity_files,
        only_files=hop.identities_only,
        use_agent=hop.use_agent,
    )
    try:
        client.connect(
            host,
            port,
            username=hop.user,
            sock=sock,
            timeout=timeout,
            banner_timeout=timeout,
            auth_timeout=max(AUTH_TIMEOUT_S, timeout),
            channel_timeout=timeout,
            transport_factory=checker.transport,
            auth_strategy=authentication,
        )
    except BaseException as error:
        client.close()
        with contextlib.suppress(Exception):
            sock.close()
        if isinstance(error, EOFError):
            raise Busy("it closed the connection during the greeting") from error
        raise
    hop.connection.transport = client.get_transport()


def dial(host: str, port: int, timeout_s: float) -> socket.socket:
    """A TCP connection to the first address that answers; `timeout_s` for all of it, the name's look-up too.

    Raises OSError (socket.gaierror for a name that is not known, TimeoutError).
    """
    deadline = time.monotonic() + timeout_s
    error: OSError = TimeoutError(f"no answer within {timeout_s:g} s")
    for family, kind, protocol, _, address in _resolve(host, port, timeout_s):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(left)
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except TimeoutError:
            sock.close()
        except OSError as failure:
            sock.close()
            error = failure
    raise error


def _resolve(host: str, port: int, timeout_s: float) -> list[Any]:
    """getaddrinfo takes no deadline; a thread does."""
    box: list[Any] = []

    def look_up() -> None:
        try:
            box.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            box.append(error)

    thread = threading.Thread(target=look_up, name="resolve", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not box:
        raise TimeoutError(f"the name was not resolved within {timeout_s:g} s")
    if isinstance(box[0], OSError):
        raise box[0]
    return list(box[0])


def _lost(hop: Hop, target: Target, error: BaseException) -> DflashError:
    """An error of connecting, in words."""
    host, port = hop.address
    if isinstance(error, socket.gaierror):
        what = f"the name {host} is not known ({error.strerror})"
    elif isinstance(error, ConnectionRefusedError):
        what = f"nothing listens on {host} port {port} (connection refused)"
    elif isinstance(error, TimeoutError):
        what = f"{host} port {port} did not answer within {target.connect_timeout_s:g} s"
    elif isinstance(error, OSError) and error.strerror:
        what = f"{host} port {port}: {error.strerror}"
    else:
        what = f"{host} port {port}: ssh could not be set up ({error or type(error).__name__})"
    user = f"{hop.user}@" if hop.user else ""
    return Unreachable(what, where=target.label, next=f"check with: ssh -p {port} {user}{host} true")


class Watch:
    """Notices a peer that is gone without a word, and closes the transport, which wakes every waiter."""

    def __init__(self, transport: paramiko.Transport, dead_after_s: float) -> None:
        self.verdict = ""
        self._transport = transport
        self._dead_after_s = dead_after_s
        self._last_sign = time.monotonic()
        self._stopped = threading.Event()
        for name, work in (("ssh-keepalive", self._ask), ("ssh-watch", self._judge)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def alive(self) -> None:
        """Something came from the other side."""
        self._last_sign = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()

    def _ask(self) -> None:
        """Any answer, a refusal too, is a sign of life. The wait for it has no end of its own: hence two
        threads."""
        every = min(KEEPALIVE_EVERY_S, self._dead_after_s / 3)
        while not self._stopped.wait(every) and self._transport.is_active():
            try:
                self._transport.global_request("keepalive@openssh.com", wait=True)
            except (paramiko.SSHException, EOFError, OSError):
                return
            if self._transport.is_active():
                self.alive()

    def _judge(self) -> None:
        while not self._stopped.wait(min(1.0, self._dead_after_s / 4)):
            if not self._transport.is_active():
                return
            silent = time.monotonic() - self._last_sign
            if silent > self._dead_after_s:
                self.verdict = f"no sign of life for {silent:.0f} s"
                log.debug("closing the connection: %s", self.verdict)
                self._transport.close()
                return
