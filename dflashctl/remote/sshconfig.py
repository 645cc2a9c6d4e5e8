"""~/.ssh/config for one host, through paramiko's parser; `Include`, which that parser ignores, is expanded
first."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from paramiko import SSHConfig
from paramiko.ssh_exception import ConfigParseError

from dflashctl.errors import UsageError
from dflashctl.remote.known_hosts import SSH_PORT

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
DEFAULT_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
MAX_INCLUDE_DEPTH = 16

_SETTING = re.compile(r"^\s*(?P<keyword>\w+)(?:\s*=\s*|\s+)(?P<value>.+?)\s*$")
_RAW = ("proxycommand", "localcommand", "remotecommand", "knownhostscommand")
"""Whose value is the rest of the line, whatever stands in it."""

_FILES = ("userknownhostsfile", "globalknownhostsfile")
"""Whose value is a list of file names; kept as the words of a shell."""

_TOKEN = re.compile(r"%(?P<token>.)|\$\{(?P<variable>\w+)\}")


@dataclass(frozen=True)
class HostKeyRules:
    """Where the keys of a host are looked up, and under which name."""

    alias: str | None
    files: tuple[Path, ...]

    @property
    def store(self) -> Path:
        """The file that `host trust` writes to."""
        return self.files[0]


class Config(SSHConfig):
    """paramiko's, which would canonicalize the name that a person typed in the place of its HostName."""

    def canonicalize(self, hostname: str, options: Any, domains: Any) -> Any:
        """CanonicalizeHostname: as in OpenSSH, HostName is what domains are appended to, unless its dots are
        too many; an address has no domain."""
        named = str(options.get("hostname") or hostname)
        dots = int(options.get("canonicalizemaxdots", 1))
        if named.count(".") > dots or ":" in named or domains == ["none"]:
            return named
        return super().canonicalize(named, options, domains)


def load(paths: Iterable[Path] | None = None) -> SSHConfig:
    """The person's configuration, then the system's (the first value of a keyword wins, as in OpenSSH).

    Raises UsageError naming the file that does not parse.
    """
    config = Config()
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
    # paramiko asks for it wherever names are canonicalized; OpenSSH needs none.
    config.parse(["Host *\n", "CanonicalDomains none\n"])
    return config


def expand_includes(path: Path, depth: int = 0, above: Sequence[str] = ()) -> list[str]:
    """The file's lines as paramiko reads them rightly, those of included files in place; after them the
    enclosing section goes on. `above`: the conditions of the sections in which this file is included, which
    hold for its own sections, too.

    Relative names are below ~/.ssh (or /etc/ssh for the system's file); missing files are passed over.
    Raises UsageError, OSError.
    """
    if depth > MAX_INCLUDE_DEPTH:
        raise UsageError(f"Include goes deeper than {MAX_INCLUDE_DEPTH} files", where=str(path))
    base = SYSTEM_CONFIG.parent if SYSTEM_CONFIG.parent in path.parents else Path("~/.ssh").expanduser()
    lines: list[str] = []
    conditions = list(above)
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        setting = _SETTING.match(line)
        keyword = setting["keyword"].lower() if setting else ""
        value = setting["value"] if setting else ""
        if keyword not in _RAW:
            value = without_comment(value)
        if setting is None:
            lines.append(line + "\n")
        elif not value:
            lines.append(keyword + "\n")  # paramiko refuses it in its own words
        elif keyword == "include":
            for pattern in _words(value, path, number):
                # Not Path.glob: the pattern may be absolute, and `base / absolute` is that.
                for name in sorted(glob(str(base / Path(pattern).expanduser()))):  # noqa: PTH207
                    if Path(name).is_file():
                        lines += [*expand_includes(Path(name), depth + 1, conditions), section(conditions)]
        elif keyword in ("host", "match"):
            conditions = [*above, *_conditions(keyword, _words(value, path, number))]
            lines.append(section(conditions))
        else:
            lines.append(f"{keyword} {_for_paramiko(keyword, value, path, number)}\n")
    return lines


