"""Ask a host about its torch: one remote command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflashctl.config.hosts import Host
from dflashctl.config.recipe import Launch, Recipe
from dflashctl.config.resolve import ResolvedRecipe, resolve
from dflashctl.inspect.facts import Facts, read
from dflashctl.inspect.sources import package_files
from dflashctl.inspect.subject import Subject
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine
from dflashctl.runs.launch import OURS, environment, placeholder_values

DEADLINE_S = 300.0
"""Importing torch from a cold disk takes a minute, on a machine that is busy with other things several."""

SLACK_S = 20.0
SENT_AS = "dflash_inspect"


def look(
    engine: Engine,
    subject: Subject,
    sections: Sequence[str],
    *,
    recipe: ResolvedRecipe | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> Facts:
    """`sections`: inductor, env. Raises NotFound (no such run), UsageError (no torch there), Unreachable."""
    request = {
        "files": package_files("dflashctl.inspect.programs", sent_as=SENT_AS),
        "module": f"{SENT_AS}.torch_facts",
        "argv": list(sections),
        "env": run_environment(engine.host, recipe),
        "deadline_s": DEADLINE_S,
        "state_dir": engine.host.state_dir,
        "run": subject.run,
    }

    def heard(event: dict[str, Any]) -> None:
        if "progress" in event:
            progress(f"{subject.name}: {event['progress']}")

    progress(f"{subject.name}: asking")
    answer = call(engine, "inspect", request, timeout_s=DEADLINE_S + SLACK_S, on_event=heard)
    return read(subject.name, answer)


def run_environment(host: Host, recipe: ResolvedRecipe | None) -> dict[str, str]:
    """What a run of `recipe` would get from hosts.yaml and recipe, without what only a launch can know."""
    resolved = recipe or resolve(
        Recipe(version=1, name="inspect", launch=Launch(command=["python"])), "inspect"
    )
    values = placeholder_values(
        host, resolved, "RUN", f"{host.state_dir}/runs/RUN", f"{host.code_root}/current"
    )
    made = environment(host, resolved, values, (), None)
    return {name: value for name, value in made.items() if name not in OURS}
