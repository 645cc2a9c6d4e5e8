"""`pct config` as data, as far as GPUs, mounts and users go. Pure. Format: docs/pct.md#config."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEV = re.compile(r"dev\d+")
NODE = re.compile(r"/?dev/(?P<name>nvidia[\w./-]*)")
ALLOW = re.compile(r"lxc\.cgroup(?P<version>2?)\.devices\.allow")


@dataclass(frozen=True)
class Rule:
    """`c 195:* rwm` of lxc.cgroup2.devices.allow. major None: any. `version`: of the control groups."""

    version: int
    major: int | None
    write: bool


@dataclass(frozen=True)
class PctConfig:
    """What the container's configuration says."""

    values: dict[str, str]
    unprivileged: bool
    lock: str
    granted: frozenset[str]
    """Device nodes that devN entries pass through: Proxmox makes the node and its rule at each start."""
    mounted: frozenset[str]
    """Device nodes that lxc.mount.entry binds: the rule has to stand in the configuration."""
    rules: tuple[Rule, ...]


def parse_config(text: str) -> PctConfig:
    """`key: value` lines, then raw `lxc.*` lines."""
    values: dict[str, str] = {}
    granted, mounted, rules = set(), set(), []
    for line in text.splitlines():
        key, _, value = line.partition(":")
        value = value.strip()
        if DEV.fullmatch(key):
            granted |= _nodes(value)
        elif key == "lxc.mount.entry":
            mounted |= _nodes(value.split(" ", 1)[0])
        elif match := ALLOW.fullmatch(key):
            rules.append(_rule(value, 2 if match["version"] else 1))
        values[key] = value
    return PctConfig(
        values=values,
        unprivileged=values.get("unprivileged", "0") not in ("", "0"),
        lock=values.get("lock", ""),
        granted=frozenset(granted),
        mounted=frozenset(mounted),
        rules=tuple(rules),
    )


def _nodes(value: str) -> set[str]:
    return {match["name"].rstrip("/") for match in NODE.finditer(value)}


def _rule(value: str, version: int) -> Rule:
    """`c 195:* rwm`, `a`, `c 508:0 rwm`."""
    match = re.fullmatch(r"c (?P<major>\d+|\*):(?:\d+|\*) (?P<access>[rwm]+)", value)
    if match is None:
        return Rule(version, None if value.split(" ")[0] == "a" else -1, value.split(" ")[0] == "a")
    major = None if match["major"] == "*" else int(match["major"])
    return Rule(version, major, "r" in match["access"] and "w" in match["access"])
