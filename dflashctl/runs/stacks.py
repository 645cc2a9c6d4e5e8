"""Where a run's processes stand in their code: two looks by the first way that works, compared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflashctl.errors import DflashError
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine
from dflashctl.runs.facts import listed, mapping, text, whole

AGAIN_S = 3.0
SLACK_S = 60.0
NOT_PYTHON = "it runs no Python that py-spy knows"


@dataclass(frozen=True)
class Frame:
    function: str
    file: str
    line: int | None

    @property
    def words(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{self.function} ({where})"


@dataclass(frozen=True)
class Thread:
    """One thread at the second look; `frames` innermost first. `same`: how many of them, counted from the
    outermost, stood on the very line they stood on at the first look."""

    key: str
    name: str
    frames: tuple[Frame, ...]
    same: int = 0
    holds_gil: bool = False
    is_new: bool = False

    @property
    def unmoved(self) -> bool:
        return bool(self.frames) and self.same == len(self.frames)


@dataclass(frozen=True)
class Process:
    pid: int
    start: int
    command: str
    state: str
    wchan: str
    threads: tuple[Thread, ...] = ()
    how: str = ""
    """`py-spy`, `py-spy on the host` or `faulthandler`; empty where none of them worked."""
    problems: tuple[str, ...] = ()
    thread_names: tuple[str, ...] = ()
    """As the kernel has them, for a process without stacks."""


@dataclass(frozen=True)
class Stacks:
    host: str
    id: str
    tag: str
    again_s: float
    processes: tuple[Process, ...]
    left_out: int = 0
    notes: tuple[str, ...] = field(default_factory=tuple)


def read_stacks(engine: Engine, tag: str | None, *, again_s: float = AGAIN_S) -> Stacks:
    """All ways in their order, each for what is still missing. Raises NotFound for a run that has ended."""
    request: dict[str, Any] = {
        "state_dir": engine.host.state_dir,
        "tag": tag,
        "python": engine.host.python,
        "again_s": again_s,
    }
    timeout_s = again_s + SLACK_S
    answer = call(engine, "stacks", {**request, "method": "py-spy"}, timeout_s=timeout_s)
    found = [from_answer(mapping(each), "py-spy") for each in listed(answer.get("processes"))]
    notes: list[str] = []
    by_id = {**request, "tag": None, "id": text(answer.get("id"))}
    if engine.has_separate_host and missing(found):
        found, note = _from_host(engine, found, answer.get("pidns"), again_s)
        notes += [note] if note else []
    if missing(found):
        only = [{"pid": each.pid, "start": each.start} for each in missing(found)]
        more = call(engine, "stacks", {**by_id, "method": "faulthandler", "only": only}, timeout_s=timeout_s)
        asked = [from_answer(mapping(each), "faulthandler") for each in listed(more.get("processes"))]
        found = merged(found, {(each.pid, each.start): each for each in asked})
    return Stacks(
        engine.host.name,
        text(answer.get("id")),
        text(answer.get("tag")),
        again_s,
        tuple(found),
        whole(answer.get("left_out")) or 0,
        tuple(notes),
    )


def _from_host(engine: Engine, found: list[Process], pidns: Any, again_s: float) -> tuple[list[Process], str]:
    """The missing ones, seen from outside; a host that cannot is a note, no error."""
    wanted = [{"pid": each.pid, "start": each.start, "pidns": pidns} for each in missing(found)]
    request = {"wanted": wanted, "again_s": again_s}
    try:
        answer = call(engine, "host_stacks", request, where="host", timeout_s=again_s + SLACK_S)
    except DflashError as error:
        return found, f"the host could not be asked: {error.what.splitlines()[0]}"
    seen = {}
    for each in missing(found):
        looks = mapping(answer.get("looks")).get(f"{each.pid}:{each.start}")
        if looks is not None:
            raw = {"pid": each.pid, "start": each.start, "looks": looks}
            seen[each.pid, each.start] = from_answer(raw, "py-spy on the host")
    return merged(found, seen), text(answer.get("problem"))


def missing(found: Iterable[Process]) -> list[Process]:
    """Those without stacks that another way may have: a program that is no Python has none at all."""
    return [each for each in found if not each.how and NOT_PYTHON not in each.problems]


def merged(found: list[Process], more: Mapping[tuple[int, int], Process]) -> list[Process]:
    """Stacks from `more` where `found` has none; the reasons are kept together."""
    result = []
    for each in found:
        other = more.get((each.pid, each.start))
        if each.how or other is None:
            result.append(each)
            continue
        result.append(
            Process(
                each.pid, each.start, each.command, each.state, each.wchan, other.threads, other.how,
                tuple(dict.fromkeys((*each.problems, *other.problems))), each.thread_names,
            )
        )  # fmt: skip
    return result


def from_answer(raw: Mapping[str, Any], how: str) -> Process:
    """A process of an answer, its two looks compared. Pure."""
    looks = [mapping(each) for each in listed(raw.get("looks"))]
    problems = tuple(dict.fromkeys(text(each.get("problem")) for each in looks if each.get("problem")))
    read = [parse(text(each.get("text"))) for each in looks if each.get("text")]
    threads = compared(read[0], read[-1]) if len(read) > 1 else tuple(read[0]) if read else ()
    words = [text(each) for each in listed(raw.get("cmdline"))]
    return Process(
        pid=whole(raw.get("pid")) or 0,
        start=whole(raw.get("start")) or 0,
        command=" ".join(words) or text(raw.get("comm")),
        state=text(raw.get("state")),
        wchan=text(raw.get("wchan")),
        threads=threads,
        how=how if threads else "",
        problems=problems or (() if threads else ("its stacks could not be read",)),
        thread_names=tuple(text(each) for each in listed(raw.get("threads"))),
    )


def compared(first: list[Thread], second: list[Thread]) -> tuple[Thread, ...]:
    """The threads of the second look, with what had not moved since the first."""
    before = {each.key: each for each in first}
    result = []
    for each in second:
        earlier = before.get(each.key)
        same = common_outer(earlier.frames, each.frames) if earlier else 0
        result.append(Thread(each.key, each.name, each.frames, same, each.holds_gil, is_new=earlier is None))
    return tuple(result)


def common_outer(first: tuple[Frame, ...], second: tuple[Frame, ...]) -> int:
    """How many frames, from the outermost inwards, are the same. Another depth inside is a move."""
    same = 0
    for one, other in zip(reversed(first), reversed(second), strict=False):
        if one != other:
            break
        same += 1
    return min(same, len(second) - 1) if same == len(second) < len(first) else same


def parse(dump: str) -> list[Thread]:
    """py-spy's JSON, or the text of faulthandler. Anything else: []."""
    if dump.lstrip().startswith("["):
        try:
            return [_py_spy_thread(mapping(each)) for each in json.loads(dump)]
        except (ValueError, TypeError, RecursionError):
            return []
    return parse_faulthandler(dump)


