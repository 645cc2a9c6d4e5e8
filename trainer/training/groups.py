"""Which of the recipe's parameter groups trains which parameter: each in exactly one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from trainer.errors import ConfigError
from trainer.sections import ParameterGroup


@dataclass(frozen=True)
class Assigned:
    """One parameter and the group that trains it."""

    name: str
    shape: tuple[int, ...]
    group: ParameterGroup


def assign_groups(
    parameters: Iterable[tuple[str, Tensor]], groups: Sequence[ParameterGroup]
) -> list[Assigned]:
    """Which group trains which parameter.

    Raises:
        ConfigError: a parameter is in no group, or in two; or a group has none.
    """
    where = "train.optimizer.groups"
    assigned = []
    for name, tensor in parameters:
        matching = [group for group in groups if any(fnmatchcase(name, pattern) for pattern in group.match)]
        if len(matching) != 1:
            found = " and ".join(group.name for group in matching) or "no group"
            raise ConfigError(
                f"parameter {name} is in {found}; it must be in exactly one",
                where=where,
                next="mend the patterns under match",
            )
        assigned.append(Assigned(name, tuple(tensor.shape), matching[0]))
    for group in groups:
        if not any(each.group is group for each in assigned):
            raise ConfigError(
                f"group {group.name} matches no parameter", where=where, next="mend its patterns, or drop it"
            )
    return assigned
