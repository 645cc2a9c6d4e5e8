"""Engine `lab`: the engine `pct`, pointed at the lab that is up."""

from __future__ import annotations

from pathlib import Path

from dflashctl.config.hosts import NO_HOSTS_FILE, Host, find_hosts
from dflashctl.errors import Unreachable
from dflashctl.remote.hops import Target
from dflashctl.remote.pct import PctEngine


def lab_engine(host: Host) -> PctEngine:
    """The engine `pct`, pointed at the lab that is up. Raises Unreachable when none is."""
    return PctEngine(host, lab_target(host))


def lab_target(host: Host) -> Target:
    """The lab's own ssh server, with the lab's key and pinned host key, whatever ~/.ssh/config says."""
    from dflashctl.lab.state import load_endpoint

    try:
        endpoint = load_endpoint()
    except Unreachable as error:
        if find_hosts(Path.cwd()) is not None:
            raise
        # Who has machines of their own did not mean the lab: they are in another folder.
        hint = f"{error.next}; for a machine of yours: {NO_HOSTS_FILE}"
        raise Unreachable(error.what, where=error.where, next=hint) from None
    return Target(
        label=host.name,
        host=endpoint.host,
        user=endpoint.user,
        port=endpoint.port,
        identity_file=endpoint.key,
        known_hosts=endpoint.known_hosts,
        use_ssh_config=False,
    )
