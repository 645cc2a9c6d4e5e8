"""The commands that a message tells a person to type next, with the host and the recipe that they named.

Who typed `-H ct200` has another default host: `dflashctl kill localtls` alone would look elsewhere. Who typed
`-r pipeline` may have no default recipe at all. Messages name commands without either; `complete` adds them,
and nothing else does.
"""

from __future__ import annotations

import re
import shlex

VERBS = (
    "deploy", "rollback", "releases", "diff", "lock", "launch", "status", "kill", "logs", "runs", "pull",
    "report", "notify", "explain", "stacks", "gpu", "doctor", "inspect", "probe",
)  # fmt: skip
"""Those that have --host; prose says `dflashctl` too, and other verbs need no host."""

WITH_RECIPE = ("deploy", "diff", "launch")
"""Those of them that do not work without a recipe."""

SUBCOMMANDS = ("list", "show", "diff", "note", "prune", "repair", "break")
_COMMAND = re.compile(rf"\bdflashctl ((?:runs|lock) (?:{'|'.join(SUBCOMMANDS)})|{'|'.join(VERBS)})\b")
_NAMES_HOST = re.compile(r"(?:^|\s)(?:-H|--host)\b")
_NAMES_RECIPE = re.compile(r"(?:^|\s)(?:-r|--recipe)\b")

_host = ""
_recipe = ""


def begin() -> None:
    """A new command, of which neither host nor recipe is known yet."""
    global _recipe
    about("")
    _recipe = ""


def named(option: str | None) -> str | None:
    """What was given as -H/--host, if anything. Returns it, as a callback of the option does."""
    if option is not None:
        about(option)
    return option


def named_recipe(option: str | None) -> str | None:
    """The same for -r/--recipe, a name or a file."""
    global _recipe
    if option is not None:
        _recipe = option
    return option


def about(host: str) -> None:
    """From now on messages are about this one of the hosts that were named; "": about the default one."""
    global _host
    _host = host


def was_named() -> bool:
    return bool(_host)


def complete(text: str) -> str:
    """A message with ` -H HOST` in each command that names no host, where the person named one; and with
    ` -r RECIPE`, in the same way, in each that needs a recipe."""
    if not (_host or _recipe) or "dflashctl " not in text:
        return text

    def with_options(found: re.Match[str]) -> str:
        rest = text[found.end() :].partition("dflashctl ")[0]
        options = ""
        if _recipe and found[1] in WITH_RECIPE and not _NAMES_RECIPE.search(rest):
            options += f" -r {shlex.quote(_recipe)}"
        if _host and not _NAMES_HOST.search(rest):
            options += f" -H {_host}"
        return found[0] + options

    return _COMMAND.sub(with_options, text)
