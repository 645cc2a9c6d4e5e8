"""How stacks are shown: a process, its threads, their frames; those that had not moved are marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflashctl.render import table
from dflashctl.render.text import age, line, plural
from dflashctl.runs.stacks import Process, Stacks, Thread

if TYPE_CHECKING:
    from rich.console import RenderableType

MARK = "="
FRAMES_SHOWN = 40


def shown(stacks: Stacks) -> RenderableType:
    """Everything, the innermost frame of each thread first."""
    from rich.console import Group

    head = f"{stacks.tag or stacks.id} · {plural(len(stacks.processes), 'process', 'processes')}"
    legend = f"two looks, {age(stacks.again_s)} apart; {MARK} marks frames on the same line in both"
    parts: list[RenderableType] = [table.cell(line(f"{stacks.host} · {head}"), "bold")]
    if any(each.how for each in stacks.processes):
        parts.append(table.cell(legend, "dim"))
    for process in stacks.processes:
        parts += _process(process)
    if stacks.left_out:
        left_out = plural(stacks.left_out, "smaller process", "smaller processes")
        parts.append(table.cell(f"{left_out} left out"))
    parts += [table.cell(line(note), "dim") for note in stacks.notes]
    return Group(*parts)


def _process(process: Process) -> list[RenderableType]:
    where = f" in {process.wchan}" if process.wchan else ""
    how = f", {process.how}" if process.how else ""
    title = f"pid {process.pid}  {process.command}  (state {process.state}{where}{how})"
    parts: list[RenderableType] = [table.cell("\n" + line(title), "bold")]
    for thread in process.threads:
        parts.append(table.cell(line(f"  {thread.name}{_remark(thread)}")))
        for number, frame in enumerate(thread.frames[:FRAMES_SHOWN]):
            stood = number >= len(thread.frames) - thread.same
            parts.append(table.cell(line(f"    {MARK if stood else ' '} {frame.words}")))
        if len(thread.frames) > FRAMES_SHOWN:
            parts.append(table.cell(f"      and {len(thread.frames) - FRAMES_SHOWN} more"))
    if not process.threads:
        parts += [table.cell(line(f"  no stacks: {problem}")) for problem in process.problems]
        if process.thread_names:
            names = dict.fromkeys(process.thread_names)
            parts.append(table.cell(line(f"  threads: {', '.join(list(names)[:20])}")))
    return parts


def _remark(thread: Thread) -> str:
    said = [word for word, so in (("has the GIL", thread.holds_gil), ("new", thread.is_new)) if so]
    if thread.unmoved:
        said.append("has not moved")
    elif not thread.frames:
        said.append("no Python frame")
    return f" ({', '.join(said)})" if said else ""


def document(stacks: Stacks) -> dict[str, Any]:
    """Schema dflashctl.stacks/1."""
    return {
        "host": stacks.host,
        "id": stacks.id,
        "tag": stacks.tag or None,
        "again_s": stacks.again_s,
        "left_out": stacks.left_out,
        "notes": list(stacks.notes),
        "processes": [
            {
                "pid": each.pid,
                "command": each.command,
                "state": each.state,
                "wchan": each.wchan or None,
                "how": each.how or None,
                "problems": list(each.problems),
                "threads": [
                    {
                        "name": thread.name,
                        "unmoved": thread.unmoved,
                        "holds_gil": thread.holds_gil,
                        "frames": [
                            {
                                "function": frame.function,
                                "file": frame.file,
                                "line": frame.line,
                                "same": number >= len(thread.frames) - thread.same,
                            }
                            for number, frame in enumerate(thread.frames)
                        ],
                    }
                    for thread in each.threads
                ],
            }
            for each in stacks.processes
        ],
    }
