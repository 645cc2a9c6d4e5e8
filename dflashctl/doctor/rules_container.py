"""Proxmox and the container: state, freezer, locks, users, mounts. Pure."""

from __future__ import annotations

import re

from dflashctl.doctor.facts import Facts
from dflashctl.doctor.findings import Finding, failure, not_known, ok, warning
from dflashctl.remote import pct_messages
from dflashctl.runs.facts import listed, mapping, number, text

KNOWN_PROXMOX = (7, 8, 9)
CURRENT_PROXMOX = (8, 9)
ALL_IDS = 65536
"""How many ids a container has as Proxmox makes it."""


def proxmox(facts: Facts) -> Finding:
    reading = mapping(mapping(facts.box).get("proxmox"))
    said = text(reading.get("stdout")).strip()
    match = re.match(r"pve-manager/(\d+)(\.[\d.]+)?", said)
    if match is None:
        why = text(reading.get("stderr")).strip() or said or "there is no pveversion"
        return not_known(f"is this a Proxmox host? {why}")
    major = int(match[1])
    found = f"Proxmox VE {match[1]}{match[2] or ''}"
    if major not in KNOWN_PROXMOX:
        means = f"dflashctl knows what `pct` of {KNOWN_PROXMOX[0]} to {KNOWN_PROXMOX[-1]} does, not this one"
        return warning(found, means, "look into docs/pct.md before you trust a surprising answer")
    if major not in CURRENT_PROXMOX:
        means = "its `pct` leaks the host's environment into containers, and it gets no fixes any more"
        return warning(found, means, "upgrade the host to Proxmox VE 8 or 9 when no run is live")
    return ok(found)


def container(facts: Facts) -> Finding:
    vmid = facts.host.container
    if facts.running:
        return ok(f"container {vmid} is running")
    if facts.running is False:
        means = "nothing runs in it and nothing in it can be looked at"
        return failure(
            f"container {vmid} is stopped", means, pct_messages.starting(facts.host.engine, vmid or 0)
        )
    reading = mapping(facts.container.get("status"))
    if reading.get("problem") == "missing":
        mend = "see whether ssh.host in hosts.yaml is the Proxmox host"
        return failure("there is no `pct` on this machine", "it is no Proxmox host", mend)
    said = text(reading.get("stderr")).strip()
    error = pct_messages.classify(said, container=vmid or 0, where="")
    what = error.what if error else f"pct status: {said or reading.get('problem') or 'no answer'}"
    mend = (error.next if error else "") or f"on the host: pct status {vmid}"
    return failure(what, "the container cannot be reached", mend)


def frozen(facts: Facts) -> Finding:
    vmid = facts.host.container
    if not facts.init:
        return not_known("its first process could not be looked at")
    if facts.frozen:
        return failure(
            f"container {vmid} is frozen, though `pct status` calls it running",
            "runs in it stand still and every command in it waits: a backup, or somebody's `pct suspend`",
            f"wait for the backup to end, or on the host: pct resume {vmid}",
        )
    return ok("not frozen")


def locks(facts: Facts) -> Finding:
    config, vmid = facts.config, facts.host.container
    found, means, mend = [], [], []
    if config is not None and config.lock:
        found.append(f"`lock: {config.lock}` in its configuration")
        means.append("it can be neither started nor stopped; runs and deploys go on")
        mend.append(f"wait; if no {config.lock} is running any more, on the host: pct unlock {vmid}")
    holders = text(facts.container.get("lock_holders"))
    if holders:
        found.append(f"`pct` lock held by {holders}")
        means.append("a deploy waits for it, at most a minute")
        mend.append("wait until it has ended; never remove Proxmox's lock file")
    holder = mapping(mapping(facts.box).get("deploy_lock"))
    if holder:
        held = number(holder.get("held_s"))
        since = f" for {held:.0f} s" if held is not None else ""
        found.append(f"deploy lock held by {text(holder.get('who')) or 'somebody'}{since}")
        means.append("other deploys to it are refused meanwhile")
        mend.append("wait, or look: dflashctl lock show")
    if found:
        return warning("; ".join(found), "; ".join(means), "; ".join(mend))
    if config is None:
        return not_known("its configuration could not be read")
    return ok("none held")


def users(facts: Facts) -> Finding:
    """`unprivileged:` against the uid map in force."""
    config, vmid = facts.config, facts.host.container
    ids = facts.uid_map
    if not ids or config is None:
        return not_known("its uid map or its configuration could not be read")
    if facts.host.engine == "lab":
        return ok("unprivileged; the lab maps one id, root's, which is yours on this machine")
    root = next((outside for inside, outside, _ in ids if inside == 0), None)
    count = sum(each for _, _, each in ids)
    if config.unprivileged != (root != 0):
        says, is_ = ("unprivileged", "root") if config.unprivileged else ("privileged", f"uid {root}")
        return failure(
            f"its configuration says {says}, but root in it is {is_} on the host",
            "it runs on another configuration than the one that is written: owners of files will not fit",
            f"when no run is live, on the host: pct reboot {vmid}",
        )
    if not config.unprivileged:
        return warning(
            "privileged: root in it is root on the host",
            "a program in it can signal processes of the host and reach its devices",
            "run trusted code only, or restore a backup of it as unprivileged",
        )
    if count < ALL_IDS:
        return warning(
            f"unprivileged, but only {count:,} ids are mapped",
            "files of other users show as nobody, and programs that change their user fail",
            f"give it {ALL_IDS:,} ids in lxc.idmap and in /etc/subuid and /etc/subgid of the host",
        )
    return ok(f"unprivileged: root in it is uid {root} on the host")


def mounts(facts: Facts) -> Finding:
    """Folders that are the same on both sides: `pct push` empties a file that it would copy onto itself."""
    if facts.config is None:
        return not_known("its configuration could not be read")
    binds = [mapping(each) for each in listed(facts.container.get("binds"))]
    shown = ", ".join(f"{text(each.get('source'))} is {text(each.get('target'))} inside" for each in binds)
    staging = facts.host.staging_dir
    bad = next((each for each in binds if each.get("holds_staging") is True), None)
    if bad is not None:
        source, target = text(bad.get("source")), text(bad.get("target"))
        return failure(
            f"staging_dir {staging} lies in {source}, which is {target} inside",
            "a deploy would stage what the container can change, and `pct push` onto itself empties the file",
            "set staging_dir of this host in hosts.yaml to a folder that no container mounts, like /var/tmp",
        )
    if not binds:
        return ok("no folder of the host is mounted in it")
    return ok(
        f"{shown}: the same files on both sides; {staging}, where deploys are staged, is in none of them"
    )
