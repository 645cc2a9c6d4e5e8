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

NONE_TAKEN = "it took none of them"

AGENT_TIMEOUT_S = 60.0
"""An agent may ask its person before it signs."""

log = logging.getLogger("dflashctl.remote")


class Encrypted(Exception):
    """A key file needs a passphrase, or another one."""


class NotLetIn(Unreachable):
    """The server answers, but took none of our keys."""


class KeyAuthentication:
    """Public-key authentication of one hop; paramiko calls `authenticate`.

    With an explicit key, that one alone is offered: from its file or, where that is locked or only its public
    half, from the agent. Else, as ssh does it, the agent's keys, those first that ~/.ssh/config names (a
    server hangs up after six), then the files that it names (or the default ones); a file that needs a
    passphrase comes last, and only once. A key that has a certificate is offered with it, then alone.
    """

    def __init__(
        self,
        *,
        user: str,
        where: str,
        explicit: Path | None = None,
        files: Sequence[Path] = (),
        certificate: Path | None = None,
        only_files: bool = False,
        agent_socket: str | None = None,
        by_hand: str = "ssh -v",
        bring: str = "ssh-copy-id",
    ) -> None:
        """by_hand, bring: commands for a person, to see why a log-in fails, and to bring their key there."""
        self.user = user
        self.where = where
        self.explicit = explicit
        self.files = files
        self.certificate = certificate
        self.only_files = only_files
        self.agent_socket = agent_socket
        self.by_hand = by_hand
        self.bring = bring
        self.tried: list[str] = []

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Returns the methods that the server still wants (none). Raises Unreachable saying what was
        tried."""
        with contextlib.ExitStack() as stack:
            offers = (form for label, key in self._offers(stack) for form in self._forms(label, key))
            return self._authenticate(transport, offers)

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
        raise self._refused(NONE_TAKEN if self.tried else "")

    def _refused(self, reason: str) -> DflashError:
        offered = ", ".join(self.tried) or "no key (none found, and no agent)"
        said = f"; {reason}" if reason else ""
        hint = f"check with: {self.by_hand}; set ssh.identity_file or ssh.user in hosts.yaml"
        if not self.tried:
            hint = f"make a key and bring it there: ssh-keygen -t ed25519 && {self.bring}; or {hint}"
        elif reason == NONE_TAKEN:
            hint = f"bring your key there: {self.bring}; or {hint}"
        return NotLetIn(
            f"the server did not let {self.user} in; offered: {offered}{said}", where=self.where, next=hint
        )

    def _explicit(self, path: Path, stack: contextlib.ExitStack) -> tuple[str, paramiko.PKey]:
        """Raises UsageError as load_key does."""
        with contextlib.suppress(Encrypted, UsageError):
            return str(path), read_key(path, None)
        blob = public_blob(path)
        for key in _agent_keys(self.agent_socket, stack):
            if key.asbytes() == blob:
                return f"the agent's {path.name}", key
        return str(path), load_key(path, self.where)

    def _forms(self, label: str, key: Any) -> Iterator[tuple[str, paramiko.PKey]]:
        """With its certificate, and without: that may have expired, or be for another user."""
        if self.certificate is not None and key.public_blob is None:
            add_certificate(key, self.certificate)
        if key.public_blob is not None:
            yield f"{label} with its certificate", key
            key.public_blob = None
        yield label, key

    def _offers(self, stack: contextlib.ExitStack) -> Iterator[tuple[str, paramiko.PKey]]:
        """What to try, in order; `stack` closes the agent afterwards."""
        if self.explicit is not None:
            yield self._explicit(self.explicit, stack)
            return
        offered: set[bytes] = set()
        wanted = [blob for path in self.files if (blob := public_blob(path))]
        held = list(_agent_keys(self.agent_socket, stack))
        named = [key for blob in wanted for key in held if key.asbytes() == blob]
        others = [] if self.only_files else [key for key in held if key.asbytes() not in wanted]
        for key in [*named, *others]:
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


def add_certificate(key: paramiko.PKey, path: Path) -> None:
    """Give a key its certificate, if it is this key's; a file that is none is passed over, as by ssh."""
    try:
        blob = paramiko.pkey.PublicBlob.from_file(str(path))
        certified, own = paramiko.Message(blob.key_blob), paramiko.Message(key.asbytes())
        for part in (certified, certified, own):  # type and nonce stand before the public key; its type
            part.get_binary()
        if certified.get_remainder().startswith(own.get_remainder()):
            key.load_certificate(str(path))
    except (OSError, ValueError, IndexError) as error:
        log.debug("%s: %s", path, error)


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
        what, hint = _what_else(path) or (
            f"not a private key that can be used: {str(error).partition('. See http')[0]}",
            KEY_NAMED,
        )
        raise UsageError(what, where=str(path), next=hint) from error


def _what_else(path: Path) -> tuple[str, str] | None:
    """(what, next) of a file that people take for a private key."""
    if path.read_bytes()[:14] == b"PuTTY-User-Key":
        return "it is a key of PuTTY", f"puttygen {path} -O private-openssh -o NEW; then name NEW"
    if _blob_in(path):
        what = "it is a public key, and no ssh agent holds the private one"
        return what, "name the private key's file (usually without .pub), or ssh-add it"
    return None


def public_blob(path: Path) -> bytes | None:
    """The public half beside a key file, to recognise it in the agent without opening it; or the file
    itself, where the private half never leaves the agent."""
    return _blob_in(Path(f"{path}.pub")) or _blob_in(path)


def _blob_in(path: Path) -> bytes | None:
    try:
        kind, text = path.read_text().split(None, 2)[:2]
        return base64.b64decode(text, validate=True) if kind.startswith(("ssh-", "ecdsa-", "sk-")) else None
    except (OSError, ValueError):
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
