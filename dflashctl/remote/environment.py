"""The environment that every remote command starts with: known, small, the same for every engine."""

from __future__ import annotations

from dflashctl.config.hosts import Host


def clean_environment(host: Host) -> dict[str, str]:
    """PATH, HOME and LANG. `env:` of hosts.yaml belongs to the run and travels in its launch request instead,
    because this environment becomes argv (`env -i K=V ...`) and argv is public."""
    return {"PATH": host.path, "HOME": host.home, "LANG": "C.UTF-8"}
