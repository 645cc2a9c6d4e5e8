"""The `train:` section of a recipe, checked on the laptop by the very trainer that will travel."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

_PROBLEM = re.compile(r"(?P<path>[\w.\[\]-]+): (?P<what>.*)\Z", re.DOTALL)
_STEP = re.compile(r"\[(?P<index>\d+)\]|(?P<key>[^.\[\]]+)")
KeyPath = tuple[str | int, ...]


def trainer_root(project: Path, here: Path) -> Path | None:
    """The folder whose trainer judges a recipe of the folder `project`: that one or one above it, as for a
    recipe in recipes/experiments/; for a recipe that lies outside any project the same from the working
    folder `here`, whose trainer is the one that its person means. None: there is no trainer."""
    places = dict.fromkeys(above for start in (project, here) for above in (start, *start.parents))
    return next((place for place in places if (place / "trainer" / "config.py").is_file()), None)


def check_train(section: dict[str, Any], root: Path | None) -> list[tuple[KeyPath, str]]:
    """(key path, problem) for everything that the trainer below `root` would refuse; empty when all is well.

    Asks `check` of trainer/config.py, which needs no torch. Without such a trainer (or with another program
    of that name, whose `check` is something else) the answer is empty: the one in the container decides,
    never another one that happens to be installed here.
    """
    return _asked("check", section, root)


def train_warnings(section: dict[str, Any], root: Path | None) -> list[tuple[KeyPath, str]]:
    """The same for what that trainer would only warn of: keys of a sound section that nothing will read.
    Asks `warnings` of trainer/config.py; a trainer without it warns of nothing."""
    return _asked("warnings", section, root)


def _asked(question: str, section: dict[str, Any], root: Path | None) -> list[tuple[KeyPath, str]]:
    answer = getattr(_project_config(root), question, None) if root is not None else None
    if not callable(answer):
        return []
    try:
        problems = answer(section)
    except (Exception, SystemExit):
        return []
    if not isinstance(problems, list) or not all(isinstance(each, str) for each in problems):
        return []
    rows = []
    for problem in problems:
        match = _PROBLEM.match(problem)
        path = _steps(match["path"]) if match else ()
        if path[:1] != ("train",):
            path = ("train", *path)
        rows.append((path, match["what"] if match else problem))
    return rows


def _steps(path: str) -> KeyPath:
    """The keys and list indices of train.optimizer.groups[0].name."""
    steps = _STEP.finditer(path)
    return tuple(int(each["index"]) if each["index"] else each["key"] for each in steps)


def _project_config(project_root: Path) -> Any:
    source = project_root / "trainer" / "config.py"
    if not source.is_file():
        return None
    sys.path.insert(0, str(project_root))
    try:
        module = importlib.import_module("trainer.config")
    except (
        Exception,
        SystemExit,
    ):  # a broken trainer is deploy's to show (it compiles every file), not the recipe's
        return None
    finally:
        sys.path.remove(str(project_root))
    same = Path(module.__file__ or "").resolve() == source.resolve()
    return module if same else None
