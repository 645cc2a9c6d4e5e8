"""Values that are never shown: those of variables that a recipe or a record calls secret, and of those whose
names sound so. Only what is set in the person's own environment is known here; nothing else holds it, but for
a value that somebody wrote into `env:` of a recipe or of hosts.yaml, which is in the record, too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|API_?KEY|ACCESS_?KEY|CREDENTIAL|PRIVATE", re.IGNORECASE
)
SHORTEST_SOUNDING = 6
"""A shorter value of a variable that merely sounds secret is a word like "yes": masking it hides the text."""

SHORTEST_NAMED = 3
MASK = "***"

_values: list[str] = []


def hide(names: object, environment: Mapping[str, str] | None = None) -> None:
    """From now on these variables' values are masked. Anything but a list of names (a damaged record) is
    ignored."""
    environ = os.environ if environment is None else environment
    listed = names if isinstance(names, (list, tuple, set, frozenset)) else ()
    _add(environ.get(name, "") for name in listed if isinstance(name, str))


def begin(environment: Mapping[str, str] | None = None) -> None:
    """A new command: hide only what every command hides, the variables whose names sound secret."""
    _values.clear()
    hide_sounding(os.environ if environment is None else environment)


def hide_sounding(variables: Mapping[str, object]) -> None:
    """From now on the values of those whose names sound secret are masked."""
    _add(str(variables[name]) for name in sounding(variables))


def sounding(variables: Mapping[str, object]) -> list[str]:
    """The names that sound secret and have a value that may be one."""
    return [
        name
        for name, value in variables.items()
        if SECRET_NAME.search(name) and len(str(value)) >= SHORTEST_SOUNDING
    ]


def _add(values: Iterable[str]) -> None:
    new = {value for value in values if len(value.strip()) >= SHORTEST_NAMED}
    # A value of several lines is also masked line by line: a log is shown so.
    new |= {part for value in new for part in value.splitlines() if len(part.strip()) >= SHORTEST_SOUNDING}
    _values[:] = sorted({*_values, *new}, key=len, reverse=True)


def masked(text: str) -> str:
    """`text` with every hidden value replaced."""
    for value in _values:
        if value in text:
            text = text.replace(value, MASK)
    return text
