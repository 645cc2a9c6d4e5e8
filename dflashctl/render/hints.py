"""The commands that a message tells a person to type next, with the host that they named themselves.

Who typed `-H ct200` has another default host: `dflashctl kill localtls` alone would look elsewhere.
Messages name commands without a host; `complete` adds it, and nothing else does.
"""

from __future__ import annotations

import re

VERBS = (
    "deploy", "rollback", "releases", "diff", "lock", "launch", "status", "kill", "logs", "runs", "pull",
    "report", "notify", "explain", "stacks", "gpu", "doctor", "inspect", "probe",
)  # fmt: skip
"""Those that have the option; prose says `dflashctl` too, and other verbs need no host."""

SUBCOMMANDS = ("list", "show", "diff", "note", "prune", "repair", "break")
_COMMAND = re.compile(rf"\bdflashctl (?:(?:runs|lock) (?:{'|'.join(SUBCOMMANDS)})|{'|'.join(VERBS)})\b")
_NAMED = re.compile(r"(?:^|\s)(?:-H|--host)\b")

_host = ""


def begin() -> None:
    """A new command, of which no host is known yet."""
    about("")


def named(option: str | None) -> str | None:
    """What was given as -H/--host, if anything. Returns it, as a callback of the option does."""
    if option is not None:
        about(option)
    return option


def about(host: str) -> None:
    """From now on messages are about this one of the hosts that were named; "": about the default one."""
    global _host
    _host = host


def was_named() -> bool:
    return bool(_host)


def complete(text: str) -> str:
    """A message with ` -H HOST` in each command that names no host, where the person named one."""
    if not _host or "dflashctl " not in text:
        return text

    def with_host(found: re.Match[str]) -> str:
        rest = text[found.end() :].partition("dflashctl ")[0]
        return found[0] if _NAMED.search(rest) else f"{found[0]} -H {_host}"

    return _COMMAND.sub(with_host, text)
