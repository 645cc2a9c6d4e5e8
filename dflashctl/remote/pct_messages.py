"""What `pct` says when it cannot do something, as our errors. Pure; a table of observed texts in the tests.

pct's exit codes are not stable (255, 2, 4 for its own failures; 0 for a push that failed), so texts
decide. The texts of lxc-attach carry source line numbers and are never matched; for those the container's
state is asked.
"""

from __future__ import annotations

import re

from dflashctl.errors import ContainerDown, DflashError, Locked, NotFound, Unreachable, UsageError

_NOT_RUNNING = re.compile(
    r"container '\d+' not running!|can only (?:push files to a running CT|pull files from a running VM)"
)
_NO_CONFIG = re.compile(
    r"Configuration file '(?:nodes/(?P<node>[^/']+)/)?[^']*/(?P<vmid>\d+)\.conf' does not exist"
)
_LOCK = re.compile(r"can't lock file '(?P<file>[^']*)' - got timeout")
_CONFIG_LOCK = re.compile(r"CT is locked \((?P<why>[^)]*)\)")
_NO_COMMAND = re.compile(
    r"^(?:-?[\w/]*sh|sudo): (?:[^:\n]+: ?)?(?P<program>pct|sudo)\s?: (?P<why>[^:\n]+)$"
    r"|nknown command: (?P<fish>pct|sudo)$|command not found: (?P<zsh>pct|sudo)$",
    re.MULTILINE,
)
"""A shell's word, in whatever language: `bash: Zeile 1: pct: Kommando nicht gefunden.`"""
_NO_CLUSTER = re.compile(
    r"^(?:ipcc_send_rec\[\d+\] failed|Unable to load access control list): (?P<why>.*)$", re.MULTILINE
)
"""The daemon of Proxmox's file system /etc/pve does not answer: it is down, or it answers root alone. Every
`pct` asks it first, before it looks who runs it."""
_NO_DAEMON = ("Connection refused", "No such file or directory", "Transport endpoint is not connected")

_NOT_ROOT = re.compile(r"please run as root")
_SUDO = re.compile(r"^sudo: (?P<why>.*)$", re.MULTILINE)
_SUDO_WARNING = re.compile(r"^sudo: unable to resolve host .*\n?", re.MULTILINE)
_VMID = re.compile(r"vmid: (?P<why>[^\n]*)")


def is_lock_timeout(stderr: str) -> bool:
    """Another push or pull holds the container's lock; trying again is right."""
    return _LOCK.search(stderr) is not None


def starting(engine: str, container: int) -> str:
    """What starts a container that is stopped. The lab's host is out of a person's daily reach."""
    if engine == "lab":
        from dflashctl.lab.layout import CONTAINER  # the lab is imported only by those who use it

        if container == CONTAINER:
            return "dflashctl lab up"
    return f"on the host: pct start {container}"


def classify(
    stderr: str, *, container: int, where: str, sudo: bool = False, engine: str = "pct"
) -> DflashError | None:
    """The error that pct's own words mean, or None when they are not pct's (the program inside speaks)."""
    if _NOT_RUNNING.search(stderr):
        return ContainerDown(
            f"container {container} is not running", where=where, next=starting(engine, container)
        )
    if found := _NO_CLUSTER.search(stderr):  # before the next: without /etc/pve no container has a file
        if not sudo and found["why"].strip() not in _NO_DAEMON:
            return UsageError(
                f"Proxmox does not answer pct: {found[0].strip()}",
                where=where,
                next="it answers root alone: set ssh.user: root, or ssh.sudo: true in hosts.yaml; if that is"
                " root already, on the host: systemctl status pve-cluster",
            )
        return Unreachable(
            f"the host cannot read its configuration of containers: {found[0].strip()}",
            where=where,
            next="on the host: systemctl status pve-cluster (/etc/hosts must hold the host's own name)",
        )
    if found := _NO_CONFIG.search(stderr):
        node = f" on node {found['node']}" if found["node"] else " on this node"
        return NotFound(
            f"there is no container {found['vmid']}{node}",
            where=where,
            next="it may live on another node of the cluster; `pct list` on each shows which."
            " Set `container:` and `ssh.host` in hosts.yaml",
        )
    if found := _LOCK.search(stderr):
        return Locked(
            f"container {container} is locked by another pct command ({found['file']})",
            where=where,
            next="wait until it has ended, then run this again",
        )
    if found := _CONFIG_LOCK.search(stderr):
        return Locked(f"container {container} is locked ({found['why']})", where=where)
    if _NOT_ROOT.search(stderr):
        return UsageError(
            "pct only works for root, and the ssh user is not",
            where=where,
            next="set ssh.user: root, or ssh.sudo: true in hosts.yaml",
        )
    if found := _NO_COMMAND.search(stderr):
        program = found["program"] or found["fish"] or found["zsh"]
        why = found["why"] or ""
        why = "command not found" if not why or why.endswith("not found") else why
        what, hint = f"{program}: {why}", "is this the Proxmox host?"
        if program == "pct" and not sudo:
            hint += " For a user other than root pct is not on the PATH: set ssh.sudo: true in hosts.yaml"
        return UsageError(what, where=where, next=hint)
    if refused := classify_sudo(stderr, where):
        return refused
    if (found := _VMID.search(stderr)) and "Parameter verification failed" in stderr:
        return UsageError(f"pct does not take container {container}: {found['why']}", where=where)
    return None


def classify_sudo(stderr: str, where: str) -> DflashError | None:
    """sudo's own refusal, else None."""
    if found := _SUDO.match(_SUDO_WARNING.sub("", stderr).lstrip()):
        return UsageError(
            f"sudo refused: {found['why']}",
            where=where,
            next="allow it in sudoers (Defaults:USER !requiretty), or use root"
            if " tty" in found["why"]
            else "allow the ssh user all commands without a password (USER ALL=NOPASSWD: ALL in sudoers),"
            " or use root",
        )
    return None
