"""The way in: ssh key, known_hosts, the connection, the clocks. Pure."""

from __future__ import annotations

from dflashctl.doctor.facts import Contact, Facts
from dflashctl.doctor.findings import Finding, failure, not_known, ok, warning
from dflashctl.render.text import duration
from dflashctl.runs.facts import text, whole

SLOW_S = 0.3
"""A round trip; a command makes several."""
CLOCK_WARNING_S, CLOCK_FAILURE_S = 2.0, 300.0

CANNOT = "without a connection nothing on the other side can be looked at"


def _contact(facts: Facts) -> Contact:
    return facts.contact or Contact()


def ssh_key(facts: Facts) -> Finding:
    contact = _contact(facts)
    offered = ", ".join(contact.keys) or "no key: none was found, and there is no agent"
    if contact.trouble == "not let in":
        return failure(contact.what, CANNOT, contact.next)
    if contact.open_keys:
        return warning(
            f"others on this machine may read {', '.join(contact.open_keys)}",
            "OpenSSH refuses such a key, and whoever reads it can log in as you",
            f"chmod 600 {' '.join(contact.open_keys)}",
        )
    if contact.trouble == "setting":
        return failure(
            contact.what, CANNOT, contact.next or "mend the `ssh:` part of this host in hosts.yaml"
        )
    if contact.trouble:
        return not_known(f"the log-in did not come so far (it would offer: {offered})")
    return ok(f"{contact.user} was let in; offered: {offered}")


def known_hosts(facts: Facts) -> Finding:
    contact = _contact(facts)
    if contact.trouble == "key unknown":
        return failure(contact.what, f"a stranger could answer in its place: {CANNOT}", contact.next)
    if contact.trouble == "key changed":
        means = "the machine was set up anew, or something else answers in its place"
        return failure(contact.what, means, contact.next)
    if contact.trouble == "no contact" or not contact.host_key:
        stored = f"; stored is {contact.host_key}" if contact.host_key else ""
        return not_known(f"it showed no key{stored}")
    return ok(contact.host_key)


def ssh(facts: Facts) -> Finding:
    contact = _contact(facts)
    if contact.trouble == "no contact":
        return failure(contact.what, CANNOT, contact.next or "see whether the machine is up and on the net")
    if contact.trouble:
        return not_known("the log-in failed: see above")
    way = "".join(f", through {jump}" for jump in contact.jumps)
    found = (
        f"{contact.address}{way}: connected in {duration(contact.connect_s)},"
        f" a round trip takes {(contact.latency_s or 0.0) * 1000:.1f} ms"
    )
    if (contact.latency_s or 0.0) > SLOW_S:
        means = "each command takes several round trips, so all will feel slow"
        return warning(found, means, "a nearer jump host, or another network")
    return ok(found)


def host(facts: Facts) -> Finding:
    """Whether the machine that owns the GPUs answers at all: it needs a Python, and for pct root."""
    if facts.box is None:
        if facts.contact is not None and facts.contact.trouble:
            return not_known(facts.box_problem)
        means = "neither the container nor the GPUs can be looked at from there"
        found = facts.box_problem.removesuffix(f" ({facts.box_next})")
        return failure(found, means, facts.box_next or "see whether `python3` runs there for the ssh user")
    user = "as root" if facts.box.get("uid") == 0 else f"as uid {whole(facts.box.get('uid'))}"
    return ok(f"answers {user}, kernel {text(facts.box.get('kernel'))}")


def clock(facts: Facts) -> Finding:
    if not facts.clocks:
        return not_known("no clock over there was read")
    where, worst = max(facts.clocks.items(), key=lambda each: abs(each[1].offset_s))
    name = "the host's" if where == "host" else "the container's" if facts.host.container else "its"
    off = abs(worst.offset_s)
    if off <= CLOCK_WARNING_S:
        return ok(f"agrees with this machine's (to {CLOCK_WARNING_S:g} s)")
    found = f"{name} clock is {duration(off)} {'ahead of' if worst.offset_s > 0 else 'behind'} this machine's"
    mend = "let chrony or systemd-timesyncd run on both: timedatectl status"
    if off > CLOCK_FAILURE_S:
        return failure(found, "certificates look expired or not yet valid: downloads fail", mend)
    return warning(found, "times of runs and of log lines do not compare with yours", mend)
