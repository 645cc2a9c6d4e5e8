"""From an entry of hosts.yaml to the engine that reaches it. fabric is imported only where ssh is meant."""

from __future__ import annotations

from dflashctl.config.hosts import Host
from dflashctl.remote.engine import Engine


def open_engine(host: Host) -> Engine:
    """The engine of `host`; nothing is connected yet. Use it as a context manager.

    Raises UsageError for an entry that lacks what its engine needs, NotFound when the lab is not up.
    """
    if host.engine == "local":
        from dflashctl.remote.local import LocalEngine

        return LocalEngine(host)
    if host.engine == "ssh":
        from dflashctl.remote.ssh import SshEngine

        return SshEngine(host)
    if host.engine == "lab":
        from dflashctl.remote.lab import lab_engine

        return lab_engine(host)
    from dflashctl.remote.pct import PctEngine

    return PctEngine(host)
