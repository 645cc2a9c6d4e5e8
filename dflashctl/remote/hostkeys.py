"""Checking a server's host key: known, unknown (refused, with the way to trust it), changed or revoked.

StrictHostKeyChecking of ~/.ssh/config is not asked: no setting makes an unknown key pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paramiko

from dflashctl.errors import HostKeyChanged, Unreachable, UsageError
from dflashctl.remote.known_hosts import KnownKey, fingerprint, keys_for, lookup_name, read_files
from dflashctl.remote.sshconfig import HostKeyRules

# A key of this type signs in several ways; known_hosts names the type, the negotiation the way.
_SIGNATURES = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}


@dataclass(frozen=True)
class Offered:
    """A server's key and the name under which it is looked up and stored."""

    name: str
    key_type: str
    blob: bytes

    def __str__(self) -> str:
        return f"{self.key_type} {fingerprint(self.blob)}"


class UnknownHostKey(Unreachable):
    """The server's key is in no known_hosts file."""


class OtherHostKey(HostKeyChanged):
    """The server's key is another one than the one that is stored."""


FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
"""First, as OpenSSH has them before AES-CTR: they need no separate MAC, which is what costs most here."""


class HostKeyChecker(paramiko.MissingHostKeyPolicy):
    """paramiko asks it about every key, because it is given no keys of its own to compare."""

    def __init__(self, host: str, port: int, rules: HostKeyRules, *, label: str, where: str) -> None:
        self.name = lookup_name(host, port, rules.alias)
        self.label = label
        self.where = where
        self.rules = rules
        try:
            self.known = keys_for(read_files(rules.files), self.name)
        except OSError as error:
            raise UsageError(
                f"cannot read known_hosts: {error.strerror}", where=str(error.filename)
            ) from error

    def transport(self, sock: Any, **options: Any) -> paramiko.Transport:
        """A transport that asks first for the types of key that are known, as OpenSSH does."""
        made = paramiko.Transport(sock, **options)
        security = made.get_security_options()
        offered = list(security.key_types)
        first = [
            kind
            for key in self.known
            if not key.marker
            for kind in _SIGNATURES.get(key.key_type, (key.key_type,))
            if kind in offered
        ]
        security.key_types = [*dict.fromkeys(first), *(kind for kind in offered if kind not in first)]
        fast = [name for name in FAST_CIPHERS if name in security.ciphers]
        security.ciphers = [*fast, *(name for name in security.ciphers if name not in fast)]
        return made

    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        """Returns for a known key; raises UnknownHostKey or HostKeyChanged for any other."""
        check(self.known, self.offered(key), label=self.label, where=self.where)

    def offered(self, key: paramiko.PKey) -> Offered:
        return Offered(self.name, key.get_name(), key.asbytes())


def check(known: list[KnownKey], offered: Offered, *, label: str, where: str) -> None:
    """Pure: compare a server's key with the lines about its name. Raises UnknownHostKey, OtherHostKey, or
    HostKeyChanged for a revoked one."""
    revoked = [line for line in known if line.marker == "@revoked" and line.blob == offered.blob]
    if revoked:
        raise HostKeyChanged(
            f"the host key of {offered.name}, {offered}, is marked as revoked", where=revoked[0].where
        )
    plain = [line for line in known if not line.marker]
    if any(line.blob == offered.blob for line in plain):
        return
    if not plain:
        authority = next(
            (
                f" by itself (@cert-authority in {line.where} is not asked)"
                for line in known
                if line.marker == "@cert-authority"
            ),
            "",
        )
        raise UnknownHostKey(
            f"the host key of {offered.name} is not known{authority}: {offered}",
            where=where,
            next=f"compare the fingerprint with the machine's own, then: dflashctl host trust {label}",
        )
    same_type = [line for line in plain if line.key_type == offered.key_type] or plain
    stored = f"{same_type[0].key_type} {fingerprint(same_type[0].blob)}"
    raise OtherHostKey(
        f"the host key of {offered.name} is {offered}, but {stored} is stored in {same_type[0].where}:"
        " either the machine was set up anew, or something else answers in its place",
        where=where,
        next=f"find out which; if the new key is right: dflashctl host trust {label} --replace",
    )
