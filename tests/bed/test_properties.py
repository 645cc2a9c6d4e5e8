"""Anything survives the way laptop -> ssh -> host shell -> pct -> container unchanged, or is refused with a
clear error before anything runs there.

Fixed seeds: the fast samples are the same everywhere; `-m soak` runs the long campaign with fresh ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bedkit.bed import Bed
from bedkit.project import Project
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dflashctl.config.hosts import HostEntry, complete
from dflashctl.errors import DflashError, UsageError, VerificationFailed
from dflashctl.remote.engine import Engine
from dflashctl.remote.factory import open_engine

pytestmark = pytest.mark.bed

_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
    "database": None,
}
FAST = settings(max_examples=25, derandomize=True, phases=[Phase.explicit, Phase.generate], **_COMMON)
LONG = settings(max_examples=1500, derandomize=False, print_blob=True, **_COMMON)

# What shells, ssh, env, getopt and terminals could stumble over, mixed with anything at all.
AWKWARD = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "\\",
    "\\\\'",
    "$HOME",
    "${IFS}",
    "`id`",
    "$(id)",
    "*",
    "?",
    "[a-z]*",
    "~",
    "~root",
    "!",
    "!!",
    "#",
    ";",
    "&",
    "|",
    "<",
    ">",
    "(",
    "{a,b}",
    "\n",
    "a\nb\n",
    "\r\n",
    "\t",
    "\x1b[31m",
    "\x7f",
    "-",
    "--",
    "-n",
    "--keep-env=0",
    "A=b",
    "%s%n",
    "é",
    "日本",
    "\U0001f600",
    "\ufffd",
    "\u202e",
    "\ud800",
    "\0",
]
TEXT = st.one_of(
    st.sampled_from(AWKWARD),
    st.lists(st.sampled_from(AWKWARD), min_size=2, max_size=5).map("".join),
    st.text(alphabet=st.characters(min_codepoint=1, max_codepoint=127), max_size=60),
    st.text(max_size=40),
    st.integers(1, 140000).map(lambda n: "x" * n),
)
SHOW = (
    "import os, sys; open('/workspace/ran', 'a').close(); print([os.fsencode(a).hex() for a in sys.argv[1:]])"
)


@pytest.fixture
def engine(bed: Bed) -> Iterator[Engine]:
    host = complete("bed", HostEntry.model_validate(bed.host_entry()))
    with open_engine(host) as engine:
        yield engine


def ran(bed: Bed) -> bool:
    """Whether the program inside has run; forgets it."""
    script = 'test -e "$1" && rm -f "$1"'
    return bed.inside("main", ["sh", "-c", script, "sh", "/workspace/ran"], check=False).returncode == 0


def refused_before_it_ran(bed: Bed, error: DflashError) -> None:
    assert isinstance(error, UsageError), f"{type(error).__name__}: {error}"
    assert len(str(error)) > 20 and str(error).isprintable() | ("\nnext: " in str(error))
    assert not ran(bed), "refused, but it ran"


def check_argv(bed: Bed, engine: Engine, words: list[str]) -> None:
    try:
        done = engine.run([sys.executable, "-I", "-c", SHOW, *words], timeout_s=30)
    except DflashError as error:
        refused_before_it_ran(bed, error)
        return
    assert done.exit_code == 0, done.stderr
    assert done.stdout.decode().strip() == str([w.encode().hex() for w in words])
    assert ran(bed)


@FAST
@given(words=st.lists(TEXT, max_size=6))
def test_any_argv(bed: Bed, engine: Engine, words: list[str]) -> None:
    check_argv(bed, engine, words)


@pytest.mark.soak
@LONG
@given(words=st.lists(TEXT, max_size=12))
def test_any_argv_long(bed: Bed, engine: Engine, words: list[str]) -> None:
    check_argv(bed, engine, words)


def test_every_awkward_word(bed: Bed, engine: Engine) -> None:
    """All of them in two calls: those that can travel together, each of the others refused."""
    travels = [w for w in AWKWARD if w.isascii() and "\0" not in w]
    check_argv(bed, engine, travels)
    for word in set(AWKWARD) - set(travels):
        with pytest.raises(UsageError):
            engine.run(["true", word], timeout_s=10)


def test_a_program_whose_name_holds_an_equals_sign(bed: Bed, engine: Engine) -> None:
    """env(1) would read it as one more variable."""
    bed.inside(
        "main", ["sh", "-c", "printf '#!/bin/sh\\necho it ran\\n' > /workspace/a=b; chmod 755 /workspace/a=b"]
    )
    with contextlib.suppress(UsageError):
        done = engine.run(["/workspace/a=b", "/bin/echo", "somebody else"], timeout_s=10)
        assert done.stdout == b"it ran\n"


def check_streams(engine: Engine, data: bytes) -> None:
    code = "import sys; b = sys.stdin.buffer.read()\n"
    code += "sys.stdout.buffer.write(b); sys.stderr.buffer.write(b[::-1])"
    done = engine.run([sys.executable, "-I", "-c", code], stdin=data, timeout_s=30)
    assert (done.exit_code, done.stdout, done.stderr) == (0, data, data[::-1])


@FAST
@given(data=st.binary(max_size=5000))
def test_any_bytes_on_the_three_streams(engine: Engine, data: bytes) -> None:
    check_streams(engine, data)


@pytest.mark.soak
@LONG
@given(data=st.binary(max_size=300000))
def test_any_bytes_on_the_three_streams_long(engine: Engine, data: bytes) -> None:
    check_streams(engine, data)


def test_megabytes_on_all_three_streams_at_once(engine: Engine) -> None:
    """More than any pipe or window holds: reading one stream at a time would stand still here."""
    data = bytes(range(256)) * 40000
    check_streams(engine, data)


def check_file(bed: Bed, engine: Engine, folder: Path, name: str, data: bytes, mode: int) -> None:
    source, back = folder / "source", folder / "back"
    source.write_bytes(data)
    destination = f"/workspace/files/{name}"
    bed.inside("main", ["sh", "-c", "rm -rf /workspace/files; mkdir /workspace/files"])
    try:
        engine.put(source, destination, mode=mode, timeout_s=30)
    except DflashError as error:
        assert isinstance(error, (UsageError, VerificationFailed)), error
        assert bed.inside("main", ["ls", "-A", "/workspace/files"]).stdout == b""
        return
    digest = hashlib.sha256(data).hexdigest()
    # Found by listing, not by name, so that this check does not go the way that it checks.
    find = [
        "sh",
        "-c",
        "cd /workspace/files && find . -mindepth 1 -printf x;echo;sha256sum ./* ./.[!.]* ./..?* 2>/dev/null",
    ]
    told = bed.inside("main", find, check=False).stdout.decode(errors="surrogateescape")
    assert told.startswith("x\n") and digest in told, (name, told)
    engine.get(destination, back, timeout_s=30)
    assert back.read_bytes() == data


FILE_NAME = TEXT.filter(lambda t: len(t) < 100 and "/" not in t and t not in ("", ".", ".."))


@settings(FAST, max_examples=12)
@given(name=FILE_NAME, data=st.binary(max_size=2000), mode=st.sampled_from([0o644, 0o600, 0o755]))
def test_any_file(bed: Bed, engine: Engine, tmp_path: Path, name: str, data: bytes, mode: int) -> None:
    check_file(bed, engine, tmp_path, name, data, mode)


@pytest.mark.soak
@settings(LONG, max_examples=400)
@given(name=FILE_NAME, data=st.binary(max_size=200000), mode=st.sampled_from([0o644, 0o600, 0o755]))
def test_any_file_long(bed: Bed, engine: Engine, tmp_path: Path, name: str, data: bytes, mode: int) -> None:
    check_file(bed, engine, tmp_path, name, data, mode)


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 3_000_001])
def test_files_of_odd_sizes(bed: Bed, engine: Engine, tmp_path: Path, size: int) -> None:
    data = hashlib.shake_256(b"odd").digest(size)
    check_file(bed, engine, tmp_path, "odd.bin", data, 0o644)


@pytest.mark.parametrize("destination", ["/workspace/nowhere/file", "/workspace", "/proc/version"])
def test_a_push_that_cannot_work_is_a_failure(engine: Engine, tmp_path: Path, destination: str) -> None:
    """`pct push` exits with 0 for all of these."""
    (tmp_path / "file").write_text("text")
    with pytest.raises(VerificationFailed, match="pct push"):
        engine.put(tmp_path / "file", destination, timeout_s=30)


VALUES = [w for w in AWKWARD if "\0" not in w and "\ud800" not in w] + ["y" * 100000]


def literal(text: str) -> str:
    """Text for a recipe: what looks like a placeholder is meant as it is."""
    return re.sub(r"\{([A-Za-z_]\w*)\}", r"{{\1}}", text)


def test_any_environment_value_and_argument_of_a_run(bed: Bed, tmp_path: Path) -> None:
    """Through recipe, agent and supervisor: one launch carries every awkward value, as environment and as
    argument."""
    check_run(bed, tmp_path / "project", VALUES)


@settings(FAST, max_examples=3)
@given(values=st.lists(TEXT.filter(lambda text: travels_in_a_run(text)), min_size=10, max_size=20))
def test_any_drawn_environment_values_and_arguments_of_a_run(
    bed: Bed, tmp_path_factory: pytest.TempPathFactory, values: list[str]
) -> None:
    check_run(bed, tmp_path_factory.mktemp("drawn") / "project", values)


def travels_in_a_run(text: str) -> bool:
    """What an operating system can carry: no NUL, no half character, less than 128 KiB."""
    return "\0" not in text and len(text) < 50_000 and not any("\ud800" <= c <= "\udfff" for c in text)


def check_run(bed: Bed, folder: Path, values: list[str]) -> None:
    project = Project(folder, {"bed": bed.host_entry()})
    environment = {f"AWKWARD_{n}": value for n, value in enumerate(values)}
    code = (
        "import json, os, sys; "
        "e = {k: v for k, v in os.environ.items() if k.startswith('AWKWARD')}; "
        "json.dump([e, sys.argv[1:]], open('/workspace/seen', 'w'))"
    )
    command = ["python", "-c", code, *map(literal, values)]
    escaped = {name: literal(value) for name, value in environment.items()}
    project.write_recipe("steady", command=command, env=escaped, gpus={"count": 0})
    project.ok("deploy")
    bed.inside("main", ["rm", "-f", "/workspace/seen"])
    project.run("launch", "--tag", "values", "--wait")
    done = bed.inside("main", ["cat", "/workspace/seen"])
    seen_environment, seen_words = json.loads(done.stdout)
    assert seen_words == values
    assert seen_environment == environment


@pytest.mark.parametrize("value", ["a\0b", "\ud800"])
def test_what_no_environment_can_carry_is_refused(bed: Bed, tmp_path: Path, value: str) -> None:
    project = Project(tmp_path / "project", {"bed": bed.host_entry()})
    project.write_recipe("steady")
    project.ok("deploy")
    project.write_recipe("steady", env={"BAD": value})
    done = project.run("launch", "--tag", "bad")
    assert done.returncode == 2 and "BAD" in done.stderr and "Traceback" not in done.stderr
    assert bed.gpu_holders() == []
