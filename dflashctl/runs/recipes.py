"""Recipes as they are listed and shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dflashctl.config.hosts import HostsFile
from dflashctl.config.recipe import Recipe
from dflashctl.config.resolve import find_recipes, read_recipe, resolve, warnings
from dflashctl.errors import DflashError


@dataclass(frozen=True)
class Row:
    """One recipe of the list; `problem` when its file is broken."""

    name: str
    path: Path
    default: bool
    variants: tuple[str, ...] = ()
    problem: str = ""

    def cells(self) -> list[str]:
        name = f"{self.name} (default)" if self.default else self.name
        return [
            name,
            ", ".join(self.variants) or "-",
            f"{self.path}: {self.problem}" if self.problem else str(self.path),
        ]

    def payload(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "file": str(self.path),
            "default": self.default,
            "variants": list(self.variants),
            "problem": self.problem or None,
        }


def overview(hosts: HostsFile, start: Path | None = None) -> list[Row]:
    """All recipes that can be named here. A broken one is listed with its first problem, not hidden."""
    rows = []
    for name, path in find_recipes(hosts, start or Path.cwd()).items():
        default = name == hosts.defaults.recipe
        try:
            recipe = read_recipe(path)
            rows.append(Row(name, path, default, tuple(sorted(recipe.variants))))
        except DflashError as error:
            rows.append(Row(name, path, default, problem=error.what.splitlines()[0]))
    return rows


@dataclass(frozen=True)
class Shown:
    """A recipe as written, or as a run with `tag` gets it."""

    document: dict[str, Any]
    tag: str | None
    variant: str | None
    warnings: tuple[str, ...] = ()  # keys that nothing will read

    @property
    def text(self) -> str:
        return yaml.safe_dump(self.document, sort_keys=False, allow_unicode=True, width=100)

    @property
    def variant_words(self) -> str:
        return f"variant {self.variant} applied" if self.variant else f"no variant is named {self.tag}"

    def payload(self) -> dict[str, Any]:
        return {
            "tag": self.tag,
            "variant": self.variant,
            "recipe": self.document,
            "warnings": list(self.warnings),
        }


def shown(recipe: Recipe, tag: str | None) -> Shown:
    """Raises UsageError for a tag outside the rule."""
    if tag is None:
        return Shown(recipe.model_dump(mode="json", exclude_none=True), None, None)
    resolved = resolve(recipe, tag)
    return Shown(resolved.document(), tag, resolved.variant, warnings(resolved))
