"""What a look at torch has found, as data. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Origin = Literal["default", "environment", "set", "alias"]


@dataclass(frozen=True)
class Option:
    """An option of one of torch's configuration modules. `variables`: what can set it from outside."""

    module: str
    name: str
    value: Any
    default: Any
    origin: Origin
    variables: tuple[str, ...] = ()
    alias: str | None = None

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"

    def came_from(self, given: Mapping[str, str]) -> str:
        """In words; `given` are the variables that are set."""
        if self.origin == "environment":
            return " ".join(name for name in self.variables if name in given) or "the environment"
        if self.origin == "alias":
            return f"alias of {self.alias}"
        return {"default": "default", "set": "set by the program"}[self.origin]


@dataclass(frozen=True)
class Variable:
    """A variable that is set. known: read (torch or triton reads it) | named (its name stands in one of their
    files, but no read was found) | unread."""

    name: str
    value: str
    known: Literal["read", "named", "unread"]
    named_in: tuple[str, ...] = ()


@dataclass(frozen=True)
class Readable:
    """A variable that torch or triton reads: which options come from it, and files that read it (not all)."""

    options: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class TorchConfig:
    torch: str
    options: tuple[Option, ...]
    modes: Mapping[str, Mapping[str, Any]]
    readable: Mapping[str, Readable]
    given: tuple[Variable, ...]
    problems: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, str]:
        """The variables that are set, by name."""
        return {each.name: each.value for each in self.given}

    def chosen(self, pattern: str | None, *, diff_default: bool) -> tuple[Option, ...]:
        """Options whose full name or one of whose variables matches, case aside; with `diff_default` only
        those that are not what they would be by themselves. Raises re.error."""
        look = re.compile(pattern or "", re.IGNORECASE)
        return tuple(
            option
            for option in self.options
            if any(look.search(text) for text in (option.full_name, *option.variables))
            and not (diff_default and option.value == option.default)
        )

    def mistaken(self) -> list[tuple[Variable, tuple[str, ...], tuple[str, ...]]]:
        """Variables that are set and read by nobody, each with the nearest names that are read, and with the
        options that it seems to mean."""
        return [
            (each, nearest(each.name, self.readable), self._meant(each.name))
            for each in self.given
            if each.known == "unread"
        ]

    def _meant(self, variable: str) -> tuple[str, ...]:
        """TORCHINDUCTOR_CUDAGRAPH_TREES -> torch._inductor.config.triton.cudagraph_trees."""
        words = variable.lower().split("_")
        tails = {"_".join(words[start:]) for start in range(1, len(words))}
        found = [each for each in self.options if each.name.rpartition(".")[2].lower() in tails]
        longest = max((len(each.name.rpartition(".")[2]) for each in found), default=0)
        return tuple(
            each.full_name for each in found if len(each.name.rpartition(".")[2]) == longest and longest > 5
        )


def nearest(name: str, known: Mapping[str, Any], count: int = 3) -> tuple[str, ...]:
    """The most similar names, most similar first."""
    return tuple(difflib.get_close_matches(name, list(known), n=count, cutoff=0.8))


@dataclass(frozen=True)
class Facts:
    """The answer about one subject. `machine` and `built` are flat: {name: value}."""

    subject: str
    config: TorchConfig | None
    machine: Mapping[str, Any] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read(subject: str, answer: Mapping[str, Any]) -> Facts:
    """The answer of the operation `inspect`. Of a run its own notes count, where it has them: they tell of
    the day on which it ran."""
    run = answer.get("run")
    told = answer["facts"]
    machine = dict(answer["machine"])
    notes: list[str] = []
    if run is not None:
        then = run.get("environment")
        if then is None:
            notes.append("the run wrote nothing down about its machine; what is said of it is of today")
        else:
            machine = dict(then)
        notes.append("options: what its environment gives in today's torch, before the program sets any")
    packages = dict(machine.pop("packages", None) or {})
    machine.pop("version", None)
    built = told.get("env")
    if built is not None:
        machine |= {f"torch {name}" if name != "torch" else "torch": value for name, value in built.items()}
    now = (built or {}).get("torch") or (told.get("inductor") or {}).get("torch")
    if now and "torch" in packages and packages["torch"] != now:
        notes.append(f"the run had torch {packages['torch']}, there is torch {now} now")
    config = told.get("inductor")
    return Facts(subject, read_config(config) if config else None, machine, packages, tuple(notes))


def read_config(told: Mapping[str, Any]) -> TorchConfig:
    return TorchConfig(
        torch=str(told["torch"]),
        options=tuple(
            Option(
                each["module"],
                each["name"],
                each["value"],
                each["default"],
                each["origin"],
                tuple(each["variables"]),
                each["alias"],
            )
            for each in told["options"]
        ),
        modes=told["modes"],
        readable={
            name: Readable(tuple(each["options"]), tuple(each["files"]))
            for name, each in sorted(told["variables"].items())
        },
        given=tuple(
            Variable(each["name"], each["value"], each["known"], tuple(each["named_in"]))
            for each in told["set"]
        ),
        problems=tuple(told["problems"]),
    )
