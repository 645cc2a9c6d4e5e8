"""What a probe sends and starts: its files and the run that they are. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflashctl.config.names import check_value, check_variable
from dflashctl.config.recipe import Launch, Observe, Recipe
from dflashctl.config.resolve import ResolvedRecipe, resolve
from dflashctl.errors import GpusBusy, UsageError
from dflashctl.gpus.choose import NoSuchGpus, Wish, choose
from dflashctl.gpus.idle import Box, Gpu
from dflashctl.inspect.sources import package_files
from dflashctl.probe.cases import ALL, Case, Probe

SENT_AS = "dflash_probe"
FILES = "{run_dir}/files"
SNIPPET = "snippet"
GRACE_S = 10.0

STACKS_AND_KILL_S = 20.0
"""What the driver takes to end a program that is over its deadline."""

LOOK_S = 120.0
START_AND_END_S = 60.0


@dataclass(frozen=True)
class Snippet:
    """A person's own program."""

    name: str
    text: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    """A probe or a snippet, ready to be launched on whatever GPUs there will be."""

    tag: str
    cases: tuple[Case, ...]
    deadline_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    probe: Probe | None = None
    snippet: Snippet | None = None

    @property
    def total_s(self) -> float:
        """The most that it can take from start to end."""
        looking = LOOK_S if self.probe is not None else 0.0
        return looking + len(self.cases) * (self.deadline_s + STACKS_AND_KILL_S) + START_AND_END_S

    def recipe(self) -> ResolvedRecipe:
        """The run's recipe; it names the driver, and the plan says the rest."""
        command = ["python", "-u", f"{FILES}/{SENT_AS}/driver.py", f"{FILES}/plan.json"]
        log = "{log_dir}/{tag}.log" if self.tag.startswith("probe") else "{log_dir}/probe_{tag}.log"
        launch = Launch(command=command, log=log, env=dict(self.env), grace_s=GRACE_S)
        return resolve(Recipe(version=1, name="probe", launch=launch, observe=Observe()), self.tag)

    def files(self, run_dir: str) -> dict[str, str]:
        """{path below <run_dir>/files: text}."""
        folder = f"{run_dir}/files"
        plan: dict[str, Any] = {
            "answers": folder,
            "results": f"{run_dir}/probe.jsonl",
            "alone": self.snippet is not None,
            "look": f"{SENT_AS}.look" if self.probe else None,
            "pythonpath": folder if self.probe else None,
            "cases": [self._entry(case, run_dir) for case in self.cases],
        }
        sent = package_files("dflashctl.probe.programs", sent_as=SENT_AS)
        if self.snippet is not None:
            sent = {
                f"{SENT_AS}/driver.py": sent[f"{SENT_AS}/driver.py"],
                self.snippet.name: self.snippet.text,
            }
        return {**sent, "plan.json": json.dumps(plan, indent=1)}

    def _entry(self, case: Case, run_dir: str) -> dict[str, Any]:
        cache = f"{run_dir}/compile_cache/{case.name}"
        if self.snippet is not None:
            argv, env = [f"{run_dir}/files/{self.snippet.name}", *self.snippet.arguments], {}
        else:
            assert self.probe is not None
            argv = ["-m", f"{SENT_AS}.{self.probe.name}", case.name]
            # Each compiles for itself: a kernel that another has built would hide a race.
            env = {
                "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
                "TRITON_CACHE_DIR": f"{cache}/triton",
                **case.env,
            }
        return {
            "name": case.name,
            "argv": argv,
            "env": env,
            "deadline_s": self.deadline_s,
            "needs": {"gpus": case.gpus, "compiler": case.compiler},
        }


def of_probe(
    probe: Probe, names: str | None, *, tag: str | None, deadline_s: float, env: Mapping[str, str]
) -> Work:
    """Raises UsageError for an unknown case."""
    return Work(tag or f"probe-{probe.name}", probe.chosen(names), deadline_s, env, probe=probe)


def of_file(
    name: str,
    text: str,
    arguments: Sequence[str],
    *,
    tag: str | None,
    deadline_s: float,
    env: Mapping[str, str],
) -> Work:
    """`name`: of the file, without its folder. It needs what it needs; we ask for nothing."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip("._-") or "snippet.py"
    safe = "snippet_" + safe if safe == "plan.json" else safe
    stem = safe.removesuffix(".py")[:50]
    return Work(
        tag or f"probe-{stem}",
        (Case(SNIPPET, f"{name}", gpus=0),),
        deadline_s,
        env,
        snippet=Snippet(safe, text, tuple(arguments)),
    )


def variables(given: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` of --env. Raises UsageError."""
    found = {}
    for word in given:
        name, sign, value = word.partition("=")
        try:
            found[check_variable(name)] = check_value(value)
        except ValueError as error:
            raise UsageError(f"--env {name}: {error}") from None
        if not sign:
            raise UsageError(f"--env {word!r} has no value", next=f"write --env {word}=VALUE")
    return found


def gpus_for(
    box: Box, outside: Mapping[str, Any], wish: Wish | None, want: int
) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs for a probe, and why there are none. `wish` is the person's, None for the probe's own `want`
    (ALL: every idle one): as many of that as are idle. A machine without any nvidia-smi has no GPU to wait
    for; what cannot be read is never taken. Raises GpusBusy.
    """
    if wish is None and box.problem and no_driver(outside):
        return (), f"no GPU is there: {box.problem}"
    idle = sum(gpu.idle for gpu in box.gpus)
    count = idle if want == ALL else min(want, idle)
    try:
        return choose(box, wish or Wish(count=max(count, 1))), ""
    except NoSuchGpus:
        raise
    except GpusBusy as error:
        hint = "wait or kill what holds them, or choose another with --gpu; without one: --gpus none"
        raise GpusBusy(error.what, next=hint) from None


def no_driver(outside: Mapping[str, Any]) -> bool:
    """Has the machine no nvidia-smi at all (of host_facts)?"""
    samples = outside.get("samples") or ()
    return bool(samples) and all(sample.get("problem") == "missing" for sample in samples)
