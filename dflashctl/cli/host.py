"""`dflashctl host list` and `dflashctl host trust NAME`: the machines of hosts.yaml."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.common import JsonOption, VerboseOption

if TYPE_CHECKING:
    from dflashctl.remote.trust import Finding

app = typer.Typer(help="The machines of hosts.yaml.", no_args_is_help=True)


@app.command("list")
def list_hosts(json: JsonOption = False) -> None:
    """List the hosts, the default one marked by a star."""
    from dflashctl.config import load_hosts
    from dflashctl.render.json import emit
    from dflashctl.render.table import print_table, say

    file = load_hosts()
    hosts = [file.host(name) for name in file.names]
    if json:
        document = [host.model_dump(mode="json", exclude={"env"}) for host in hosts]
        where = str(file.path) if file.path else None
        emit("dflashctl.hosts/1", {"file": where, "default": file.defaults.host, "hosts": document})
        return
    say(f"{file.path or 'built-in hosts'}")
    print_table(
        ["HOST", "ENGINE", "REACHED AS", "CONTAINER", "CODE", "WORKDIR"],
        [
            [
                f"{host.name}{'*' if host.name == file.defaults.host else ''}",
                host.engine,
                f"{host.ssh.user + '@' if host.ssh.user else ''}{host.ssh.host}" if host.ssh else None,
                host.container,
                host.code_root,
                host.workdir,
            ]
            for host in hosts
        ],
    )


@app.command()
def trust(
    name: Annotated[str, typer.Argument(help="A host of hosts.yaml.")],
    fingerprint: Annotated[
        list[str] | None,
        typer.Option("--fingerprint", help="Store a key only if it has this one (SHA256:...); repeatable."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a key that has changed.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Show the fingerprint of a host's ssh key (and of its jump hosts) and store it in known_hosts."""
    from dflashctl.config import load_hosts
    from dflashctl.remote.trust import target_for
    from dflashctl.remote.trust import trust as take_up
    from dflashctl.render.text import line

    target = target_for(load_hosts().host(name))
    for finding in take_up(target, lambda found: _agreed(found, fingerprint, yes), replace=replace):
        if finding.known:
            print(line(f"{finding.offered.name}  {finding.offered}  already known"))
        else:
            print(line(f"{finding.offered.name}  {finding.offered}  stored in {finding.file}"))


def _agreed(finding: Finding, fingerprints: list[str] | None, yes: bool) -> bool:
    """Whether to store: by the fingerprint given, by --yes, or by asking."""
    from dflashctl.errors import HostKeyChanged, UsageError
    from dflashctl.remote.known_hosts import fingerprint as print_of
    from dflashctl.render.text import line

    offered = finding.offered
    if fingerprints:
        if any(print_of(offered.blob) == "SHA256:" + _bare(each) for each in fingerprints):
            return True
        raise HostKeyChanged(
            f"{offered.name} shows {offered}, which is not {' or '.join(fingerprints)}",
            next="do not connect before you know why",
        )
    shown = finding.before or f"the host key of {offered.name} is {offered}"
    print(line(shown), file=sys.stderr)
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            f"{offered.name} shows {offered}, and there is no terminal to ask whether that is right",
            next="give --fingerprint SHA256:... (best), or --yes",
        )
    print("on the machine itself: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub", file=sys.stderr)
    return typer.confirm(f"store the key of {offered.name}?", default=False, err=True)


def _bare(fingerprint: str) -> str:
    return fingerprint.strip().removeprefix("SHA256:").rstrip("=")
