"""{name} in a recipe's command, log and environment: which names there are, and how they are filled in.

Only `{` followed by a letter starts a placeholder, so JSON in an argument needs no escaping; `{{` and `}}`
around a word keep it literal.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

from dflashctl.errors import UsageError

PLACEHOLDERS = {
    "log_dir": "the host's log_dir",
    "workdir": "the host's workdir",
    "recipe": "the recipe's name",
    "tag": "the run's tag",
    "run_id": "the run's id",
    "run_dir": "<state_dir>/runs/<id>, the run's folder",
    "recipe_file": "recipe.yaml in the run's folder: the recipe as this run got it",
    "release_dir": "the deployed tree that the run imports",
}

_TOKEN = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")


def check_placeholders(text: str, known: Collection[str] = PLACEHOLDERS) -> None:
    """Raises ValueError for a placeholder that is not in `known`."""
    for match in _TOKEN.finditer(text):
        name = match.group(2)
        if name is not None and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {{{close[0]}}}?" if close else f"known: {', '.join(sorted(known))}"
            raise ValueError(
                f"unknown placeholder {{{name}}}; {hint}; to keep it as text write {{{{{name}}}}}"
            )


def fill(text: str, values: Mapping[str, str], *, key_path: str = "") -> str:
    """`text` with every {name} replaced from `values`, in one pass: a value is never expanded again.

    Raises UsageError naming `key_path` for a placeholder without a value.
    """
    try:
        check_placeholders(text, values)
    except ValueError as error:
        raise UsageError(str(error), where=key_path) from None
    return _TOKEN.sub(lambda m: f"{{{m.group(1)}}}" if m.group(1) is not None else values[m.group(2)], text)
