"""`dflashctl gpu`: every GPU, how busy it is, and who holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption

if TYPE_CHECKING:
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.gpus.facts import Facts

app = typer.Typer()


LearnOption = Annotated[
    bool,
    typer.Option("--learn-idle", help="Learn what GPUs without a process show as their idle memory."),
]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")]
EveryOption = Annotated[
    float, typer.Option("--every", min=0.5, max=3600, help="Seconds between the looks of --watch.")
]


@app.command()
def gpu(
    host: HostOption = None,
    watch: WatchOption = False,
    every: EveryOption = 2.0,
    learn_idle: LearnOption = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show the GPUs of a host and who holds them."""
    from dflashctl.cli.eachhost import each_host
    from dflashctl.config import load_hosts
    from dflashctl.errors import UsageError
    from dflashctl.gpus.facts import read_facts
    from dflashctl.remote.factory import open_engine

    machines = load_hosts().hosts(host)
    if watch:
        from dflashctl.cli.gpuwatch import watch_gpus

        if len(machines) > 1 or json or learn_idle:
            raise UsageError(
                "--watch follows one host, and neither prints JSON nor learns",
                next="name one host with -H, and leave --json and --learn-idle out",
            )
        watch_gpus(machines[0], every)

    def one(machine: Any) -> Outcome:
        with open_engine(machine) as engine:
            facts = read_facts(engine)
            learnt = _learn(engine, facts) if learn_idle else {}
        return _show(machine.name, facts, learnt, json)

    each_host(machines, one, json=json, schema="dflashctl.gpu/1")


def _learn(engine: Any, facts: Facts) -> dict[str, int]:
    """{uuid: MiB} of the GPUs that nobody holds, kept beside the runs."""
    from dflashctl.remote.agent_call import call

    idle = {
        each.uuid: each.reading.memory_used_mib
        for each in facts.box.gpus
        if each.readable and not each.holders and each.reading.memory_used_mib is not None
    }
    call(engine, "learn_idle", {"state_dir": engine.host.state_dir, "gpus": idle}, timeout_s=30)
    return idle


def _show(host: str, facts: Facts, learnt: dict[str, int], json: bool) -> Outcome:
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.cli.gputable import print_gpus
    from dflashctl.errors import GpusBusy
    from dflashctl.gpus.show import as_json
    from dflashctl.render.table import say
    from dflashctl.render.text import plural

    box = facts.box
    error = None
    if box.problem:
        error = GpusBusy(
            f"the GPUs cannot be read: {box.problem}", where=host, next="dflashctl doctor says why"
        )
    if not json and error is None:
        idle = sum(each.idle for each in box.gpus)
        say(f"{host} · {plural(len(box.gpus), 'GPU')} · {idle} idle")
        print_gpus(box)
        if learnt:
            say(f"learnt the idle level of {plural(len(learnt), 'GPU')}")
    return Outcome({"host": host, **as_json(box), "learnt": learnt}, error)
