"""What the shell's completion offers besides verbs and options: hosts, recipes, variants, tags.

Everything comes from files of this machine, for a Tab that waited for a host would be worse than none. So
tags are those of the runs that were live when `status` last looked. A broken file offers nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import typer


def hosts(incomplete: str) -> list[str]:
    """Of hosts.yaml; behind a comma the next one."""
    before, comma, begun = incomplete.rpartition(",")
    return [before + comma + name for name in _beginning(begun, _hosts)]


def recipes(incomplete: str) -> list[str]:
    return _beginning(incomplete, _recipes)


def variants(context: typer.Context, incomplete: str) -> list[str]:
    """For `launch --tag`: the variants of the recipe that was named before it, else of the default one."""
    named = context.params.get("recipe")
    return _beginning(incomplete, lambda: _variants(named if isinstance(named, str) else None))


def tags(context: typer.Context, incomplete: str) -> list[str]:
    """Of the host that was named before it, else of the default one."""
    named = context.params.get("host")
    return _beginning(incomplete, lambda: _tags(named if isinstance(named, str) else None))


def _beginning(begun: str, names: Callable[[], list[str]]) -> list[str]:
    found: list[str] = []
    with contextlib.suppress(Exception):
        found = names()
    return [name for name in found if name.startswith(begun)]


def _hosts() -> list[str]:
    from dflashctl.config import load_hosts

    return load_hosts().names


def _recipes() -> list[str]:
    from pathlib import Path

    from dflashctl.config import load_hosts
    from dflashctl.config.resolve import find_recipes

    return sorted(find_recipes(load_hosts(), Path.cwd()))


def _variants(recipe: str | None) -> list[str]:
    from dflashctl.config import load_hosts, load_recipe

    return sorted(load_recipe(recipe, load_hosts()).variants)


def _tags(host: str | None) -> list[str]:
    from dflashctl.config import load_hosts
    from dflashctl.runs import lastseen

    name = host.partition(",")[0] if host else None
    return list(dict.fromkeys(each.tag for each in lastseen.load(load_hosts().host(name)) if each.tag))
