"""`dflashctl kill --pid PID`: end one process inside that belongs to no run, after showing who it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflashctl.cli.ask import ask
from dflashctl.cli.eachhost import Outcome
from dflashctl.errors import NotOurs
from dflashctl.gpus.facts import ask_host, judge_facts
from dflashctl.gpus.idle import Box
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine
from dflashctl.render.table import say
from dflashctl.render.text import clip, duration, size
from dflashctl.runs.stop import process_words

GRACE_S = 10.0
SLACK_S = 30.0


def kill_pid(
    engine: Engine, pid: int, *, yes: bool, dry_run: bool, grace_s: float | None, json: bool
) -> Outcome:
    """Show, ask, end exactly the process that was shown. Exit 9 when it would not go."""
    host = engine.host.name
    request = {"pid": pid, "state_dir": engine.host.state_dir}
    process = call(engine, "look_process", request, timeout_s=SLACK_S)["process"]
    outside = ask_host(engine, 1)
    box = judge_facts(engine.host, outside, {"runs": [], "pidns": process["pidns"]})
    gpus = gpus_of(process, box)
    document = {"host": host, "process": process, "gpus": gpus, "dry_run": dry_run}
    if not json:
        show_process(host, process, gpus)
    if dry_run:
        return Outcome(document)
    if not yes:
        ask("End this process?", where=host, instead=f"dflashctl kill --pid {pid} --yes")
    patience_s = GRACE_S if grace_s is None else grace_s
    wish = {**request, "start": process["start"], "grace_s": patience_s}
    answer = call(engine, "stop_process", wish, timeout_s=patience_s + SLACK_S)
    document |= {"outcome": answer["outcome"], "signalled": answer["signalled"]}
    if answer["outcome"] == "survivor":
        return Outcome(document, NotOurs(f"cannot be killed: {process_words(answer['process'])}", where=host))
    if not json:
        by = f" ({', '.join(answer['signalled'])})" if answer["signalled"] else ""
        say(f"pid {pid} is gone{by}")
    return Outcome(document)


def gpus_of(process: Mapping[str, Any], box: Box) -> list[int]:
    """Indices of the GPUs that the driver says it holds."""
    return [
        gpu.index
        for gpu in box.gpus
        if any(one.inner_pid == process["nspid"] and one.kind in ("container", "host") for one in gpu.holders)
    ]


def show_process(host: str, process: Mapping[str, Any], gpus: Sequence[int]) -> None:
    age = "?" if process.get("age_s") is None else duration(process["age_s"])
    say(f"{host} · pid {process['pid']} inside, of no run")
    say(f"  command  {clip(' '.join(process['cmdline']) or process['comm'], 160)}")
    say(f"  user     {process['user']}, for {age}, state {process['state']}, {size(process['rss_bytes'])}")
    say(f"  GPUs     {', '.join(map(str, gpus)) or '-'}")
