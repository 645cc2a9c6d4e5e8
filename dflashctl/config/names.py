"""Rules for the words that people choose: names of hosts and recipes, tags, variables, paths inside."""

from __future__ import annotations

import posixpath
import re
from typing import Annotated

from pydantic import AfterValidator

from dflashctl.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

NAME_RULE = "1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
"""A name goes into file names, argv and messages: nothing in it ever needs quoting."""


def check_name(text: str) -> str:
    """Raises ValueError unless `text` may name a host, a recipe or a tag."""
    if not _NAME.match(text):
        raise ValueError(f"{text!r} is not allowed: {NAME_RULE}")
    return text


def check_tag(text: str) -> str:
    """The tag as given. Raises UsageError (exit 2) when it breaks the rule."""
    try:
        return check_name(text)
    except ValueError as error:
        raise UsageError(f"the tag {error}", next="choose a tag such as localtls or lr-3e4") from None


def check_variable(text: str) -> str:
    """Raises ValueError unless `text` can name an environment variable."""
    if not _VARIABLE.match(text):
        raise ValueError(f"{text!r} cannot be the name of an environment variable")
    return text


def check_value(text: str) -> str:
    """Raises ValueError for what neither argv nor an environment can carry: a NUL, or half a character."""
    if "\0" in text:
        raise ValueError("holds a NUL character, which no program argument or environment value can carry")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("holds a lone surrogate, which has no encoding in UTF-8")
    return text


def check_inside_path(text: str) -> str:
    """An absolute path inside, normalised. Nothing there expands ~ or a variable, so neither do we."""
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ValueError(f"{text!r} holds a control character")
    if not text.startswith("/"):
        raise ValueError(f"{text!r} must be an absolute path, such as /workspace")
    if ".." in text.split("/"):
        raise ValueError(f"{text!r} must not contain '..'")
    return posixpath.normpath("/" + text.lstrip("/"))


def check_address(text: str) -> str:
    """What ssh connects to, and what stands in a command to try by hand."""
    if text.startswith("-") or not all(character.isprintable() and character != " " for character in text):
        raise ValueError(f"{text!r} is no name or address: no blanks, and no '-' in front")
    check_user(text.removeprefix("ssh://").rpartition("@")[0])
    return text


def check_user(text: str) -> str:
    """A user's name; the words of the refusal do not repeat a password."""
    if ":" in text:
        raise ValueError("holds a password after ':'; take it out: keys and an agent are what logs in")
    return text


Name = Annotated[str, AfterValidator(check_name)]
Variable = Annotated[str, AfterValidator(check_variable)]
Value = Annotated[str, AfterValidator(check_value)]
Address = Annotated[str, AfterValidator(check_address)]
User = Annotated[str, AfterValidator(check_address), AfterValidator(check_user)]
InsidePath = Annotated[str, AfterValidator(check_inside_path)]
