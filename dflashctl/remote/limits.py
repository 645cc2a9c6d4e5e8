"""What can travel as argv, decided before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from dflashctl.errors import UsageError

MAX_ARGUMENT_BYTES = 128 * 1024 - 1
"""Linux takes no single argument (and no single string to `sh -c`) of more than 32 pages, its NUL
included."""


def check_argv(argv: Sequence[str], *, ascii_only: bool = False) -> None:
    """Refuse what would arrive changed or not at all. Raises UsageError.

    `ascii_only`: `pct` decodes argv in the locale of the ssh session and turns other characters into
    U+FFFD under the C locale, so nothing else may be in a command line that passes through it. Data goes
    on stdin.
    """
    if not argv or not argv[0]:
        raise UsageError("an empty command")
    for position, word in enumerate(argv):
        if "\0" in word:
            raise UsageError(
                f"argument {position} of {argv[0]!r} holds a NUL byte; no command line can carry it"
            )
        try:
            encoded = word.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError(f"argument {position} of {argv[0]!r} is no valid text: {word!a}") from None
        if len(encoded) > MAX_ARGUMENT_BYTES:
            raise UsageError(
                f"argument {position} of {argv[0]!r} has {len(encoded):,} bytes;"
                f" Linux takes {MAX_ARGUMENT_BYTES:,}"
            )
        if ascii_only and not word.isascii():
            raise UsageError(
                f"argument {position} of {argv[0]!r} is not ASCII: {word!a};"
                " `pct exec` would change it on the way",
                next="pass such data on stdin",
            )


def check_length(command: str) -> None:
    """The command string is one argument of the login shell (`sh -c STRING`). Raises UsageError."""
    length = len(command.encode("utf-8"))
    if length > MAX_ARGUMENT_BYTES:
        raise UsageError(
            f"the command line has {length:,} bytes; ssh can carry {MAX_ARGUMENT_BYTES:,}",
            next="pass large data on stdin",
        )
