"""The globs of `deploy.include` and `deploy.exclude`, and which files may not travel by accident. Pure.

A pattern is relative to the project's root and matches whole paths: `*` and `?` stay within a folder, `**`
does not, and a pattern that matches a folder takes everything below it (`trainer` is `trainer/**`).
"""

from __future__ import annotations

import itertools
import re
from functools import cache


@cache
def glob_regex(pattern: str) -> re.Pattern[str]:
    """A pattern as a regular expression over paths with `/`."""
    text = _bare(pattern)
    parts: list[str] = []
    at = 0
    while at < len(text):
        if text.startswith("**/", at) and (at == 0 or text[at - 1] == "/"):
            parts.append("(?:[^/]+/)*")
            at += 3
        elif text.startswith("**", at):
            parts.append(".*")
            at += 2
        elif text[at] == "*":
            parts.append("[^/]*")
            at += 1
        elif text[at] == "?":
            parts.append("[^/]")
            at += 1
        elif text[at] == "[" and (end := text.find("]", at + 2)) > 0:
            inner = text[at + 1 : end].replace("\\", "\\\\")
            parts.append(f"[{'^' + inner[1:] if inner[0] in '!^' else inner}]")
            at = end + 1
        else:
            parts.append(re.escape(text[at]))
            at += 1
    whole = "".join(parts)
    if text in ("", "."):
        whole = ".*"
    return re.compile(rf"(?s:{whole})(?:/.*)?\Z", re.DOTALL)


def _bare(pattern: str) -> str:
    """A pattern without what does not count; "" and "." mean the whole tree."""
    return pattern.removeprefix("./").rstrip("/")


def matches(path: str, patterns: list[str]) -> bool:
    """Does any pattern match the path, or a folder above it?"""
    return any(glob_regex(pattern).match(path) for pattern in patterns)


def may_match_below(folder: str, patterns: list[str]) -> bool:
    """Could a pattern match something in this folder? False saves a walk through it."""
    here = folder.split("/")
    for pattern in patterns:
        steps = _bare(pattern).split("/")
        fixed = list(itertools.takewhile(lambda step: not re.search(r"[*?[]", step), steps))
        shared = min(len(here), len(fixed))
        if _bare(pattern) in ("", ".") or here[:shared] == fixed[:shared]:
            return True
    return False


def names_literally(path: str, patterns: list[str]) -> bool:
    """Is the path written out in full, without a wildcard? Then the person means this very file."""
    return any(pattern.removeprefix("./") == path for pattern in patterns)


_SECRET_NAMES = re.compile(
    r"(?:\.env(?:\.(?!example$|sample$|template$|dist$).*)?"
    r"|.*\.(?:pem|key|p12|pfx|keystore|jks|kdbx|ppk)"
    r"|id_[a-z0-9]+(?:_sk)?"
    r"|\.?credentials(?:\.(?!py$|pyi$|md$).*)?"
    r"|\.netrc|_netrc|\.pypirc|\.npmrc|\.git-credentials|\.htpasswd|\.pgpass"
    r"|(?:hf_|\.)?token(?:\.txt)?)\Z",
    re.IGNORECASE,
)


def secret_reason(path: str, head: bytes) -> str | None:
    """Why a file looks like a secret: by its name, or by how its content starts. None when it does not."""
    name = path.rpartition("/")[2]
    if _SECRET_NAMES.match(name):
        return "its name is one of a key or password file"
    if head.startswith(b"-----BEGIN ") and b"PRIVATE KEY-----" in head[:200]:
        return "it starts like a private key"
    return None


MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 1024
"""Linux allows 4,096 with the folder of the release in front."""


def unfit_name(path: str) -> str | None:
    """Why a name cannot travel unchanged through an archive, JSON and a terminal; None when it can."""
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        return "it is not UTF-8"
    if any(ord(char) < 32 or ord(char) == 127 for char in path):
        return "it holds a control character"
    if len(encoded) > MAX_PATH_BYTES or any(len(p.encode()) > MAX_NAME_BYTES for p in path.split("/")):
        return "it is too long"
    return None
