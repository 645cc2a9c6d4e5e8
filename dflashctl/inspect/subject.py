"""Whom a question is about: a host, or a run on it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dflashctl.config.hosts import Host, HostsFile
from dflashctl.errors import UsageError


@dataclass(frozen=True)
class Subject:
    """A host, and the tag or id of a run on it (the newest with that tag) or None."""

    host: Host
    run: str | None = None

    @property
    def name(self) -> str:
        return f"{self.host.name}/{self.run}" if self.run else self.host.name


def parse(text: str | None, hosts: HostsFile, default_host: str | None) -> Subject:
    """`HOST`, `HOST/RUN`, or `RUN` on the default host; the name of a host comes first. None: that host.

    Raises NotFound (no such host), UsageError.
    """
    if text is None:
        return Subject(hosts.host(default_host))
    name, slash, run = text.partition("/")
    if slash:
        if not name or not run or "/" in run:
            raise UsageError(f"cannot read {text!r}", next="write HOST, a run's tag, or HOST/TAG")
        return Subject(hosts.host(name), run)
    if name in hosts.names:
        return Subject(hosts.host(name))
    return Subject(hosts.host(default_host), name)
