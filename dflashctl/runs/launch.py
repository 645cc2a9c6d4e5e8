"""From recipe, tag and facts to the request that starts a run. Pure: no contact, no clock, no environment."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflashctl.config import ResolvedRecipe, fill
from dflashctl.config.hosts import Host, own_workdir
from dflashctl.config.resolve import warnings as recipe_warnings
from dflashctl.errors import Locked, NotFound, UsageError
from dflashctl.gpus.idle import Gpu
from dflashctl.render.secrets import sounding
from dflashctl.render.text import ranges

LANG = "C.UTF-8"
OURS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "DFLASH_RUN_DIR", "DFLASH_RUN_ID", "DFLASH_TAG")


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a launch will do; `record` becomes record.json, `files` lie in <run_dir>/files/."""

    run_id: str
    host: str
    record: Mapping[str, Any]
    recipe_yaml: str
    release_dir: str | None
    state_dir: str
    allow_busy: bool
    warnings: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    make_cwd: bool = False

    def request(self, secrets: Mapping[str, str], settle_s: float) -> dict[str, Any]:
        """The operation `launch`. Secrets travel on stdin of the call and are in no record."""
        return {
            "id": self.run_id,
            "state_dir": self.state_dir,
            "record": dict(self.record),
            "recipe_yaml": self.recipe_yaml,
            "release_dir": self.release_dir,
            "make_cwd": self.make_cwd,
            "allow_busy": self.allow_busy,
            "secrets": dict(secrets),
            "settle_s": settle_s,
            "files": dict(self.files),
        }

    @property
    def gpu_words(self) -> str:
        return ranges([gpu["index"] for gpu in self.record["gpus"]])


def plan_launch(
    host: Host,
    recipe: ResolvedRecipe,
    *,
    run_id: str,
    inside: Mapping[str, Any],
    gpus: Sequence[Gpu],
    created_by: str,
    allow_busy: bool = False,
    reason: str = "",
    fresh_cache: bool = False,
    here: str | None = None,
) -> LaunchPlan:
    """`fresh_cache`: the run compiles into a folder of its own, whatever others have compiled before. `here`:
    the release that the files here would make, where that is known.

    Raises UsageError (a placeholder without a value, CUDA_VISIBLE_DEVICES set by hand).
    """
    release = inside.get("release") if recipe.has_release or recipe.script else None
    deployed = release if recipe.has_release else None
    release_dir = posixpath.join(host.code_root, "releases", deployed) if deployed else None
    run_dir = posixpath.join(host.state_dir, "runs", run_id)
    values = placeholder_values(host, recipe, run_id, run_dir, release_dir)
    command = [
        fill(word, values, key_path=f"launch.command[{number}]")
        for number, word in enumerate(recipe.launch.command)
    ]
    if command[0] == "python":
        command[0] = host.python
    info = inside.get("release_info") or {}
    caches = fresh_caches(run_dir) if fresh_cache else {}
    record = {
        "tag": recipe.tag,
        "recipe": recipe.name,
        "variant": recipe.variant,
        "release": release,
        "git": info.get("git") if release else None,
        "created_by": created_by,
        "reason": reason,
        "host": host.name,
        "command": command,
        "cwd": release_dir or host.workdir,
        "env": environment(host, recipe, values, gpus, release_dir) | caches,
        "secrets": list(recipe.launch.secrets),
        "log": posixpath.normpath(fill(recipe.launch.log, values, key_path="launch.log")),
        "gpus": [{"index": gpu.index, "uuid": gpu.uuid} for gpu in gpus],
        "grace_s": recipe.launch.grace_s,
        "started_within_s": recipe.launch.started_within_s,
        "observe": recipe.observe.model_dump(exclude_defaults=True) or None,
    }
    return LaunchPlan(
        run_id,
        host.name,
        record,
        recipe.dump(),
        release_dir,
        host.state_dir,
        allow_busy,
        script_warnings(recipe.script, info)
        + release_warnings(recipe.name, release, info, here)
        + secret_warnings({**host.env, **recipe.launch.env})
        + recipe_warnings(recipe),
        make_cwd=own_workdir(host),
    )


def secret_warnings(env: Mapping[str, str]) -> tuple[str, ...]:
    """Values that a person wrote into `env:` are read by whoever reads the run. A path is where one lies."""
    named = ", ".join(name for name in sounding(env) if not env[name].startswith("/"))
    if not named:
        return ()
    what = f"env: {named} sounds like a secret, and its value stands in the run's record"
    return (f"{what}; name it in the recipe's launch.secrets, and set it in your environment",)


