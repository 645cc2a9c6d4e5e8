"""pct's command table: names, arguments, parameters, usage lines, and how a command line becomes parameters.

Order of checks as observed (docs/pct.md#front-end): options, number of arguments, booleans, then each
parameter.
"""

from __future__ import annotations

from dflashctl.lab.pct import getopt
from dflashctl.lab.pct.errors import Die, ParameterError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Value = str | bool | int | list[str]


class Parameter:
    """`kind`: vmid, string, boolean, integer (not negative) or rest (everything that is left)."""

    __slots__ = ("kind", "since")

    def __init__(self, kind: str, since: tuple[int, ...] = ()) -> None:
        self.kind = kind
        self.since = since


class Command:
    """`positional` are the names of arguments in order; `group` is what pct's usage list is sorted by; `tail`
    is the usage line after the command's name, where it cannot be derived (commands that this stand-in does
    not have)."""

    __slots__ = ("group", "known", "parameters", "positional", "since", "tail")

    def __init__(
        self,
        group: str,
        positional: str = "",
        parameters: Mapping[str, Parameter] | None = None,
        *,
        tail: str | None = None,
        since: tuple[int, ...] = (),
    ) -> None:
        self.group = group
        self.positional = positional.split()
        self.parameters = dict(parameters or {})
        self.known = tail is None
        self.tail = tail
        self.since = since

    def usage(self, prefix: str, version: tuple[int, ...]) -> str:
        """The one-line usage, for instance `pct push <vmid> <file> <destination> [OPTIONS]`."""
        if self.tail is not None:
            tail = self.tail if version >= self.since else self.tail.removesuffix(" [OPTIONS]")
            return f"{prefix} {tail}\n"
        names = [f"[<{name}>]" if name == "extra-args" else f"<{name}>" for name in self.positional]
        has_options = any(name not in self.positional for name in self.available(version))
        return f"{prefix} {' '.join(names)}{' [OPTIONS]' if has_options else ''}\n"

    def available(self, version: tuple[int, ...]) -> dict[str, Parameter]:
        return {name: p for name, p in self.parameters.items() if version >= p.since}


_STRING = Parameter("string")
_SWITCH = Parameter("boolean")
_VMID = {"vmid": Parameter("vmid")}
_COPY = {"destination": _STRING, "user": _STRING, "group": _STRING, "perms": _STRING}
_SKIPLOCK = {"skiplock": _SWITCH}

# Groups in the order of pct's own usage list, which goes by the Perl class behind a command.
_LXC, _CONFIG, _SNAPSHOT, _STATUS, _LOCAL, _HELP = (
    "lxc",
    "lxc-config",
    "lxc-snapshot",
    "lxc-status",
    "own",
    "zz",
)

COMMANDS: dict[str, Command] = {
    "list": Command(_LXC),
    "config": Command(_CONFIG, "vmid", {**_VMID, "current": _SWITCH, "snapshot": _STRING}),
    "start": Command(_STATUS, "vmid", {**_VMID, **_SKIPLOCK, "debug": _SWITCH}),
    "stop": Command(
        _STATUS,
        "vmid",
        {**_VMID, **_SKIPLOCK, "overrule-shutdown": Parameter("boolean", since=(5, 0, 10))},
    ),
    "shutdown": Command(_STATUS, "vmid", {**_VMID, "timeout": Parameter("integer"), "forceStop": _SWITCH}),
    "reboot": Command(_STATUS, "vmid", {**_VMID, "timeout": Parameter("integer")}),
    "suspend": Command(_STATUS, "vmid", _VMID),
    "resume": Command(_STATUS, "vmid", _VMID),
    "status": Command(_LOCAL, "vmid", {**_VMID, "verbose": _SWITCH}),
    "exec": Command(
        _LOCAL,
        "vmid extra-args",
        {**_VMID, "keep-env": Parameter("boolean", since=(5, 0, 9)), "extra-args": Parameter("rest")},
    ),
    "push": Command(_LOCAL, "vmid file destination", {**_VMID, "file": _STRING, **_COPY}),
    "pull": Command(_LOCAL, "vmid path destination", {**_VMID, "path": _STRING, **_COPY}),
}

# The rest of the real command list: part of the usage text, and of what a shortened name may mean.
_ABSENT = {
    _LXC: {
        "clone": "<vmid> <newid> [OPTIONS]",
        "create": "<vmid> <ostemplate> [OPTIONS]",
        "destroy": "<vmid> [OPTIONS]",
        "migrate": "<vmid> <target> [OPTIONS]",
        "move-volume": "<vmid> <volume> [<storage>] [<target-vmid>] [<target-volume>] [OPTIONS]",
        "pending": "<vmid>",
        "resize": "<vmid> <disk> <size> [OPTIONS]",
        "restore": "<vmid> <ostemplate> [OPTIONS]",
        "template": "<vmid>",
    },
    _CONFIG: {"set": "<vmid> [OPTIONS]"},
    _SNAPSHOT: {
        "delsnapshot": "<vmid> <snapname> [OPTIONS]",
        "listsnapshot": "<vmid>",
        "rollback": "<vmid> <snapname> [OPTIONS]",
        "snapshot": "<vmid> <snapname> [OPTIONS]",
    },
    _LOCAL: {
        "console": "<vmid> [OPTIONS]",
        "cpusets": "",
        "df": "<vmid>",
        "enter": "<vmid> [OPTIONS]",
        "fsck": "<vmid> [OPTIONS]",
        "fstrim": "<vmid> [OPTIONS]",
        "mount": "<vmid>",
        "remote-migrate": "<vmid> [<target-vmid>] <target-endpoint> --target-bridge <string>"
        " --target-storage <string> [OPTIONS]",
        "rescan": " [OPTIONS]",
        "unlock": "<vmid>",
        "unmount": "<vmid>",
    },
    _HELP: {"help": "[<extra-args>] [OPTIONS]"},
}
for _group, _tails in _ABSENT.items():
    for _name, _tail in _tails.items():
        COMMANDS[_name] = Command(_group, tail=_tail, since=(5, 0, 9) if _name == "enter" else ())


