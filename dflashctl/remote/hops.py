"""From what hosts.yaml says about ssh to the machines that are passed on the way, each as a fabric
Connection."""

from __future__ import annotations

import getpass
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import fabric
import paramiko

from dflashctl.config.hosts import Host
from dflashctl.errors import UsageError
from dflashctl.remote import matchexec, sshconfig
from dflashctl.remote.known_hosts import SSH_PORT

MAX_HOPS = 8

matchexec.install()


@dataclass(frozen=True)
class Target:
    """Where an ssh connection leads to; `label` is the host's name in hosts.yaml."""

    label: str
    host: str
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    known_hosts: str | None = None
    connect_timeout_s: float = 10.0
    use_ssh_config: bool = True


def target_of(host: Host) -> Target:
    """The `ssh:` part of an entry. Raises UsageError when it is missing."""
    if host.ssh is None:
        raise UsageError(
            f"engine {host.engine} needs the key 'ssh'",
            where=f"hosts.{host.name}",
            next="add ssh: {host: my-gpu-box}",
        )
    ssh = host.ssh
    return Target(
        label=host.name,
        host=ssh.host,
        user=ssh.user,
        port=ssh.port,
        identity_file=ssh.identity_file,
        known_hosts=ssh.known_hosts,
        connect_timeout_s=ssh.connect_timeout_s,
    )


@dataclass
class Hop:
    """One machine on the way. `connection` knows name, port, user and gateway; opening it is
    connection.py's."""

    name: str
    connection: fabric.Connection
    rules: sshconfig.HostKeyRules
    explicit_key: Path | None
    identity_files: list[Path] = field(default_factory=list)
    certificate: Path | None = None
    identities_only: bool = False
    agent_socket: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        return str(self.connection.host), int(self.connection.port)

    @property
    def user(self) -> str:
        return str(self.connection.user)


def hops_of(target: Target, config: paramiko.SSHConfig | None = None) -> list[Hop]:
    """The way to a target: jump hosts in order, the target last. Reads ~/.ssh/config unless `config` is
    given.

    Raises UsageError for a configuration that does not parse, whose jumps go round in a circle, or that asks
    for ProxyUseFdpass.
    """
    matchexec.forget()
    if config is None:
        config = sshconfig.load() if target.use_ssh_config else paramiko.SSHConfig()
    base = fabric.Config(lazy=True, ssh_config=config)
    hops: list[Hop] = []
    for name in _way(target.host, config, ()):
        hops.append(_hop(name, target, None if name is not target.host else target, base, hops))
    return hops


def _way(name: str, config: paramiko.SSHConfig, seen: tuple[str, ...]) -> list[str]:
    """As OpenSSH: the jumps of ProxyJump in their order; the first of them may need jumps of its own."""
    if name in seen or len(seen) >= MAX_HOPS:
        raise UsageError(f"ProxyJump goes in a circle: {' -> '.join((*seen, name))}", where="~/.ssh/config")
    jumps = sshconfig.jumps(_lookup(config, address(name).host))
    jumps = [] if jumps and jumps[0] == name else jumps
    return [*(_way(jumps[0], config, (*seen, name)) if jumps else []), *jumps[1:], name]


def _hop(name: str, target: Target, final: Target | None, base: fabric.Config, before: list[Hop]) -> Hop:
    spec = address(name)
    entry = _lookup(base.base_ssh_config, spec.host)
    gateway: Any = before[-1].connection if before else entry.get("proxycommand", False)
    if isinstance(gateway, str) and gateway.lower() == "none":
        gateway = False
    if isinstance(gateway, str) and entry.get("proxyusefdpass", "no").lower() == "yes":
        raise UsageError(
            f"ProxyUseFdpass of {name}: dflashctl cannot take a connection that a ProxyCommand hands over",
            where="~/.ssh/config",
            next="give a ProxyCommand that carries the bytes itself (nc without -F, or ProxyJump) and"
            f" ProxyUseFdpass no, for {name} or for another Host entry that hosts.yaml names as ssh.host",
        )
    connection = fabric.Connection(
        spec.host,
        user=(final.user if final else None) or spec.user,
        port=(final.port if final else None) or spec.port,
        gateway=gateway,
        config=base,  # not a clone: that would read ~/.fabric.yaml
        forward_agent=False,
    )
    if connection.user is None:
        connection.user = getpass.getuser()
    return Hop(
        name=name,
        connection=connection,
        rules=sshconfig.host_key_rules(entry, target.known_hosts if final else None),
        explicit_key=Path(final.identity_file).expanduser() if final and final.identity_file else None,
        identity_files=sshconfig.identity_files(entry),
        certificate=sshconfig.certificate_file(entry),
        identities_only=sshconfig.identities_only(entry),
        agent_socket=sshconfig.agent_socket(entry),
    )


class Spec(NamedTuple):
    """A machine as people write it; None for what they leave to the configuration."""

    host: str
    user: str | None = None
    port: int | None = None


def address(text: str) -> Spec:
    """`host`, `user@host:port`, `user@[2001:db8::1]:port`, `2001:db8::1` or `ssh://user@host:port`. Raises
    UsageError for a port that is none."""
    bare = text.removeprefix("ssh://").rstrip("/")
    user, _, place = bare.rpartition("@")
    found = re.fullmatch(r"(?:\[(?P<six>.+)\]|(?P<name>[^:]*))(?::(?P<port>[^:]*))?", place)
    if found is None:  # several colons without brackets: an IPv6 address alone
        return Spec(place, user or None)
    port = found["port"]
    if port is not None and not (port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(f"{text!r}: {port!r} is no port")
    return Spec(found["six"] or found["name"], user or None, int(port) if port else None)


def _lookup(config: paramiko.SSHConfig, name: str) -> dict[str, Any]:
    try:
        entry = sshconfig.expanded(dict(config.lookup(name)), name)
        port = str(entry.get("port", SSH_PORT))
        if not (port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"Port {port!r} is none")
        return entry
    except Exception as error:  # paramiko raises what it meets: a Match exec without invoke, a bad port
        raise UsageError(f"cannot be applied to {name}: {error}", where="~/.ssh/config") from error
