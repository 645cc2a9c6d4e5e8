"""Everything that was read about one box: what ssh showed, and the answers of both agent operations.

The answers come from the other side, so no value is trusted to have its type (runs.facts has the readers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from dflashctl.config.hosts import Host
from dflashctl.doctor.pctconfig import PctConfig, parse_config
from dflashctl.doctor.smiquery import Query, parse_query
from dflashctl.remote import freezer
from dflashctl.runs.facts import listed, mapping, text, whole

Trouble = Literal["", "key unknown", "key changed", "not let in", "setting", "no contact"]


@dataclass(frozen=True)
class Contact:
    """The ssh connection. `trouble` says at which step it failed, `what` and `next` in words."""

    trouble: Trouble = ""
    what: str = ""
    next: str = ""
    user: str = ""
    address: str = ""
    jumps: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    """Key files that are offered, or "agent"."""
    open_keys: tuple[str, ...] = ()
    """Those that others on this machine may read."""
    host_key: str = ""
    """Type and fingerprint of the stored key, and where it is stored."""
    connect_s: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True)
class Clock:
    """A wall clock over there, read between two moments of this machine's: `sent` and `received`."""

    there: float
    sent: float
    received: float

    @property
    def offset_s(self) -> float:
        """By how much it certainly differs: above zero when it is ahead. Zero when it may be right."""
        ahead, behind = self.there - self.received, self.there - self.sent
        return ahead if ahead > 0 else behind if behind < 0 else 0.0


@dataclass(frozen=True)
class Facts:
    """One box. `box`: the machine that owns the GPUs, `inside`: where runs live; None: see the problem."""

    host: Host
    contact: Contact | None = None
    """None for engine local."""
    box: Mapping[str, Any] | None = None
    box_problem: str = ""
    box_next: str = ""
    """What would mend that, as it stands in brackets at its end."""
    inside: Mapping[str, Any] | None = None
    inside_problem: str = ""
    inside_asked: bool = True
    """Whether it was worth asking: not where the container is stopped, frozen or out of reach."""
    clocks: Mapping[str, Clock] = field(default_factory=dict)
    """"host" and "inside"."""

    # --- the machine that owns the GPUs ---

    @property
    def simulated(self) -> bool:
        """The GPUs are the lab's: plain files, no driver, no device numbers."""
        return mapping(self.box).get("simulated") is True

    @cached_property
    def query(self) -> Query:
        """`nvidia-smi -q` there."""
        return parse_query(mapping(mapping(self.box).get("smi")))

    @property
    def majors(self) -> dict[str, int]:
        found = mapping(mapping(self.box).get("majors"))
        return {name: number for name, each in found.items() if (number := whole(each)) is not None}

    @property
    def host_nodes(self) -> list[Mapping[str, Any]]:
        return [mapping(each) for each in listed(mapping(self.box).get("nodes"))]

    # --- the container, from its host ---

    @property
    def container(self) -> Mapping[str, Any]:
        return mapping(mapping(self.box).get("container"))

    @cached_property
    def config(self) -> PctConfig | None:
        """`pct config`; None where it could not be read."""
        reading = mapping(self.container.get("config"))
        return parse_config(text(reading.get("stdout"))) if reading.get("exit") == 0 else None

    @property
    def init(self) -> Mapping[str, Any]:
        """Its first process, as the host sees it; empty when it does not run."""
        return mapping(self.container.get("init"))

    @property
    def uid_map(self) -> list[tuple[int, int, int]]:
        """Of its first process: (first uid inside, the same outside, how many)."""
        rows = [row.split() for row in text(self.init.get("uid_map")).splitlines()]
        good = [row for row in rows if len(row) == 3 and "".join(row).isdecimal()]
        return [(int(inside), int(outside), int(count)) for inside, outside, count in good]

    @property
    def running(self) -> bool | None:
        """Whether `pct status` says so; None where it said nothing that can be used."""
        reading = mapping(self.container.get("status"))
        lines = text(reading.get("stdout")).splitlines()
        if reading.get("exit") != 0 or not any(line.startswith("status: ") for line in lines):
            return None
        return "status: running" in lines

    @property
    def frozen(self) -> bool:
        """By the same signs as everywhere: the first process's state, and the words of its freezers."""
        said = f"{text(self.init.get('stat')).rstrip()}\n{text(self.init.get('freezer'))}".encode()
        return freezer.is_stopped(said) or freezer.says_frozen(said)

    # --- inside ---

    @property
    def interpreter(self) -> Mapping[str, Any]:
        """Whether the Python of hosts.yaml is there, and another one, as the machine around it sees:
        {"exists", "broken", "other"}; empty where that could not be seen."""
        return mapping((mapping(self.box) if self.host.container is None else self.init).get("python"))

    @property
    def place(self) -> Mapping[str, Any]:
        """Folders, nodes, libraries, memory: as seen from inside, else as the host sees them; empty when
        neither could look."""
        return mapping(mapping(self.inside).get("place")) or mapping(self.init.get("place"))

    @property
    def nodes(self) -> list[Mapping[str, Any]]:
        return [mapping(each) for each in listed(self.place.get("nodes"))]

    @property
    def torch(self) -> Mapping[str, Any]:
        """The child's answer: {"said", "problem", "stderr", "took_s"}; empty when none was asked."""
        return mapping(mapping(self.inside).get("torch"))

    def said(self, step: str) -> Mapping[str, Any]:
        """What the child told at a step: packages, compiler, cuda, torch."""
        return mapping(mapping(self.torch.get("said")).get(step))