def script_warnings(script: Mapping[str, str] | None, info: Mapping[str, Any]) -> tuple[str, ...]:
    """What is in a script's place may be there by somebody's hand: then no release tells what ran."""
    if script is None or info.get("deployed_at") is not None:
        return ()
    return (f"{script['to']} is no version that was deployed here: dflashctl diff · dflashctl deploy",)


def release_warnings(
    recipe: str, release: str | None, info: Mapping[str, Any], here: str | None = None
) -> tuple[str, ...]:
    """A release that was deployed for another recipe may lack what this one needs; one that the files here
    differ from is perhaps not what the person thinks to launch."""
    deployed_for = info.get("recipe")
    if not release or here == release:  # recipes with the same files share a release
        return ()
    if deployed_for in (None, recipe):
        if here is None:
            return ()
        return (f"the files here differ from release {release[:8]}: dflashctl diff · dflashctl deploy",)
    what = f"release {release[:8]} was deployed for recipe {deployed_for}, not for {recipe}"
    return (f"{what}; if it lacks what this one needs: dflashctl deploy",)


def check_before(host: Host, recipe: ResolvedRecipe, inside: Mapping[str, Any]) -> None:
    """What forbids a launch whatever the GPUs say. Raises Locked (the tag is in use), NotFound (no release).

    The operation checks the tag once more under its lock; here it spares the person a look at the GPUs.
    """
    for run in inside.get("runs", ()):
        if run.get("tag") == recipe.tag:
            state = "is live" if run.get("live") else "lost its supervisor, but its processes live"
            raise Locked(
                f"the tag {recipe.tag} is in use: run {run.get('id')} {state}",
                where=host.name,
                next=f"dflashctl kill {recipe.tag}, or launch with another tag",
            )
    if recipe.has_release and not inside.get("release"):
        raise NotFound(
            f"nothing is deployed under {host.code_root}",
            where=host.name,
            next="dflashctl deploy",
        )


def placeholder_values(
    host: Host, recipe: ResolvedRecipe, run_id: str, run_dir: str, release_dir: str | None
) -> dict[str, str]:
    """What {name} stands for in command, log and environment."""
    values = {
        "log_dir": host.log_dir,
        "workdir": host.workdir,
        "recipe": recipe.name,
        "tag": recipe.tag,
        "run_id": run_id,
        "run_dir": run_dir,
        "recipe_file": posixpath.join(run_dir, "recipe.yaml"),
    }
    if release_dir is not None:
        values["release_dir"] = release_dir
    return values


def environment(
    host: Host,
    recipe: ResolvedRecipe,
    values: Mapping[str, str],
    gpus: Sequence[Gpu],
    release_dir: str | None,
) -> dict[str, str]:
    """The program's whole environment but its secrets: nothing comes from an ssh session or a login shell.

    The folder of the host's Python leads PATH, as in an activated venv, so `torchrun` is the one beside it.
    GPUs go by UUID, and CUDA_DEVICE_ORDER makes cuda:0 the first of them as nvidia-smi counts; without GPUs
    the program sees none.
    """
    given = dict(host.env)
    for name, text in recipe.launch.env.items():
        given[name] = fill(text, values, key_path=f"launch.env.{name}")
    for name in OURS:
        if name in given:
            hint = "choose GPUs with launch.gpus or --gpus" if name.startswith("CUDA") else "remove it"
            raise UsageError(f"{name} is set by dflashctl itself", where=f"env of {recipe.name}", next=hint)
    paths = [release_dir, given.pop("PYTHONPATH", None), host.env.get("PYTHONPATH")]
    unique = list(dict.fromkeys(path for path in paths if path))
    made = {"PATH": f"{posixpath.dirname(host.python)}:{host.path}", "HOME": host.home, "LANG": LANG, **given}
    if unique:
        made["PYTHONPATH"] = ":".join(unique)
    made["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    made["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus)
    made["DFLASH_RUN_DIR"] = posixpath.dirname(values["recipe_file"])
    made["DFLASH_RUN_ID"] = values["run_id"]
    made["DFLASH_TAG"] = values["tag"]
    return made


def fresh_caches(run_dir: str) -> dict[str, str]:
    """Where PyTorch's inductor and Triton keep what they compile: empty folders of this run."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": posixpath.join(run_dir, "compile_cache", "inductor"),
        "TRITON_CACHE_DIR": posixpath.join(run_dir, "compile_cache", "triton"),
    }


def collect_secrets(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Values of the recipe's `secrets` from the person's environment. Raises UsageError for missing ones."""
    missing = [name for name in names if name not in environ]
    if missing:
        raise UsageError(
            f"secret {', '.join(missing)} is not set in your environment",
            where="launch.secrets",
            next=f"export {missing[0]}=... and launch again, or remove it from the recipe",
        )
    return {name: environ[name] for name in names}
