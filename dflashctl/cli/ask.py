"""A question on stderr before something is done that cannot be taken back."""

from __future__ import annotations

import sys


def ask(question: str, *, where: str = "", instead: str = "add --yes") -> None:
    """Returns after a yes. Raises UsageError for a no, and where nobody answers: cron, CI, `</dev/null`."""
    from dflashctl.errors import UsageError

    print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
    try:
        answer = input()
    except EOFError:
        print(file=sys.stderr)
        raise UsageError("nobody is there to ask; nothing was done", where=where, next=instead) from None
    if answer.strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was done", where=where)
