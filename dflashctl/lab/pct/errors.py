"""How a call ends early: text for stderr and an exit code."""

from __future__ import annotations


class Die(Exception):
    """The call ends. `text` goes to stderr as it is (it carries its own newline); `code` is the exit code.

    Perl's `die` leaves with errno if that is set, else with 255: callers pass what was observed
    (docs/pct.md#exit).
    """

    def __init__(self, text: str, code: int = 255) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


class ParameterError(Die):
    """A 400: the dispatcher adds the command's usage line. Exit code 2, observed."""

    def __init__(self, text: str) -> None:
        super().__init__(f"400 {text}", 2)


class AttachError(Exception):
    """A container's namespaces cannot be entered. Nothing has run, and nothing runs outside instead."""
