"""What `kill` prints: targets, progress, who would not go, and the GPUs afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dflashctl.errors import DflashError, NotFound
from dflashctl.remote.engine import Engine
from dflashctl.render.hints import complete
from dflashctl.render.table import say, show, warn
from dflashctl.render.text import duration, plural, ranges
from dflashctl.runs.ending import end_words
from dflashctl.runs.stop import Freed, process_words


def show_targets(
    host: str, tag: str | None, targets: Sequence[Mapping[str, Any]], *, quiet: bool
) -> dict[str, Any]:
    """--dry-run. Raises NotFound when the named run is not live."""
    if not targets and tag is not None:
        raise NotFound(f"no live run {tag}", where=host, next="dflashctl runs")
    for run in targets if not quiet else ():
        pids = [str(member["pid"]) for member in run["family"]]
        gpus = ranges([gpu["index"] for gpu in run["gpus"]])
        say(f"would end {run['tag'] or 'run'} ({run['id']}) on GPUs {gpus}: pids {', '.join(pids) or '-'}")
    if not quiet:
        say("nothing was signalled (--dry-run)" if targets else "no run is live")
    return {"host": host, "dry_run": True, "runs": [dict(run) for run in targets]}


STACKS_AGAIN_S = 1.0
"""A person who kills has looked at it before; this is for the record."""


def show_stacks(engine: Engine, run: Mapping[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Where its processes stand. What cannot be read is no reason not to kill. Returns the JSON document."""
    from dflashctl.runs.stacks import read_stacks
    from dflashctl.views import stacks as view

    try:
        found = read_stacks(engine, str(run["tag"] or run["id"]), again_s=STACKS_AGAIN_S)
    except DflashError as error:
        warn(f"warning: no stacks of {run['tag'] or run['id']}: {error.what}")
        return {"run": run["id"], "problem": error.what}
    if not quiet:
        show(view.shown(found))
    return view.document(found)


def show_event(event: Mapping[str, Any]) -> None:
    """Progress from inside: who was signalled."""
    pids = ", ".join(str(pid) for pid in event.get("pids", ()))
    say(f"  {event.get('signalled')} to pid {pids}")


def show_interrupted(name: str, targets: Sequence[Mapping[str, Any]]) -> None:
    """Ctrl-C: the supervisor carries on with what it was asked for."""
    tag = next((run["tag"] for run in targets if run["id"] == name), None) or name
    warn(complete(f"the end of {tag} may go on over there: dflashctl status {tag}"))


def show_stopped(host: str, answer: Mapping[str, Any], *, quiet: bool) -> None:
    """One run's end."""
    name = f"{answer['tag']} ({answer['id']})" if answer["tag"] else f"run {answer['id']}"
    if not quiet:
        if answer["outcome"] == "already_ended":
            how = end_words(answer["exit"]) if answer["exit"] else "it went without a trace"
            say(f"{host} · {name} has already ended: {how}")
        elif answer["outcome"] == "killed":
            forced = answer["signalled"]["KILL"]
            how = f", {plural(len(forced), 'process', 'processes')} by SIGKILL" if forced else ""
            say(f"{host} · {name} ended in {duration(answer['seconds'])}{how}")
    for problem in answer["problems"]:
        warn(f"warning: {problem}")
    for zombie in answer["zombies"]:
        warn(
            f"zombie: {process_words(zombie)}: it holds nothing, its parent {zombie['ppid']} must collect it"
        )


def show_freed(
    host: str, stopped: Sequence[Mapping[str, Any]], freed: Sequence[Freed], *, quiet: bool
) -> dict[str, Any]:
    """The GPUs of the killed runs. Returns the JSON document."""
    if not quiet:
        free = [one.index for one in freed if one.free]
        if free and len(free) == len(freed):
            say(f"{plural(len(free), 'GPU')} free again: {ranges(free)}")
        else:
            for one in freed:
                say(f"  GPU {one.index}: {one.words}")
        if not stopped:
            say(f"{host} · no run is live")
    return {"host": host, "runs": list(stopped), "gpus": [asdict(one) | {"fine": one.fine} for one in freed]}