def find(word: str, version: tuple[int, ...]) -> tuple[str, Command]:
    """The command that a word means: its name, or a beginning that only one name has."""
    if not word:
        raise Die(usage_list("no command specified", version))
    if word in COMMANDS:
        return word, COMMANDS[word]
    hits = [name for name in COMMANDS if name.startswith(word)]
    if len(hits) == 1:
        return hits[0], COMMANDS[hits[0]]
    if hits:
        raise Die(usage_list(f"incomplete command 'pct {word}'", version, word))
    raise Die(usage_list(f"unknown command 'pct {word}'", version))


def usage_list(problem: str, version: tuple[int, ...], under: str = "") -> str:
    """What pct says when it does not know what to do. With an ambiguous beginning (`under`) the real list
    puts that word before every command and has no blank lines."""
    lines = [f"ERROR: {problem}", "USAGE: pct <COMMAND> [ARGS] [OPTIONS]", ""]
    group = ""
    for name in sorted(COMMANDS, key=lambda name: (COMMANDS[name].group, name)):
        command = COMMANDS[name]
        if group and command.group != group and not under:
            lines.append("")
        group = command.group
        prefix = f"pct {under} {name}" if under else f"pct {name}"
        lines.append("       " + command.usage(prefix, version).removesuffix("\n"))
    return "\n".join(lines) + "\n"


def parameters(
    command: Command, args: Sequence[bytes], codec: str, version: tuple[int, ...], *, posix: bool = False
) -> dict[str, Value]:
    """Parameters from a command line, decoded as the caller's locale says. Raises ParameterError."""
    available = command.available(version)
    options = {
        name: getopt.Option(optional=p.kind == "boolean", many=p.kind == "rest")
        for name, p in available.items()
    }
    parsed = getopt.parse(args, options, posix=posix)
    if parsed.warnings:
        error = ParameterError("unable to parse option\n")
        error.text = b"".join(parsed.warnings).decode("latin-1") + error.text
        raise error
    words: dict[str, bytes | list[bytes]] = dict(parsed.values)
    _place(command, list(parsed.rest), words)
    values: dict[str, Value] = {}
    for name, raw in words.items():
        if isinstance(raw, list):
            values[name] = [item.decode(codec, "replace") for item in raw]
        else:
            values[name] = raw.decode(codec, "replace")
    for name, value in values.items():
        if available[name].kind == "boolean":
            values[name] = _boolean(str(value))
    problems = [text for name, value in values.items() if (text := _problem(name, available[name], value))]
    if problems:
        raise ParameterError("Parameter verification failed.\n" + "".join(problems))
    for name, value in values.items():
        if available[name].kind in ("vmid", "integer"):
            values[name] = int(str(value))
    return values


def _place(command: Command, rest: list[bytes], words: dict[str, bytes | list[bytes]]) -> None:
    """Give the words that are no options to the command's arguments, in order."""
    if rest:
        for name in command.positional:
            if words.get("extra-args"):
                raise ParameterError("internal error: extra-args must be the last argument\n")
            if name == "extra-args":
                words[name] = rest
                return
            if not rest:
                raise ParameterError("not enough arguments\n")
            words[name] = rest.pop(0)
        if rest:
            raise ParameterError("too many arguments\n")
        return
    for name in command.positional:
        if name != "extra-args":  # `--vmid 200` alone does not count either
            raise ParameterError("not enough arguments\n")
        words[name] = []


def _boolean(value: str) -> bool:
    if value == "" or value.lower() in ("1", "on", "yes", "true"):
        return True
    if value.lower() in ("0", "off", "no", "false"):
        return False
    raise ParameterError("unable to parse boolean option\n")


def _problem(name: str, parameter: Parameter, value: Value) -> str:
    if parameter.kind not in ("vmid", "integer"):
        return ""
    text = str(value)
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not (digits.isascii() and digits.isdigit()):
        return f"{name}: type check ('integer') failed - got '{text}'\n"
    if parameter.kind == "vmid" and not (text == digits and 3 <= len(text) <= 9 and text[0] != "0"):
        return f"{name}: invalid format - value does not look like a valid VM ID\n\n"
    if parameter.kind == "integer" and int(text) < 0:
        return f"{name}: value must have a minimum value of 0\n"
    return ""
