"""The ssh server of the lab's host: loopback only, one user, one key; commands, sftp, a terminal for people.

It shows a client what a real sshd on a Proxmox host shows it (see session.py); what it leaves out is said
plainly: no passwords, no forwarding, no other user.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import paramiko
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_SUCCEEDED,
)

from dflashctl.lab import sftp
from dflashctl.lab.session import Terminal, run_command, window_size

USER = "root"
HANDSHAKE_S = 30.0
NO_ANSWER_S = 1.0
"""A client may ask for no answer to its request; its command starts then."""

ACCEPTED_ENV = ("LANG", "LC_")
"""Variables that a client may set, as Debian's sshd_config has it (AcceptEnv LANG LC_*)."""


@dataclass(frozen=True)
class Service:
    """What the server needs to know."""

    host_key: paramiko.PKey
    user_key: paramiko.PKey
    home: str
    environment: dict[str, str]


class Transport(paramiko.Transport):
    """paramiko answers a request when the method that handles it has returned. A command that is over at once
    would close its channel before that, which its client reads as a refusal: it waits for the answer here."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self.unanswered: list[threading.Event] = []

    def _send_user_message(self, data: Any) -> None:
        super()._send_user_message(data)  # type: ignore[misc]  # not in its stubs
        if threading.current_thread() is self:
            while self.unanswered:
                self.unanswered.pop().set()


class Session(paramiko.ServerInterface):
    """One connection: who may log in, and what its channels may ask for."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._env: dict[int, dict[str, str]] = {}
        self._terminals: dict[int, Terminal] = {}

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        if username == USER and key == self._service.user_key:
            return AUTH_SUCCESSFUL
        return AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        if kind == "session":
            return OPEN_SUCCEEDED
        return OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_env_request(self, channel: paramiko.Channel, name: bytes, value: bytes) -> bool:
        text = name.decode("utf-8", "replace")
        if not text.startswith(ACCEPTED_ENV):
            return False
        self._env.setdefault(channel.get_id(), {})[text] = value.decode("utf-8", "surrogateescape")
        return True

    def check_channel_pty_request(
        self,
        channel: paramiko.Channel,
        term: bytes,
        width: int,
        height: int,
        pixelwidth: int,
        pixelheight: int,
        modes: bytes,
    ) -> bool:
        self._terminals[channel.get_id()] = Terminal(term.decode("ascii", "replace"), width, height)
        return True

    def check_channel_window_change_request(
        self, channel: paramiko.Channel, width: int, height: int, pixelwidth: int, pixelheight: int
    ) -> bool:
        terminal = self._terminals.get(channel.get_id())
        if terminal is None or terminal.master < 0:
            return False
        window_size(terminal.master, width, height)
        return True

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        return self._start(channel, command)

    def check_channel_shell_request(self, channel: paramiko.Channel) -> bool:
        return self._start(channel, None)

    def _start(self, channel: paramiko.Channel, command: bytes | None) -> bool:
        number = channel.get_id()
        environment = self._service.environment | _connection(channel) | self._env.pop(number, {})
        work = (channel, command, environment, self._service.home, self._terminals.get(number))
        transport = channel.get_transport()
        assert isinstance(transport, Transport)
        answered = threading.Event()
        transport.unanswered.append(answered)

        def run() -> None:
            answered.wait(NO_ANSWER_S)
            run_command(*work)

        threading.Thread(target=run, daemon=True).start()
        return True


def _connection(channel: paramiko.Channel) -> dict[str, str]:
    """What sshd tells every command about its client; it reaches a container, too, as on a real host."""
    connection: Any = channel.get_transport().sock
    try:
        client, port = connection.getpeername()
        here, here_port = connection.getsockname()
    except OSError:  # it is gone already
        return {}
    return {
        "SSH_CLIENT": f"{client} {port} {here_port}",
        "SSH_CONNECTION": f"{client} {port} {here} {here_port}",
    }


def load_service(ssh_dir: Path, home: str, environment: dict[str, str]) -> Service:
    """The server's own key and the one key that may log in."""
    return Service(
        host_key=paramiko.Ed25519Key(filename=str(ssh_dir / "host_ed25519")),
        user_key=paramiko.Ed25519Key(filename=str(ssh_dir / "id_ed25519")),
        home=home,
        environment=environment,
    )


def listen() -> socket.socket:
    """A listening socket on a free port of the loopback address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    return listener


def serve(listener: socket.socket, service: Service) -> None:
    """Accept connections for ever."""
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # a client that goes away is no event
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # out of descriptors for a moment: the others go on
            time.sleep(0.1)
            continue
        threading.Thread(target=_greet, args=(connection, service), daemon=True).start()


def _greet(connection: socket.socket, service: Service) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    transport = Transport(connection)
    transport.banner_timeout = transport.handshake_timeout = HANDSHAKE_S
    transport.add_server_key(service.host_key)
    files: Callable[..., sftp.Files] = partial(sftp.Files, home=service.home)
    transport.set_subsystem_handler("sftp", sftp.Subsystem, files)
    try:
        transport.start_server(server=Session(service))
    except (paramiko.SSHException, EOFError, OSError):
        with contextlib.suppress(OSError, EOFError):
            transport.close()
