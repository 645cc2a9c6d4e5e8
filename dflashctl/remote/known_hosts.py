"""OpenSSH's known_hosts: which keys are stored for a name, and how to store one. Format: sshd(8),
SSH_KNOWN_HOSTS.

paramiko's reader knows neither patterns nor markers, so a `*.lab` line would be overlooked and a @revoked key
accepted; hence this one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

SSH_PORT = 22


@dataclass(frozen=True)
class KnownKey:
    """One line: a key and the names that it is valid for."""

    names: str
    key_type: str
    blob: bytes
    where: str  # file:line
    marker: str = ""  # "", "@revoked" or "@cert-authority"


def lookup_name(host: str, port: int, alias: str | None = None) -> str:
    """The name under which OpenSSH stores a host; an alias (HostKeyAlias) stands without a port."""
    if alias:
        return alias
    return host.lower() if port == SSH_PORT else f"[{host.lower()}]:{port}"


def fingerprint(blob: bytes) -> str:
    """As `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def parse(text: str, path: str = "known_hosts") -> list[KnownKey]:
    """All usable lines; damaged ones and comments are passed over, as OpenSSH does."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#"):
            continue
        try:
            blob = base64.b64decode(words[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        found.append(KnownKey(words[0], words[1], blob, f"{path}:{number}", marker))
    return found


def read_files(paths: Iterable[Path]) -> list[KnownKey]:
    """The lines of several files; one that does not exist is empty. Raises OSError for one that cannot be
    read."""
    found: list[KnownKey] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            continue
        found += parse(text, str(path))
    return found


def matches(names: str, wanted: str) -> bool:
    """Whether the first field of a line names `wanted`: hashed, or patterns with `*`, `?` and `!`."""
    if names.startswith("|1|"):
        return _hash_matches(names, wanted)
    hit = False
    for pattern in names.lower().split(","):
        negated = pattern.startswith("!")
        # fnmatch would read brackets as a class of characters; here they surround a host with a port
        glob = pattern.lstrip("!").replace("[", "[[]")
        if fnmatchcase(wanted.lower(), glob):
            if negated:
                return False
            hit = True
    return hit


def keys_for(known: Iterable[KnownKey], wanted: str) -> list[KnownKey]:
    """The lines that speak of `wanted`, markers included."""
    return [key for key in known if matches(key.names, wanted)]


def line_for(name: str, key_type: str, blob: bytes) -> str:
    """A new line, its end included."""
    return f"{name} {key_type} {base64.b64encode(blob).decode()}\n"


def store(path: Path, name: str, key_type: str, blob: bytes, *, replace: bool = False) -> None:
    """Add a key to the file (created 0600, its folder 0700). `replace` drops the other lines of exactly
    this name.

    Atomic: written aside and renamed. Raises OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = path.resolve()
    try:
        text, mode = (
            target.read_text(encoding="utf-8", errors="surrogateescape"),
            target.stat().st_mode & 0o777,
        )
    except FileNotFoundError:
        text, mode = "", 0o600
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    if replace:
        lines = [kept for line in lines if (kept := without_name(line, name))]
    lines.append(line_for(name, key_type, blob))
    aside = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        with open(aside, "w", encoding="utf-8", errors="surrogateescape") as file:
            os.fchmod(file.fileno(), mode)
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def without_name(line: str, name: str) -> str:
    """The line without `name` among its names, "" if it had no other. Patterns and marked lines stay as
    they are: they are somebody's own rule."""
    words = line.split(None, 1)
    if len(words) < 2 or words[0].startswith(("#", "@")):
        return line
    if words[0].startswith("|"):
        return "" if _hash_matches(words[0], name) else line
    names = words[0].split(",")
    rest = [each for each in names if each.lower() != name.lower()]
    if rest == names:
        return line
    return f"{','.join(rest)} {words[1]}" if rest else ""


def _hash_matches(names: str, wanted: str) -> bool:
    try:
        _, kind, salt, digest = names.split("|")
        expected = base64.b64decode(digest, validate=True)
        actual = hmac.digest(base64.b64decode(salt, validate=True), wanted.encode(), "sha1")
    except ValueError:
        return False
    return kind == "1" and hmac.compare_digest(expected, actual)
