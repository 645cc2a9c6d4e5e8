"""A real ssh server on the loopback address for tests of `dflashctl.remote`, and hosts that lead to it.

It is the lab's server, so commands are processes of this machine: tests give it harmless ones only. `pct` is
whatever script a test puts into `bin`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import paramiko
from paramiko.common import OPEN_SUCCEEDED

from dflashctl.config.hosts import DEFAULT_PATH, Host
from dflashctl.lab import sftp, sshd
from dflashctl.remote.hops import Target
from dflashctl.remote.known_hosts import line_for


def new_key(path: Path, passphrase: str | None = None) -> paramiko.Ed25519Key:
    """A private key in `path` (0600) and its public half beside it."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    secret = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    made = Ed25519PrivateKey.generate()
    path.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, secret))
    path.chmod(0o600)
    key = paramiko.Ed25519Key(filename=str(path), password=passphrase)
    Path(f"{path}.pub").write_text(f"{key.get_name()} {key.get_base64()}\n")
    return key


class ForwardingSession(sshd.Session):
    """A jump host: it also connects onward."""

    transport: paramiko.Transport

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        threading.Thread(target=self._forward, args=(destination,), daemon=True).start()
        return OPEN_SUCCEEDED

    def _forward(self, destination: tuple[str, int]) -> None:
        with socket.create_connection(destination, timeout=10) as onward:
            onward.settimeout(None)
            channel = self.transport.accept(10)
            assert channel is not None

            def back() -> None:
                with contextlib.suppress(OSError, EOFError):
                    while data := onward.recv(65536):
                        channel.sendall(data)
                    channel.close()

            threading.Thread(target=back, daemon=True).start()
            with contextlib.suppress(OSError, EOFError):
                while data := channel.recv(65536):
                    onward.sendall(data)


class Server:
    """Accepts connections until it is closed; keeps their transports, so that a test can drop them."""

    def __init__(self, service: sshd.Service, session: type[sshd.Session] = ForwardingSession) -> None:
        self.service = service
        self.session = session
        self.transports: list[paramiko.Transport] = []
        self.turn_away = 0  # so many connections are closed before the greeting
        self.accepted = 0
        self._listener = sshd.listen()
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            if self.turn_away > 0:
                self.turn_away -= 1
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        transport = sshd.Transport(connection)
        self.transports.append(transport)
        transport.add_server_key(self.service.host_key)
        transport.set_subsystem_handler("sftp", sftp.Subsystem, partial(sftp.Files, home=self.service.home))
        session = self.session(self.service)
        session.transport = transport  # type: ignore[attr-defined]
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            transport.start_server(server=session)

    def drop(self) -> None:
        """Close every connection, as a server that is shut down does."""
        for transport in self.transports:
            transport.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()


class Box:
    """Folders, keys, a running server, and the target that leads to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.bin = root / "bin"
        for folder in (self.home, self.bin):
            folder.mkdir()
        self.host_key = new_key(root / "host_ed25519")
        self.user_key = new_key(root / "id_ed25519")
        environment = {
            "PATH": f"{self.bin}:{os.environ.get('PATH', DEFAULT_PATH)}",
            "HOME": str(self.home),
            "SHELL": "/bin/sh",
        }
        self.service = sshd.Service(self.host_key, self.user_key, str(self.home), environment)
        self.server = Server(self.service)
        self.port = self.server.port
        self.known_hosts = root / "known_hosts"
        self.known_hosts.write_text(
            line_for(f"[127.0.0.1]:{self.port}", self.host_key.get_name(), self.host_key.asbytes())
        )
        self.target = Target(
            label="box",
            host="127.0.0.1",
            user="root",
            port=self.port,
            identity_file=str(root / "id_ed25519"),
            known_hosts=str(self.known_hosts),
            connect_timeout_s=20.0,
            use_ssh_config=False,
        )

    def targeted(self, **changes: Any) -> Target:
        """The target with some fields changed."""
        return replace(self.target, **changes)

    def host(self, engine: str = "ssh", **changes: Any) -> Host:
        """A host of hosts.yaml; engines get `target` beside it, so its `ssh:` part does not matter."""
        values: dict[str, Any] = {
            "name": "box",
            "engine": engine,
            "container": 200 if engine == "pct" else None,
            "python": "/usr/bin/python3",
            "home": str(self.home),
            "path": os.environ.get("PATH", DEFAULT_PATH),
            "code_root": str(self.root / "code"),
            "workdir": str(self.root),
            "log_dir": str(self.root),
            "state_dir": str(self.root / "state"),
        }
        return Host(**{**values, **changes})

    def program(self, name: str, text: str) -> None:
        """A shell script on the server's PATH."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def close(self) -> None:
        self.server.close()
