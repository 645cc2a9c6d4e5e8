"""A recipe's file and the place of every key in it: each problem is told as FILE:LINE:COLUMN: KEY: WHAT.

Needs no torch. What the laptop refuses (a key given twice, numbers that YAML reads otherwise than people) is
refused here too: a recipe may be run by hand. The loader does what dflashctl/config/yamlfile.py's does. It is
not shared: this folder travels alone, and a project of dflashctl's may have a `trainer` of its own.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer import config as configs
from trainer.errors import ConfigError
from trainer.sections import TrainConfig

_PROBLEM = re.compile(r"(?P<path>train[\w.\[\]-]*): ")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which PyYAML lets the last one win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            if name and key.tag != "tag:yaml.org,2002:merge":
                seen.add(name)
        return super().construct_mapping(node, deep)

    def plain_int(self, node: yaml.ScalarNode) -> int:
        """YAML 1.1 reads 0200 as 128 and 22:30 as 1350; whoever wrote that meant something else."""
        if re.fullmatch(r"[-+]?0[0-9_]+|.*:.*", node.value):
            number = self.construct_yaml_int(node)
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value} is the number {number} to YAML", node.start_mark
            )
        return self.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.plain_int)


@dataclass(frozen=True)
class Recipe:
    """The `train:` section as plain data, and the nodes of the file that it came from."""

    path: Path
    train: Any
    root: yaml.Node

    def place(self, key: str) -> str:
        """FILE:LINE:COLUMN of the deepest part of a key path (train.optimizer.groups[1].name) in the file."""
        node: yaml.Node | None = self.root
        mark = self.root.start_mark
        for step in re.findall(r"[^.\[\]]+", key):
            found = _child(node, step)
            if found is None:
                break
            mark, node = found
        return f"{self.path}:{mark.line + 1}:{mark.column + 1}"

    def config(self) -> TrainConfig:
        """Raises ConfigError: every problem with its place, in the order of the file."""
        problems = configs.check(self.train)
        if not problems:
            return configs.load(self.train)
        (where, what), *others = self._in_order(problems)
        raise ConfigError(
            "\n".join([what, *(f"{place}: {problem}" for place, problem in others)]),
            where=where,
            next="mend these keys of the recipe",
        )

    def warnings(self) -> list[str]:
        """Keys of a sound recipe that nothing will read, each with its place."""
        return [f"{place}: {told}" for place, told in self._in_order(configs.warnings(self.train))]

    def _in_order(self, problems: list[str]) -> list[tuple[str, str]]:
        """(place, problem) of each, in the order of the file."""
        told = []
        for problem in problems:
            match = _PROBLEM.match(problem)
            told.append((self.place(match["path"] if match else "train"), problem))
        return sorted(told, key=lambda each: [int(part) for part in each[0].rsplit(":", 2)[1:]])


def _child(node: yaml.Node | None, step: str) -> tuple[yaml.Mark, yaml.Node] | None:
    """Where a key or a list's entry stands, and its value."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == step:
                return key.start_mark, value
    if isinstance(node, yaml.SequenceNode) and step.isdecimal() and int(step) < len(node.value):
        return node.value[int(step)].start_mark, node.value[int(step)]
    return None


def read(path: Path) -> Recipe:
    """A recipe file.

    Raises:
        ConfigError: no such file, not YAML (with line and column), or no `train:` in it.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        hint = "name its file, such as recipes/demo.yaml" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read the recipe: {error.strerror}", where=str(path), next=hint) from None
    except UnicodeDecodeError:
        raise ConfigError("the recipe is not UTF-8 text", where=str(path)) from None
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            recipe = loader.construct_document(root) if root is not None else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"not YAML: {error.problem}", where=place) from None
    except (yaml.YAMLError, ValueError) as error:  # a date that is none, say
        raise ConfigError(f"not YAML: {error}", where=str(path)) from None
    except RecursionError:
        raise ConfigError("nested too deeply to be a recipe", where=str(path)) from None
    if root is None or not isinstance(recipe, dict) or "train" not in recipe:
        raise ConfigError("the recipe has no train: section", where=str(path))
    return Recipe(path, recipe["train"], root)
