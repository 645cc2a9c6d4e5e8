"""The GPUs themselves: seen, counted, healthy, joined. Pure."""

from __future__ import annotations

import re

from dflashctl.doctor.facts import Facts
from dflashctl.doctor.findings import Finding, failure, not_known, ok, warning
from dflashctl.doctor.smiquery import parse_topology
from dflashctl.doctor.xids import HARDWARE, PROGRAM, XID
from dflashctl.gpus import smi
from dflashctl.render.text import plural
from dflashctl.runs.facts import listed, mapping, text

RESET = "when no run uses it, on the host: nvidia-smi --gpu-reset -i N; else reboot the host"


def nvml_host(facts: Facts) -> Finding:
    query = facts.query
    where = "on the host" if facts.host.container else "there"
    if query.problem:
        return failure(query.problem, f"no GPU can be looked at {where}", "mend the driver first: see above")
    if query.complaints:
        means = "that GPU has failed; the others can be used: launch with gpus: {count: N}"
        return failure("; ".join(query.complaints), means, "reboot the host; if it stays, reseat the card")
    sick = [gpu.name for gpu in query.gpus if "requires reset" in " ".join(gpu.values.values())]
    if sick:
        return failure(f"{', '.join(sick)}: requires a reset", "no program can use it until then", RESET)
    return ok(f"{plural(len(query.gpus), 'GPU')}, driver {query.driver}, for CUDA up to {query.cuda}")


def nvml_inside(facts: Facts) -> Finding:
    reading = mapping(mapping(facts.inside).get("smi"))
    found = inside_uuids(facts)
    if found:
        return ok(f"{plural(len(found), 'GPU')} seen inside")
    why = smi.failure(reading, "nvidia-smi lists no GPU")
    if not facts.query.problem:
        return failure(
            f"inside: {why}",
            "the container's view of the GPUs is broken, the host's is fine; a run may go on all the same",
            f"see device nodes, cgroup rules and driver; then on the host: pct reboot {facts.host.container}",
        )
    return failure(f"inside: {why}", "no GPU can be looked at inside", "mend the host's driver first")


def inside_uuids(facts: Facts) -> list[str]:
    reading = mapping(mapping(facts.inside).get("smi"))
    rows = [line.split(",") for line in text(reading.get("stdout")).splitlines()]
    return [row[1].strip() for row in rows if len(row) == 3 and row[0].strip().isdecimal()]


def gpus(facts: Facts) -> Finding:
    """Count and UUIDs: the host's, the container's, and what hosts.yaml expects."""
    have = [gpu.uuid for gpu in facts.query.gpus if gpu.uuid]
    expect, named = facts.host.gpus.expect, facts.host.gpus.uuids
    where = f"hosts.{facts.host.name}.gpus"
    if named is not None:
        gone = [uuid for uuid in named if uuid not in have]
        new = [uuid for uuid in have if uuid not in named]
        if gone:
            means = "a card has failed, was swapped or moved; runs that name it cannot start"
            swapped = f"; not named there: {', '.join(new)}" if new else ""
            mend = (
                f"look for it: lspci | grep -i nvidia, and Xid below; if it was swapped, mend {where}.uuids"
            )
            return failure(f"missing: {', '.join(gone)}{swapped}", means, mend)
        if new:
            mend = f"add it to {where}.uuids"
            return warning(f"not named in {where}.uuids: {', '.join(new)}", "it was added since", mend)
    if expect is not None and len(have) < expect:
        return failure(
            f"{len(have)} of {expect} GPUs",
            "one is missing: numbers above it have moved down, so `ids:` of recipes mean other cards",
            f"look for it: lspci | grep -i nvidia, and Xid below; or mend {where}.expect",
        )
    if expect is not None and len(have) > expect:
        return warning(f"{len(have)} GPUs, {expect} expected", "one was added", f"mend {where}.expect")
    if facts.inside is not None and facts.host.container is not None:
        unseen = [gpu.name for gpu in facts.query.gpus if gpu.uuid not in inside_uuids(facts)]
        if unseen and inside_uuids(facts):
            means = "the container sees fewer GPUs than the host, and numbers them otherwise"
            return failure(f"not seen inside: {', '.join(unseen)}", means, "see device nodes above")
    said = "" if expect is None else ", as expected"
    return ok(f"{plural(len(have), 'GPU')}{said}{'' if named is None else ', each with its UUID'}")


