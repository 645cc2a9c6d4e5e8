"""A command line that cannot be read, told like every other error: what, where, and what to type. Pure.

What is wrong is typer's to say; what a person probably meant is ours, by the words that they typed.
"""

from __future__ import annotations

import shlex
from collections.abc import Container, Sequence
from typing import Any

OTHER_WORDS = {
    "ps": "status", "top": "status", "list": "runs", "ls": "runs", "history": "runs",
    "start": "launch", "run": "launch", "stop": "kill", "end": "kill", "cancel": "kill",
    "push": "deploy", "ship": "deploy", "tail": "logs", "gpus": "gpu", "nvidia-smi": "gpu",
    "get": "pull", "download": "pull", "check": "doctor", "hosts": "host list", "recipes": "recipe list",
}  # fmt: skip
"""What other tools call it, for verbs that no likeness of letters leads to."""

NAMED = {"launch": "--tag", "deploy": "-r", "diff": "-r"}
"""What a word that stands alone behind these verbs is most likely meant as."""


def describe(error: Any, words: Sequence[str], verbs: Container[str]) -> tuple[str, str, str]:
    """(what, where, next) of typer's error for these words of the command line."""
    what = " ".join(error.format_message().replace("Value error, ", "").split())
    context = getattr(error, "ctx", None)
    verb = words[0] if words and words[0] in verbs else ""
    where = context.command_path if context else f"dflashctl {verb}".strip()
    meant = _meant(verb, list(words), verbs, type(error).__name__)
    return what, where, " · ".join(filter(None, [meant, f"{where} -h"]))


def _meant(verb: str, words: list[str], verbs: Container[str], kind: str) -> str:
    if not verb:
        first = next((word for word in words if word in verbs), "")
        if first and words[0].startswith("-"):  # `-H ct200 status`
            words.remove(first)
            return f"options stand behind the verb: {_line([first, *words])}"
        return (
            _line([*OTHER_WORDS[words[0]].split(), *words[1:]]) if words and words[0] in OTHER_WORDS else ""
        )
    alone = words[1] if len(words) == 2 and not words[1].startswith("-") else ""
    if not alone or kind == "BadParameter":
        return ""
    if verb == "runs":
        return _line(["runs", "show", alone])
    return _line([verb, NAMED[verb], alone]) if verb in NAMED else ""


def _line(words: list[str]) -> str:
    return f"dflashctl {shlex.join(words)}"
