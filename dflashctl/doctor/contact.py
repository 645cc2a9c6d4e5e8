"""Connect, and tell how far it came: keys offered, host key stored, how long a round trip takes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import paramiko

from dflashctl.doctor.facts import Contact, Trouble
from dflashctl.errors import DflashError, HostKeyChanged, UsageError
from dflashctl.remote.connection import SshConnection
from dflashctl.remote.hops import Hop, hops_of
from dflashctl.remote.hostkeys import UnknownHostKey
from dflashctl.remote.keys import NotLetIn
from dflashctl.remote.known_hosts import SSH_PORT, fingerprint, keys_for, lookup_name, read_files

ROUND_TRIPS = 3
OTHERS_MAY_READ = 0o077


def look(connection: SshConnection) -> Contact:
    """Open the connection and describe it; a failure is described, not raised."""
    try:
        hops = hops_of(connection.target)
    except DflashError as error:
        return Contact(_trouble(error), error.what, error.next)
    known = _described(hops)
    started = time.monotonic()
    try:
        transport = connection.transport()
    except DflashError as error:
        return replace(known, trouble=_trouble(error), what=error.what, next=error.next)
    connect_s = time.monotonic() - started
    return replace(known, connect_s=connect_s, latency_s=round_trip_s(transport))


def round_trip_s(transport: paramiko.Transport) -> float | None:
    """The quickest of a few; no command is run for it. None when the connection ended meanwhile."""
    times = []
    for _ in range(ROUND_TRIPS):
        started = time.monotonic()
        try:
            transport.global_request("keepalive@openssh.com", wait=True)
        except (paramiko.SSHException, EOFError, OSError):
            break
        times.append(time.monotonic() - started)
    return min(times, default=None)


def _trouble(error: DflashError) -> Trouble:
    if isinstance(error, UnknownHostKey):
        return "key unknown"
    if isinstance(error, HostKeyChanged):
        return "key changed"
    if isinstance(error, NotLetIn):
        return "not let in"
    return "setting" if isinstance(error, UsageError) else "no contact"


def _described(hops: list[Hop]) -> Contact:
    """What is known before anything is sent."""
    last = hops[-1]
    host, port = last.address
    files = [last.explicit_key] if last.explicit_key else last.identity_files
    agent = last.agent_socket is not None and last.explicit_key is None
    return Contact(
        user=last.user,
        address=host if port == SSH_PORT else f"{host}:{port}",
        jumps=tuple(hop.name for hop in hops[:-1]),
        keys=(*(["the agent's"] if agent else []), *(str(path) for path in files)),
        open_keys=tuple(str(path) for path in files if _open(path)),
        host_key=_stored(last),
    )


def _open(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & OTHERS_MAY_READ)
    except OSError:
        return False


def _stored(hop: Hop) -> str:
    """The first plain line of known_hosts about this name; "" when there is none."""
    name = lookup_name(*hop.address, hop.rules.alias)
    try:
        found = [key for key in keys_for(read_files(hop.rules.files), name) if not key.marker]
    except OSError:
        return ""
    return f"{found[0].key_type} {fingerprint(found[0].blob)} ({found[0].where})" if found else ""
