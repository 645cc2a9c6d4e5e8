"""`host trust`: take up a host's key, and those of its jump hosts, after the person has seen the
fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import paramiko

from dflashctl.config.hosts import Host
from dflashctl.errors import UsageError
from dflashctl.remote.hops import Target, hops_of, target_of
from dflashctl.remote.hostkeys import Offered, OtherHostKey, UnknownHostKey, check
from dflashctl.remote.known_hosts import keys_for, read_files, store
from dflashctl.remote.opening import offered_key, open_hop

Ask = Callable[["Finding"], bool]


@dataclass(frozen=True)
class Finding:
    """A key that a server showed: already known, or to be stored in `file`. `before` names the one it
    replaces."""

    offered: Offered
    file: Path
    known: bool
    before: str = ""


def target_for(host: Host) -> Target:
    """Where the ssh connection of a host goes. Raises UsageError for a host without one."""
    if host.engine == "local":
        raise UsageError("engine local is this machine: there is no host key", where=f"hosts.{host.name}")
    if host.engine == "lab":
        from dflashctl.remote.lab import lab_target

        return lab_target(host)
    return target_of(host)


def trust(
    target: Target, ask: Ask, *, replace: bool = False, config: paramiko.SSHConfig | None = None
) -> list[Finding]:
    """Look at each hop's key; store the unknown ones that `ask` agrees to (with `replace`, changed ones too).

    Raises OtherHostKey for a changed key without `replace`, UsageError when `ask` says no or the file
    cannot be written, Unreachable.
    """
    findings = []
    hops = hops_of(target, config)
    try:
        for hop in hops:
            offered = offered_key(hop, target)
            before = ""
            try:
                known = keys_for(read_files(hop.rules.files), offered.name)
                check(known, offered, label=target.label, where=target.label)
                findings.append(Finding(offered, hop.rules.store, known=True))
            except (UnknownHostKey, OtherHostKey) as error:
                if isinstance(error, OtherHostKey):
                    if not replace:
                        raise
                    before = error.what
                finding = Finding(offered, hop.rules.store, known=False, before=before)
                if not ask(finding):
                    raise UsageError(
                        f"the key of {offered.name} was not stored", where=target.label
                    ) from None
                _store(finding, replace=bool(before))
                findings.append(finding)
            if hop is not hops[-1]:
                open_hop(hop, target)
    finally:
        for hop in reversed(hops):
            hop.connection.client.close()
    return findings


def _store(finding: Finding, *, replace: bool) -> None:
    offered = finding.offered
    try:
        store(finding.file, offered.name, offered.key_type, offered.blob, replace=replace)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(finding.file)) from error