def _py_spy_thread(raw: Mapping[str, Any]) -> Thread:
    key = str(raw.get("os_thread_id") or raw.get("thread_id"))
    frames = [
        Frame(text(each.get("name")), text(each.get("filename")), whole(each.get("line")))
        for each in map(mapping, listed(raw.get("frames")))
    ]
    name = text(raw.get("thread_name")) or f"thread {key}"
    return Thread(key, name, tuple(frames), holds_gil=raw.get("owns_gil") is True)


_HEADER = re.compile(
    r"(?P<current>Current t|T)hread (?P<id>0x[0-9a-f]+)(?: \[(?P<name>.*)\])? \(most recent call"
)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')


def parse_faulthandler(dump: str) -> list[Thread]:
    """Blocks of `Thread 0x… (most recent call first):` and `  File "…", line 3 in f` (Python's
    faulthandler.c; 3.14 adds the thread's name in brackets)."""
    threads: list[tuple[str, str, bool, list[Frame]]] = []
    for line in dump.splitlines():
        header, frame = _HEADER.match(line), _FRAME.match(line)
        if header:
            name = header["name"] or f"thread {header['id']}"
            threads.append((header["id"], name, header["current"] != "T", []))
        elif frame and threads:
            number = int(frame["line"]) if frame["line"].isdecimal() else None
            threads[-1][3].append(Frame(frame["function"], frame["file"], number))
    return [Thread(key, name, tuple(frames), holds_gil=gil) for key, name, gil, frames in threads]
