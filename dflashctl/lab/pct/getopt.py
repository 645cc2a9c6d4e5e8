"""Option parsing as Perl's Getopt::Long does it in the configuration that pct uses (docs/pct.md#options).

Prefix `--` or `-`; options and arguments may be mixed; names may be shortened while they stay unique, and
case does not count; a boolean takes the next word as its value unless that word looks like an option. Works
on bytes: decoding comes afterwards. tests/unit/test_pct_getopt.py compares it with Perl's own on random
command lines.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Option:
    """`optional`: its value may be left out (booleans). `many`: values pile up in a list."""

    __slots__ = ("many", "optional")

    def __init__(self, *, optional: bool = False, many: bool = False) -> None:
        self.optional = optional
        self.many = many


class Parsed:
    """`warnings` are for stderr; when there is one the command line is refused."""

    __slots__ = ("rest", "values", "warnings")

    def __init__(self) -> None:
        self.values: dict[str, bytes | list[bytes]] = {}
        self.rest: list[bytes] = []
        self.warnings: list[bytes] = []


def parse(args: Sequence[bytes], options: Mapping[str, Option], *, posix: bool = False) -> Parsed:
    """Parse a command line. `posix` is what the environment variable POSIXLY_CORRECT does to Getopt::Long:
    the first argument ends the options, names must be whole, and `-name=value` is not taken apart."""
    parsed = Parsed()
    queue = list(args)
    while queue:
        word = queue.pop(0)
        if word == b"--":
            break
        if not _looks_like_option(word):
            if posix:
                queue.insert(0, word)
                break
            parsed.rest.append(word)
            continue
        _take(word, queue, options, parsed, posix)
    parsed.rest += queue
    return parsed


def _looks_like_option(word: bytes) -> bool:
    return word.startswith(b"-") and word != b"-"


def _take(
    word: bytes, queue: list[bytes], options: Mapping[str, Option], parsed: Parsed, posix: bool
) -> None:
    long = word.startswith(b"--")
    given = word[2:] if long else word[1:]
    value: bytes | None = None
    # An `=` in the first place belongs to the name.
    if (long or not posix) and (equals := given.find(b"=", 1)) > 0:
        given, value = given[:equals], given[equals + 1 :]
    name = _full_name(given, options, parsed, posix)
    if name is None:
        return
    option = options[name]
    if value is None and queue and not (option.optional and _looks_like_option(queue[0])):
        value = queue.pop(0)
        if not option.optional or value:  # a mandatory value may be anything: empty, `--`, another option
            _store(parsed, name, option, value)
            return
    if not value and not option.optional:  # nothing follows, or `--perms=`
        parsed.warnings.append(b"Option " + name.lower().encode() + b" requires an argument\n")
        return
    _store(parsed, name, option, value or b"")


def _full_name(given: bytes, options: Mapping[str, Option], parsed: Parsed, posix: bool) -> str | None:
    # Names may hold capitals (forceStop); Getopt::Long keeps its table in small letters.
    table = {name.lower().encode(): name for name in options}
    small = given.lower()
    if small in table:
        return table[small]
    hits = [] if posix else sorted(name for name in table if name.startswith(small))
    if len(hits) == 1:
        return table[hits[0]]
    if hits:
        parsed.warnings.append(b"Option " + small + b" is ambiguous (" + b", ".join(hits) + b")\n")
    else:
        parsed.warnings.append(b"Unknown option: " + (given if posix else small) + b"\n")
    return None


def _store(parsed: Parsed, name: str, option: Option, value: bytes) -> None:
    if option.many:
        have = parsed.values.setdefault(name, [])
        assert isinstance(have, list)
        have.append(value)
    else:
        parsed.values[name] = value
