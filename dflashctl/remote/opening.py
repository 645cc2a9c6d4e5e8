"""Setting up ssh to one hop: TCP (or the hop before), the host key, the log-in; and errors of all that in
words."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import socket
import time
from typing import Any

import paramiko

from dflashctl.errors import DflashError, Unreachable
from dflashctl.remote import hostkeys
from dflashctl.remote.dial import dial
from dflashctl.remote.hops import Hop, Target, address
from dflashctl.remote.keys import KeyAuthentication

AUTH_TIMEOUT_S = 60.0
"""A key on a token wants to be touched."""


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
    gateway = hop.connection.gateway
    if isinstance(gateway, str):
        return ThroughHop(paramiko.ProxyCommand(_by_the_shell(gateway)))
    if gateway:
        return ThroughHop(hop.connection.open_gateway())
    return dial(*hop.address, target.connect_timeout_s)


def _by_the_shell(command: str) -> str:
    """As OpenSSH runs a ProxyCommand: with the words, variables and redirections of the person's shell.
    paramiko alone would take `~/bin/relay`, `$HOST` or `2>/dev/null` as they are."""
    return shlex.join([os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"])


class ThroughHop:
    """A channel through the hop before, as the socket of the next one. Its close fails silently:
    paramiko's thread closes it after the connection below is gone, too, and would print a traceback of its
    own."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def close(self) -> None:
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            self._channel.close()


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
        certificate=hop.certificate,
        only_files=hop.identities_only,
        agent_socket=hop.agent_socket,
        by_hand=f"ssh -v -p {port} {hop.user}@{host}",
        bring=f"ssh-copy-id -p {port} {hop.user}@{host}",
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


def _no_such_name(hop: Hop, target: Target, error: socket.gaierror) -> DflashError:
    host, where = hop.address[0], _place(hop, target)
    if error.errno == socket.EAI_AGAIN:
        what = f"the name {host} cannot be looked up now ({error.strerror})"
        return Unreachable(
            what, where=where, next="see whether this machine is online, with its VPN if it needs one"
        )
    what = f"the name {host} is not known ({error.strerror})"
    if host != address(hop.name).host:
        mend = f"correct HostName of {hop.name} in ~/.ssh/config"
    elif hop.name != target.host:
        mend = f"correct ProxyJump in ~/.ssh/config, or add `Host {host}` there with its HostName"
    else:
        mend = f"correct ssh.host in hosts.yaml, or add `Host {host}` with its HostName to ~/.ssh/config"
    return Unreachable(what, where=where, next=mend)


def _lost(hop: Hop, target: Target, error: BaseException) -> DflashError:
    """An error of connecting, in words."""
    host, port = hop.address
    if isinstance(error, socket.gaierror):
        return _no_such_name(hop, target, error)
    silent = "banner" in str(error) or "No existing session" in str(error)
    ended = silent or isinstance(error, (paramiko.ProxyCommandFailure, EOFError, OSError))
    if ended and isinstance(hop.connection.gateway, str):  # its words are not told: they may hold a password
        what = f"the ProxyCommand of {hop.name} in ~/.ssh/config ended or said nothing before ssh was set up"
        return Unreachable(what, where=target.label, next=f"check with: ssh {hop.name} true")
    if isinstance(error, ConnectionRefusedError):
        what = f"nothing listens on {host} port {port} (connection refused)"
    elif isinstance(error, TimeoutError):
        what = f"{host} port {port} did not answer within {target.connect_timeout_s:g} s"
    elif isinstance(error, OSError) and error.strerror:
        what = f"{host} port {port}: {error.strerror}"
    elif silent:
        what = f"{host} port {port} takes connections, but does not answer as an ssh server does"
    else:
        what = f"{host} port {port}: ssh could not be set up ({error or type(error).__name__})"
    user = f"{hop.user}@" if hop.user else ""
    return Unreachable(what, where=target.label, next=f"check with: ssh -p {port} {user}{host} true")