def ecc(facts: Facts) -> Finding:
    """Memory errors: since the last reset, in the GPU's life, and rows that wait to be replaced."""
    sick, old, off, counted = [], [], [], 0
    for gpu in facts.query.gpus:
        volatile, life = (
            _uncorrectable(gpu.below("ECC Errors", "Volatile")),
            _uncorrectable(gpu.below("ECC Errors", "Aggregate")),
        )
        counted += volatile is not None
        if gpu.get("ECC Mode", "Current") == "Disabled":
            off.append(gpu.name)
        if volatile:
            sick.append(f"{gpu.name}: {plural(volatile, 'uncorrectable error')} since its last reset")
        if gpu.get("Remapped Rows", "Remapping Failure Occurred") == "Yes":
            sick.append(f"{gpu.name}: a row could not be replaced")
        elif gpu.get("Remapped Rows", "Pending") == "Yes":
            sick.append(f"{gpu.name}: a row waits to be replaced")
        if life and not volatile:
            old.append(f"{gpu.name}: {plural(life, 'uncorrectable error')} in its life")
    if sick:
        means = "bad memory: a run on it may have died, or computed with wrong numbers"
        mend = f"{RESET} (that replaces rows). If a row cannot be replaced, the card has to be changed"
        return failure("; ".join(sick), means, mend)
    if off:
        mend = "on the host: nvidia-smi -e 1, then reset the GPU"
        return warning(f"switched off on {', '.join(off)}", "memory errors go unnoticed", mend)
    if old:
        return warning(
            "; ".join(old), "it has happened before", "watch it: dflashctl doctor, before long runs"
        )
    if not counted:
        return not_known("these cards, or this driver, count no memory errors")
    return ok("no uncorrectable memory error")


def _uncorrectable(section: dict[str, str]) -> int | None:
    numbers = [int(value) for key, value in section.items() if "Uncorrectable" in key and value.isdecimal()]
    return sum(numbers) if numbers else None


def xid(facts: Facts) -> Finding:
    """What the driver wrote into the kernel's log, and what it asks for now.

    A fault of the hardware is over when the GPU is still there and the driver says that it asks for nothing.
    """
    log = mapping(mapping(facts.box).get("kernel_log"))
    hits = [match for line in listed(log.get("lines")) if (match := XID.search(text(line)))]
    asked = [gpu.name for gpu in facts.query.gpus if gpu.get("GPU Recovery Action") not in ("", "None")]
    sound = {_bus(gpu.bus) for gpu in facts.query.gpus if gpu.get("GPU Recovery Action") == "None"}
    grave = [hit for hit in hits if int(hit["code"]) in HARDWARE]
    if asked or any(_bus(hit["bus"]) not in sound for hit in grave):
        said = [f"Xid {code} ({HARDWARE[code]}) at {_where(grave, code)}" for code in _codes(grave)]
        said += [f"the driver asks for a recovery of {', '.join(asked)}"] if asked else []
        return failure("; ".join(said), "that GPU has a fault; a run on it dies or hangs", RESET)
    if grave:
        said = [f"Xid {code} ({HARDWARE[code]}) at {_where(grave, code)}" for code in _codes(grave)]
        means = "that GPU, its link or its memory had a fault; the driver asks for nothing now"
        return warning("; ".join(said), means, "if it comes again: have the card looked at")
    if hits:
        said = [
            f"Xid {code} ({PROGRAM.get(code, 'see NVIDIA’s list')}) at {_where(hits, code)}"
            for code in _codes(hits)
        ]
        means = "mostly a program's fault; the same GPU again and again points to the card"
        return warning("; ".join(said), means, "dflashctl runs, to see which run died at that time")
    if log.get("problem"):
        return not_known(f"the kernel's log could not be read ({text(log.get('problem'))})")
    since = " since the boot" if log.get("from") == "journalctl" else " in what the kernel's log still holds"
    return ok(f"none{since}")


