"""A container's configuration file, as pct reads and shows it (docs/pct.md#config)."""

from __future__ import annotations

from dflashctl.lab.pct.errors import Die

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from dflashctl.lab.pct.state import State

_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")
_KEY = _LETTERS | frozenset("_0123456789")
_SECTION = _LETTERS | frozenset("0123456789_-")
_LXC_KEY = _LETTERS | frozenset("0123456789_-.")


class Config:
    """`values` of one section and its raw `lxc` lines. `description` is one of the values, decoded."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lxc: list[tuple[str, str]] = []
        self.delete: list[str] = []
        self._description = ""

    def get(self, key: str, default: str = "") -> str:
        return self.values.get(key, default)

    @property
    def unprivileged(self) -> bool:
        return self.get("unprivileged") not in ("", "0")

    @property
    def template(self) -> bool:
        return self.get("template") not in ("", "0")


class File:
    """The whole file: what is in force, what is pending, and the snapshots."""

    def __init__(self) -> None:
        self.now = Config()
        self.pending = Config()
        self.snapshots: dict[str, Config] = {}


def load(state: State, vmid: int, warn: Callable[[str], None], *, exit_code: int = 2) -> File:
    """Read a container's file. Die when there is none on this node: exit 2, and 255 inside a task."""
    try:
        with open(state.config_path(vmid), encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        name = state.config_name(vmid)
        raise Die(f"Configuration file '{name}' does not exist\n", exit_code) from None
    return parse(text, vmid, warn)


def parse(text: str, vmid: int, warn: Callable[[str], None]) -> File:
    """Parse a file. A line that fits nothing is warned about and ignored."""
    found = File()
    section, pending = found.now, False
    for line in text.split("\n"):
        if not line.strip():
            continue
        head = line.rstrip()
        if head.startswith("[") and head.endswith("]"):
            name = head[1:-1]
            if name.lower() == "pve:pending":
                _finish(section)
                section = found.pending = Config()
                pending = True
                continue
            if name[:1].lower() in _LETTERS and set(name.lower()) <= _SECTION:
                _finish(section)
                section = found.snapshots[name] = Config()
                pending = False
                continue
        _line(section, line, vmid, warn, pending)
    _finish(section)
    return found


def _line(section: Config, line: str, vmid: int, warn: Callable[[str], None], pending: bool) -> None:
    if line.startswith("#"):
        section._description += decode_text(line[1:]) + "\n"
        return
    key, colon, value = line.partition(":")
    if line.startswith("lxc."):
        equals = line.find("=")
        if equals >= 0 and (not colon or equals < len(key)):
            key, _, value = line.partition("=")
            key = key.rstrip()
        if set(key) <= _LXC_KEY and (colon or equals >= 0):
            section.lxc.append((key, value.strip()))
            return
    elif colon and key == "delete" and value.strip():
        if pending:
            section.delete = value.replace(",", " ").replace(";", " ").split()
        else:
            warn(f"vm {vmid} - property 'delete' is only allowed in [pve:pending]\n")
        return
    elif colon and key == "description" and value.strip():
        section._description += decode_text(value.strip())
        return
    elif colon and key[:1] in _LETTERS and _is_key(key) and value.strip():
        section.values[key] = value.strip()
        return
    warn(f"vm {vmid} - unable to parse config: {line}\n")


def _is_key(key: str) -> bool:
    """Letters and underscores, digits only at the end."""
    stem = key.rstrip("0123456789")
    return set(key) <= _KEY and not any(character.isdigit() for character in stem)


def _finish(section: Config) -> None:
    if section._description:
        section.values["description"] = section._description
        section._description = ""


def shown(file: File, *, current: bool) -> Config:
    """What `pct config` shows: the values in force, with pending changes laid over them unless `current`."""
    result = Config()
    result.values = dict(file.now.values)
    result.lxc = list(file.now.lxc)
    if not current:
        result.values.update(file.pending.values)
        for key in file.pending.delete:
            result.values.pop(key.lstrip("!"), None)
    return result


def lines(config: Config) -> list[str]:
    """The lines of `pct config`: keys in order, then the raw lines as they came."""
    listed = []
    for key in sorted(config.values):
        value = config.values[key]
        listed.append(f"{key}: {encode_text(value) if key == 'description' else value}\n")
    return listed + [f"{key}: {value}\n" for key, value in config.lxc]


def encode_text(text: str) -> str:
    """Percent-encode control characters, everything beyond ASCII, `%` and `:`."""
    safe = set(range(0x20, 0x7F)) - set(b"%:")
    return "".join(chr(byte) if byte in safe else f"%{byte:02X}" for byte in text.encode())


def decode_text(text: str) -> str:
    """Undo encode_text. A stray `%` stays."""
    raw, out, i = text.encode(), bytearray(), 0
    while i < len(raw):
        pair = raw[i + 1 : i + 3]
        if raw[i : i + 1] == b"%" and len(pair) == 2 and all(c in b"0123456789abcdefABCDEF" for c in pair):
            out.append(int(pair, 16))
            i += 3
        else:
            out.append(raw[i])
            i += 1
    return out.decode("utf-8", "replace")
