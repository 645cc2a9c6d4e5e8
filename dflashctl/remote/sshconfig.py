"""~/.ssh/config for one host, through paramiko's parser; `Include`, which that parser ignores, is expanded
first."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from paramiko import SSHConfig
from paramiko.ssh_exception import ConfigParseError

from dflashctl.errors import UsageError

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
DEFAULT_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
MAX_INCLUDE_DEPTH = 16

_INCLUDE = re.compile(r"^\s*include(?:\s*=\s*|\s+)(?P<patterns>.+?)\s*$", re.IGNORECASE)
_SECTION = re.compile(r"^\s*(?:host|match)(?:\s*=\s*|\s+)\S", re.IGNORECASE)


@dataclass(frozen=True)
class HostKeyRules:
    """Where the keys of a host are looked up, and under which name."""

    alias: str | None
    files: tuple[Path, ...]

    @property
    def store(self) -> Path:
        """The file that `host trust` writes to."""
        return self.files[0]


def load(paths: Iterable[Path] | None = None) -> SSHConfig:
    """The person's configuration, then the system's (the first value of a keyword wins, as in OpenSSH).

    Raises UsageError naming the file that does not parse.
    """
    config = SSHConfig()
    for path in (Path("~/.ssh/config").expanduser(), SYSTEM_CONFIG) if paths is None else paths:
        try:
            lines = expand_includes(path)
            # A Host block of the file before must not go on into this one.
            config.parse(["Host *\n", *lines])
        except ConfigParseError as error:
            raise UsageError(f"cannot be read as an ssh configuration: {error}", where=str(path)) from error
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    return config


def expand_includes(path: Path, depth: int = 0) -> list[str]:
    """The file's lines with those of included files in place; after them the enclosing section goes on.

    Relative names are below ~/.ssh (or /etc/ssh for the system's file); missing files are passed over.
    """
    if depth > MAX_INCLUDE_DEPTH:
        raise UsageError(f"Include goes deeper than {MAX_INCLUDE_DEPTH} files", where=str(path))
    base = SYSTEM_CONFIG.parent if SYSTEM_CONFIG.parent in path.parents else Path("~/.ssh").expanduser()
    lines: list[str] = []
    section = "Host *\n"
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        include = _INCLUDE.match(line)
        if include is None:
            if _SECTION.match(line):
                section = line + "\n"
            lines.append(line + "\n")
            continue
        for pattern in shlex.split(include["patterns"]):
            # Not Path.glob: the pattern may be absolute, and `base / absolute` is that.
            for name in sorted(glob(str(base / Path(pattern).expanduser()))):  # noqa: PTH207
                if Path(name).is_file():
                    lines += [*expand_includes(Path(name), depth + 1), section]
    return lines


def host_key_rules(entry: dict[str, Any], explicit: str | None = None) -> HostKeyRules:
    """From a host's looked-up configuration; `explicit` is known_hosts of hosts.yaml and stands alone."""
    alias = entry.get("hostkeyalias")
    if explicit is not None:
        return HostKeyRules(alias, (Path(explicit).expanduser(),))
    names = [
        *_file_list(entry.get("userknownhostsfile"), DEFAULT_KNOWN_HOSTS),
        *_file_list(entry.get("globalknownhostsfile"), SYSTEM_KNOWN_HOSTS),
    ]
    # `none` for both leaves the usual file to write to; nothing is in it unless a person trusted the host.
    return HostKeyRules(alias, tuple(Path(name).expanduser() for name in names or DEFAULT_KNOWN_HOSTS[:1]))


def identity_files(entry: dict[str, Any]) -> list[Path]:
    """IdentityFile lines of the host, or OpenSSH's default names; only those that exist."""
    named = entry.get("identityfile") or list(DEFAULT_KEYS)
    paths = [Path(name).expanduser() for name in ([named] if isinstance(named, str) else named)]
    return [path for path in paths if path.is_file()]


def identities_only(entry: dict[str, Any]) -> bool:
    """IdentitiesOnly: of the agent's keys, only those that IdentityFile names."""
    return str(entry.get("identitiesonly", "no")).lower() == "yes"


def agent_socket(entry: dict[str, Any]) -> str | None:
    """IdentityAgent: the socket of the agent to ask, SSH_AUTH_SOCK by default; None for no agent."""
    value = str(entry.get("identityagent") or "SSH_AUTH_SOCK")
    if value.lower() == "none":
        return None
    if value.startswith("$"):
        value = os.environ.get(value[1:].strip("{}"), "")
    elif value == "SSH_AUTH_SOCK":
        value = os.environ.get(value, "")
    return str(Path(value.strip('"')).expanduser()) if value else None


def jumps(entry: dict[str, Any]) -> list[str]:
    """ProxyJump's hops in the order in which they are passed; none for `none` or when it is not set."""
    value = str(entry.get("proxyjump") or "none")
    return [] if value.lower() == "none" else [hop.strip() for hop in value.split(",") if hop.strip()]


def _file_list(value: str | None, default: tuple[str, ...]) -> list[str]:
    if value is None:
        return list(default)
    return [name for name in shlex.split(value) if name.lower() != "none"]