def _codes(hits: list[re.Match[str]]) -> list[int]:
    return sorted({int(hit["code"]) for hit in hits})


def _bus(address: str) -> str:
    """0000:3b:00 of the log and 00000000:3B:00.0 of -q -> 0:3b:00."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain.lstrip('0') or '0'}:{rest.partition('.')[0]}"


def _where(hits: list[re.Match[str]], code: int) -> str:
    buses = [hit["bus"] for hit in hits if int(hit["code"]) == code]
    return ", ".join(f"{bus} ({buses.count(bus)}x)" for bus in dict.fromkeys(buses))


def pcie(facts: Facts) -> Finding:
    """Width now against what card and slot can. The generation falls while a GPU idles, and tells nothing."""
    narrow, seen = [], set()
    for gpu in facts.query.gpus:
        now = gpu.get("PCI", "GPU Link Info", "Link Width", "Current")
        most = gpu.get("PCI", "GPU Link Info", "Link Width", "Max")
        if not (now[:-1].isdecimal() and most[:-1].isdecimal()):
            continue
        generation = gpu.get("PCI", "GPU Link Info", "PCIe Generation", "Max")
        seen.add(f"x{now[:-1]}, generation {generation or '?'}")
        if int(now[:-1]) < int(most[:-1]):
            narrow.append(f"{gpu.name}: x{now[:-1]} of x{most[:-1]}")
    if narrow:
        means = "copies between it and main memory are slower by as much"
        return warning("; ".join(narrow), means, "reseat the card or its riser; look at the slot in the BIOS")
    if not seen:
        return not_known("nvidia-smi -q tells no link width")
    return ok("; ".join(sorted(seen)))


def nvlink(facts: Facts) -> Finding:
    """The fabric's state, then the matrix of who is joined to whom."""
    states = {gpu.name: gpu.get("Fabric", "State") for gpu in facts.query.gpus}
    waiting = [f"{name}: {state}" for name, state in states.items() if state not in ("", "Completed")]
    if waiting:
        means = "CUDA does not start before the fabric is up: `system not yet initialized`"
        mend = "on the host: systemctl enable --now nvidia-fabricmanager (of the driver's version)"
        return failure(f"NVSwitch fabric: {'; '.join(waiting)}", means, mend)
    pairs = parse_topology(mapping(mapping(facts.box).get("topo")))
    if len(facts.query.gpus) < 2:
        return ok("one GPU alone: nothing to join")
    if not pairs:
        return not_known("nvidia-smi topo -m shows no matrix")
    joined = {pair: kind for pair, kind in pairs.items() if kind.startswith("NV")}
    if not joined:
        return ok(f"none: GPUs are joined over PCIe ({', '.join(sorted(set(pairs.values())))})")
    if len(joined) < len(pairs) / 2:
        kinds = ", ".join(sorted(set(joined.values())))
        return ok(f"{len(joined)} of {plural(len(pairs), 'pair')} joined by {kinds}, the others over PCIe")
    most = max(joined.values(), key=list(joined.values()).count)
    odd = [f"{one}-{other}: {kind}" for (one, other), kind in pairs.items() if kind != most]
    if odd:
        return warning(
            f"most pairs are joined by {most}, but not {', '.join(odd[:8])}",
            "hidden states and gradients between those GPUs travel more slowly",
            "on the host: nvidia-smi nvlink -s shows which links are down; Xid 74 above tells since when",
        )
    return ok(f"all {plural(len(pairs), 'pair')} joined by {most}")
