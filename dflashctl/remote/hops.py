"""From what hosts.yaml says about ssh to the machines that are passed on the way, each as a fabric
Connection."""

from __future__ import annotations

import getpass
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fabric
import paramiko

from dflashctl.config.hosts import Host
from dflashctl.errors import UsageError
from dflashctl.remote import sshconfig

MAX_HOPS = 8


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

    Raises UsageError for a configuration that does not parse, or whose jumps go round in a circle.
    """
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
    bare = fabric.Connection.derive_shorthand(fabric.Connection, name)["host"]
    jumps = sshconfig.jumps(_lookup(config, bare))
    jumps = [] if jumps and jumps[0] == name else jumps
    return [*(_way(jumps[0], config, (*seen, name)) if jumps else []), *jumps[1:], name]


def _hop(name: str, target: Target, final: Target | None, base: fabric.Config, before: list[Hop]) -> Hop:
    entry = _lookup(base.base_ssh_config, name.rpartition("@")[2].partition(":")[0])
    gateway: Any = before[-1].connection if before else entry.get("proxycommand", False)
    if isinstance(gateway, str) and gateway.lower() == "none":
        gateway = False
    connection = fabric.Connection(
        name,
        user=final.user if final else None,
        port=final.port if final else None,
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
        identities_only=sshconfig.identities_only(entry),
        agent_socket=sshconfig.agent_socket(entry),
    )


def _lookup(config: paramiko.SSHConfig, name: str) -> dict[str, Any]:
    try:
        return dict(config.lookup(name))
    except Exception as error:  # paramiko raises what it meets: a Match exec without invoke, a bad port
        raise UsageError(f"cannot be applied to {name}: {error}", where="~/.ssh/config") from error
