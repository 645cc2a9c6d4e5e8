"""An ssh server that writes down which keys it is shown, and the home folder of who knocks there."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from paramiko.common import AUTH_FAILED, AUTH_PARTIALLY_SUCCESSFUL, AUTH_SUCCESSFUL
from remote_box import new_key

from dflashctl.remote import keys, sshconfig
from dflashctl.remote.connection import SshConnection
from dflashctl.remote.hops import Target
from dflashctl.remote.known_hosts import line_for


class Door(paramiko.ServerInterface):
    """Lets one key in, and no certificate; writes down everything that was shown."""

    def __init__(self, right: paramiko.PKey | None) -> None:
        self.right = right
        self.shown: list[bytes] = []
        self.partial = False
        self.methods = "publickey"

    def get_allowed_auths(self, username: str) -> str:
        return "password" if self.partial else self.methods

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        certificate = getattr(key, "public_blob", None)
        self.shown.append(certificate.key_blob if certificate else key.asbytes())
        if certificate or self.right is None or key != self.right:
            return AUTH_FAILED
        return AUTH_PARTIALLY_SUCCESSFUL if self.partial else AUTH_SUCCESSFUL


class House:
    """A server with a Door, the home folder of the person who knocks, and the target."""

    def __init__(self, root: Path) -> None:
        self.home = root / "me"
        (self.home / ".ssh").mkdir(parents=True)
        self.host_key = new_key(root / "host_key")
        self.door = Door(None)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = int(self._listener.getsockname()[1])
        known = root / "known_hosts"
        known.write_text(line_for(f"[127.0.0.1]:{port}", self.host_key.get_name(), self.host_key.asbytes()))
        self.target = Target(label="box", host="127.0.0.1", user="root", port=port, known_hosts=str(known))
        self._transports: list[paramiko.Transport] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        transport = paramiko.Transport(connection)
        self._transports.append(transport)
        transport.add_server_key(self.host_key)
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            transport.start_server(server=self.door)

    def knock(self, **changes: Any) -> None:
        """Log in, or raise."""
        from dataclasses import replace

        connection = SshConnection(replace(self.target, **changes))
        try:
            connection.transport()
        finally:
            connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for transport in self._transports:
            transport.close()


@contextlib.contextmanager
def at_home(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """A house, and its person's settings: a home of their own, no agent, no passphrase."""
    made = House(root)
    monkeypatch.setenv("HOME", str(made.home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv(keys.PASSPHRASE_VARIABLE, raising=False)
    monkeypatch.setattr(sshconfig, "SYSTEM_CONFIG", root / "etc" / "ssh_config")
    yield made
    made.close()
