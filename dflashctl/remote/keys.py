"""Which private keys are offered to a host, and in which order."""

from __future__ import annotations

import base64
import contextlib
import getpass
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import paramiko
from paramiko.agent import AgentSSH

from dflashctl.errors import DflashError, Unreachable, UsageError

PASSPHRASE_VARIABLE = "DFLASHCTL_SSH_PASSPHRASE"

AGENT_TIMEOUT_S = 60.0
"""An agent may ask its person before it signs."""

log = logging.getLogger("dflashctl.remote")


class Encrypted(Exception):
    """A key file needs a passphrase, or another one."""


class NotLetIn(Unreachable):
    """The server answers, but took none of our keys."""


class KeyAuthentication:
    """Public-key authentication of one hop; paramiko calls `authenticate`.

    With an explicit key, that one alone is offered: no agent, no other file. Else the agent's keys first,
    then the files of ~/.ssh/config (or the default names); a file that needs a passphrase comes last, and
    only once.
    """

    def __init__(
        self,
        *,
        user: str,
        where: str,
        explicit: Path | None = None,
        files: Sequence[Path] = (),
        only_files: bool = False,
        agent_socket: str | None = None,
    ) -> None:
        self.user = user
        self.where = where
        self.explicit = explicit
        self.files = files
        self.only_files = only_files
        self.agent_socket = agent_socket
        self.tried: list[str] = []

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Returns the methods that the server still wants (none). Raises Unreachable saying what was
        tried."""
        with contextlib.ExitStack() as stack:
            return self._authenticate(transport, self._offers(stack))

    def _authenticate(
        self, transport: paramiko.Transport, offers: Iterator[tuple[str, paramiko.PKey]]
    ) -> list[str]:
        try:
            for label, key in offers:
                self.tried.append(label)
                try:
                    rest = transport.auth_publickey(self.user, key)
                except paramiko.BadAuthenticationType as error:
                    raise self._refused(f"it only takes {', '.join(error.allowed_types)}") from None
                except paramiko.AuthenticationException:
                    if not transport.is_active():
                        raise self._refused("it closed the connection") from None
                    continue
                if rest:
                    raise self._refused(f"it also wants {', '.join(rest)}, which dflashctl cannot give")
                log.debug("%s: logged in as %s with %s", self.where, self.user, label)
                return []
        except (paramiko.SSHException, EOFError, OSError) as error:
            if isinstance(error, DflashError):
                raise
            raise Unreachable(f"log-in as {self.user} failed: {error}", where=self.where) from error
        raise self._refused("it took none of them" if self.tried else "")

    def _refused(self, reason: str) -> DflashError:
        offered = ", ".join(self.tried) or "no key (none found, and no agent)"
        said = f"; {reason}" if reason else ""
        return NotLetIn(
            f"the server did not let {self.user} in; offered: {offered}{said}",
            where=self.where,
            next=f"check with `ssh -v {self.user}@...`; set ssh.identity_file or ssh.user in hosts.yaml",
        )

    def _offers(self, stack: contextlib.ExitStack) -> Iterator[tuple[str, paramiko.PKey]]:
        """What to try, in order; `stack` closes the agent afterwards."""
        if self.explicit is not None:
            yield str(self.explicit), load_key(self.explicit, self.where)
            return
        offered: set[bytes] = set()
        wanted = {blob for path in self.files if (blob := public_blob(path))}
        for key in _agent_keys(self.agent_socket, stack):
            if self.only_files and key.asbytes() not in wanted:
                continue
            offered.add(key.asbytes())
            yield f"the agent's {key.get_name()}", key
        locked = []
        for path in self.files:
            if public_blob(path) in offered:
                continue
            try:
                key = read_key(path, None)
            except Encrypted:
                locked.append(path)
                continue
            except UsageError as error:
                log.debug("%s", error)
                continue
            yield str(path), key
        for path in locked:
            yield str(path), load_key(path, self.where)


def load_key(path: Path, where: str) -> paramiko.PKey:
    """Read a key, with the passphrase of the environment, or asking for it where a person sits.

    Raises UsageError for a file that is missing, unreadable or no key, and for a passphrase that is not to
    be had.
    """
    try:
        return read_key(path, None)
    except Encrypted:
        pass
    given = os.environ.get(PASSPHRASE_VARIABLE)
    if given is not None:
        try:
            return read_key(path, given)
        except Encrypted:
            raise UsageError(f"{PASSPHRASE_VARIABLE} does not open {path}", where=where) from None
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            f"{path} needs a passphrase, and there is no terminal to ask for it",
            where=where,
            next=f"use an ssh agent (and no ssh.identity_file), or put it into {PASSPHRASE_VARIABLE}",
        )
    for _ in range(3):
        try:
            return read_key(path, getpass.getpass(f"Passphrase for {path}: ", stream=sys.stderr))
        except Encrypted:
            print("wrong passphrase", file=sys.stderr)
    raise UsageError(f"three wrong passphrases for {path}", where=where)


KEY_NAMED = "correct ssh.identity_file of this host in hosts.yaml, or IdentityFile in ~/.ssh/config"


def read_key(path: Path, passphrase: str | None) -> paramiko.PKey:
    """Raises Encrypted, or UsageError when the file cannot be read or is no private key that we know."""
    try:
        # Positional, as the parameter was renamed between paramiko 4 and 5; bytes, whatever its annotation
        # says.
        secret: Any = None if passphrase is None else passphrase.encode()
        return paramiko.PKey.from_path(path, secret)
    except OSError as error:
        raise UsageError(f"cannot read the key: {error.strerror}", where=str(path), next=KEY_NAMED) from error
    except (TypeError, paramiko.PasswordRequiredException):
        raise Encrypted from None  # cryptography's word for "a password is missing"
    except Exception as error:
        if passphrase is not None:
            raise Encrypted from error
        what = f"not a private key that can be used: {error}"
        raise UsageError(what, where=str(path), next=KEY_NAMED) from error


def public_blob(path: Path) -> bytes | None:
    """The public half beside a key file, to recognise it in the agent without opening it."""
    try:
        words = Path(f"{path}.pub").read_text().split()
        return base64.b64decode(words[1], validate=True)
    except (OSError, ValueError, IndexError):
        return None


def _agent_keys(path: str | None, stack: contextlib.ExitStack) -> Sequence[Any]:
    """The keys of the agent at `path`; none when there is no agent. They sign until `stack` is closed."""
    if path is None:
        return ()
    try:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(AGENT_TIMEOUT_S)
        connection.connect(path)
        agent: Any = AgentSSH()
        agent._connect(connection)  # paramiko.Agent does the same, but only for SSH_AUTH_SOCK
        return list(agent.get_keys())
    except (paramiko.SSHException, OSError) as error:
        log.debug("no ssh agent: %s", error)
        return ()