def section(conditions: Sequence[str]) -> str:
    """The line that begins a section: all of these conditions together, each as words of a Match line."""
    telling = [each for each in conditions if each != "all"]
    return f"Match {' '.join(telling)}\n" if telling else "Host *\n"


def _conditions(keyword: str, words: list[str]) -> list[str]:
    """Of a Host or Match line, each as words of a Match line: `Host a b` is `originalhost a,b`."""
    if keyword == "host":
        return [f"originalhost {shlex.quote(','.join(words))}"]
    found = []
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")  # `host=gpu` is `host gpu`
        rest = [value, *rest] if equals else rest
        name = name.lower()
        alone = name.lstrip("!") in ("all", "canonical", "final")
        found.append(name if alone or not rest else f"{name} {shlex.quote(rest.pop(0))}")
    return found


def _for_paramiko(keyword: str, value: str, path: Path, number: int) -> str:
    """A value in the form in which paramiko keeps its meaning: it takes double quotes off both ends, whatever
    stands between, and forgets a `ProxyCommand none`, which forbids a later ProxyJump."""
    if keyword in _FILES:
        return shlex.join(_words(value, path, number))
    if keyword == "proxycommand":
        return '"none"' if value.lower() == "none" else value
    if keyword not in _RAW and ('"' in value or "'" in value):
        words = _words(value, path, number)
        return words[0] if len(words) == 1 and words[0] else value
    return value


def without_comment(value: str) -> str:
    """A value up to a word that begins with `#`, as OpenSSH reads it; quotes may hold one."""
    quote = ""
    for at, character in enumerate(value):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#" and (at == 0 or value[at - 1] in " \t"):
            return value[:at].rstrip()
    return value


def _words(value: str, path: Path, number: int) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise UsageError(f"line {number} cannot be read: {error}", where=str(path)) from error


def expanded(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """A looked-up host with the tokens and ${VARIABLES} of ssh_config(5) in its file names; `name` as the
    person wrote it. A variable that is not set stays as it stands, and so do tokens that are none."""
    user = getpass.getuser()
    machine = socket.gethostname()
    values = {
        "%": "%",
        "d": str(Path("~").expanduser()),
        "h": entry.get("hostname", name),
        "i": str(os.getuid()),
        "k": entry.get("hostkeyalias", name),
        "L": machine.partition(".")[0],
        "l": machine,
        "n": name,
        "p": entry.get("port", SSH_PORT),
        "r": entry.get("user", user),
        "u": user,
    }

    def fill(found: re.Match[str]) -> str:
        if found["token"]:
            return str(values.get(found["token"], found[0]))
        return os.environ.get(found["variable"], found[0])

    result = dict(entry)
    for key in _FILES:
        if key in entry:
            result[key] = shlex.join(_TOKEN.sub(fill, word) for word in shlex.split(entry[key]))
    for key in ("identityagent", "certificatefile"):
        if key in entry:
            result[key] = _TOKEN.sub(fill, entry[key])
    if "identityfile" in entry:
        result["identityfile"] = [_TOKEN.sub(fill, each) for each in entry["identityfile"]]
    return result


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


def certificate_file(entry: dict[str, Any]) -> Path | None:
    """CertificateFile, which belongs to one of the keys. (KEY-cert.pub beside a key is found without it.)"""
    name = str(entry.get("certificatefile") or "none").strip('"')
    return None if name.lower() == "none" else Path(name).expanduser()


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
    """ProxyJump's hops in the order in which they are passed; none for `none` or when it is not set, or when
    a ProxyCommand came first."""
    value = str(entry.get("proxyjump") or "none")
    if value.lower() == "none":
        return []
    keys = list(entry)  # in the order in which they were found
    if "proxycommand" in keys and keys.index("proxycommand") < keys.index("proxyjump"):
        return []
    return [hop.strip() for hop in value.split(",") if hop.strip()]


def _file_list(value: str | None, default: tuple[str, ...]) -> list[str]:
    if value is None:
        return list(default)
    return [name for name in shlex.split(value) if name.lower() != "none"]
