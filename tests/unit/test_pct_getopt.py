"""pct's option parser against Perl's Getopt::Long, which the real pct uses."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.lab.pct import getopt
from dflashctl.lab.pct.getopt import Option

COMMANDS = {
    "push": {name: Option() for name in ("vmid", "file", "destination", "user", "group", "perms")},
    "pull": {name: Option() for name in ("vmid", "path", "destination", "user", "group", "perms")},
    "exec": {"vmid": Option(), "keep-env": Option(optional=True), "extra-args": Option(many=True)},
    "shutdown": {"vmid": Option(), "timeout": Option(), "forceStop": Option(optional=True)},
    "status": {"vmid": Option(), "verbose": Option(optional=True)},
}

PERL = r"""
use Getopt::Long; Getopt::Long::Configure('prefix_pattern=(--|-)');
$| = 1;
while (my $line = <STDIN>) {
chomp $line; my @words = split /\0/, pack('H*', $line), -1; pop @words;
my @spec; while (@words && $words[0] ne '::') { push @spec, shift @words } shift @words;
my ($warned, $got) = ('', {}); local $SIG{__WARN__} = sub { $warned .= $_[0] };
my $ok = Getopt::Long::GetOptionsFromArray(\@words, $got, @spec);
my $told = ($ok ? 1 : 0) . "\0" . length($warned) . "\0$warned";
for my $name (sort keys %$got) {
    $told .= "$name=$_\0" for ref $got->{$name} ? @{$got->{$name}} : $got->{$name};
}
$told .= "::\0"; $told .= "$_\0" for @words;
print unpack('H*', $told), "\n";
}
"""


@pytest.fixture(scope="module")
def perls() -> Iterator[dict[bool, subprocess.Popen[str]]]:
    """One perl for each setting of POSIXLY_CORRECT: it answers a line (hex) with a line."""
    started = {}
    for posix in (False, True):
        env = {"PATH": "/usr/bin:/bin", **({"POSIXLY_CORRECT": "1"} if posix else {})}
        started[posix] = subprocess.Popen(
            ["perl", "-e", PERL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )
    yield started
    for perl in started.values():
        perl.communicate(timeout=30)


def perl_parses(
    perl: subprocess.Popen[str], options: dict[str, Option], args: list[bytes]
) -> tuple[bool, bytes, bytes, list[bytes]]:
    """(accepted, warnings, values as name=value NUL, rest) as Getopt::Long has it."""
    spec = [f"{name}{':' if o.optional else '='}s{'@' if o.many else ''}" for name, o in options.items()]
    words = [word.encode() for word in spec] + [b"::", *args]
    assert perl.stdin is not None and perl.stdout is not None
    perl.stdin.write(b"".join(word + b"\0" for word in words).hex() + "\n")
    perl.stdin.flush()
    out = bytes.fromhex(perl.stdout.readline())
    ok, length, rest = out.split(b"\0", 2)
    values, _, left = rest[int(length) :].partition(b"::\0")
    return ok == b"1", rest[: int(length)], values, left.split(b"\0")[:-1]


def we_parse(
    options: dict[str, Option], args: list[bytes], posix: bool
) -> tuple[bool, bytes, bytes, list[bytes]]:
    parsed = getopt.parse(args, options, posix=posix)
    values = b""
    for name in sorted(parsed.values):
        value = parsed.values[name]
        for item in value if isinstance(value, list) else [value]:
            values += name.encode() + b"=" + item + b"\0"
    return not parsed.warnings, b"".join(parsed.warnings), values, parsed.rest


NAMES = [name.encode() for options in COMMANDS.values() for name in options]
WORDS = st.one_of(
    st.sampled_from([b"200", b"--", b"-", b"", b"---", b"--=", b"--=x", b"-=", b"=", b"a b", b"+x", b"-5"]),
    st.builds(
        lambda dashes, name, cut, upper, value: dashes + (name.upper() if upper else name)[:cut] + value,
        st.sampled_from([b"-", b"--"]),
        st.sampled_from(NAMES),
        st.integers(1, 12),
        st.booleans(),
        st.sampled_from([b"", b"=", b"=1", b"=a=b", b"=--"]),
    ),
    st.binary(max_size=4).map(lambda raw: raw.replace(b"\0", b"").replace(b"::", b"")),
)


@pytest.mark.skipif(shutil.which("perl") is None, reason="compares with Perl's Getopt::Long; no perl here")
@settings(max_examples=400, deadline=None, derandomize=True)
@given(command=st.sampled_from(sorted(COMMANDS)), args=st.lists(WORDS, max_size=6), posix=st.booleans())
def test_any_command_line_is_parsed_as_perl_parses_it(
    perls: dict[bool, subprocess.Popen[str]], command: str, args: list[bytes], posix: bool
) -> None:
    options = COMMANDS[command]
    assert we_parse(options, args, posix) == perl_parses(perls[posix], options, args)


@pytest.mark.parametrize(
    ("args", "values", "rest"),
    [
        ("--keep-env 101 -- true", {"keep-env": b"101"}, ["true"]),
        ("101 --keep-env -- true", {"keep-env": b""}, ["101", "true"]),
        ("--keep-env=1 101 -- --x", {"keep-env": b"1"}, ["101", "--x"]),
        ("101 ls -k=0 x", {"keep-env": b"0"}, ["101", "ls", "x"]),
    ],
)
def test_a_boolean_takes_the_next_word(args: str, values: dict[str, bytes], rest: list[str]) -> None:
    parsed = getopt.parse(args.encode().split(), COMMANDS["exec"])
    assert (parsed.values, parsed.rest, parsed.warnings) == (values, [word.encode() for word in rest], [])
