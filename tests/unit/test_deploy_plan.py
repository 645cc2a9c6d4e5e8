"""What a deploy decides from facts: pure, so each case is a table row.

Run: python -m pytest tests/unit/test_deploy_plan.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent.releases.proofs import compile_source
from dflashctl.agent.releases.release import FILE
from dflashctl.errors import VerificationFailed
from dflashctl.releases.deployplan import DeployPlan, LocalCompile, minor, plan_deploy
from dflashctl.releases.sources import Snapshot, SourceFile
from dflashctl.views.deploy import title

FILES = (
    SourceFile("a.py", "a" * 64, FILE, 10_000),
    SourceFile("b.py", "b" * 64, FILE, 2_000),
    SourceFile("c/b.py", "b" * 64, FILE, 2_000),
    SourceFile("l", "c" * 64, "120000", 4, link="a.py"),
)
SNAPSHOT = Snapshot(Path("/nowhere"), FILES, None)
GOOD = LocalCompile("3.11.7", 3)


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "python": "/root/venv/bin/python",
        "python_version": "3.11.2",
        "free_bytes": 10**12,
        "free_inodes": None,
        "current": None,
        "previous": None,
        "releases": [],
        "have": [],
        "lock": None,
        **changes,
    }


def plan(local: LocalCompile = GOOD, **changes: Any) -> DeployPlan:
    return plan_deploy(SNAPSHOT, facts(**changes), local)


def test_a_first_deploy_sends_everything_but_links() -> None:
    made = plan()
    assert [file.path for file in made.send] == ["a.py", "b.py", "c/b.py"]
    assert made.send_bytes == 12_000, "a content that is there twice travels once"
    assert (made.exists, made.before, made.is_current) == (False, None, False)


def test_only_what_is_lacking_is_sent() -> None:
    made = plan(have=["b" * 64], current="f" * 64, releases=[{"release": "f" * 64}])
    assert [file.path for file in made.send] == ["a.py"]
    assert made.actions() == [
        "send 1 of 4 files, 10 kB unpacked",
        f"unpack release {SNAPSHOT.release[:8]}, taking 3 files from releases that are there",
        "prove it with /root/venv/bin/python: sha256, compile, expect, import",
        f"switch current -> {SNAPSHOT.release[:8]} (now: ffffffff)",
    ]


def test_what_is_current_is_only_verified() -> None:
    name = SNAPSHOT.release
    made = plan(have=["a" * 64, "b" * 64], current=name, releases=[{"release": name}])
    assert made.send == ()
    assert made.is_current
    assert made.actions()[0] == f"verify 4 files of release {name[:8]}, which is there"
    assert made.actions()[-1] == f"leave current -> {name[:8]} as it is"


def test_a_syntax_error_that_this_python_may_judge_stops_everything() -> None:
    broken = LocalCompile("3.11.7", 3, ("a.py:3: SyntaxError: invalid syntax\n    def x(:",))
    with pytest.raises(VerificationFailed) as caught:
        plan(broken)
    assert caught.value.exit_code == 4
    assert "nothing was sent" in caught.value.what
    assert "a.py:3: SyntaxError" in caught.value.what
    assert "def x(:" in caught.value.what


def test_another_python_inside_decides_in_our_place() -> None:
    broken = LocalCompile("3.11.7", 3, ("a.py:3: SyntaxError: invalid syntax",))
    made = plan(broken, python_version="3.12.1")
    assert made.send
    assert made.warnings == (
        "does not compile here with Python 3.11.7; Python 3.12.1 inside decides\n"
        "a.py:3: SyntaxError: invalid syntax",
    )
    assert minor("3.12.0rc1") == "3.12"


def test_no_space_is_said_before_anything_travels() -> None:
    need = plan().need_bytes
    assert plan(free_bytes=need).need_bytes == need
    with pytest.raises(VerificationFailed, match=r"not enough space: .* 1\.0 kB are free; nothing was sent"):
        plan(free_bytes=1000)
    with pytest.raises(VerificationFailed):
        plan(free_bytes=need - 1)


def test_no_inodes_is_said_too() -> None:
    with pytest.raises(VerificationFailed, match="not enough inodes"):
        plan(free_inodes=3)
    assert plan(free_inodes=1000).send


def test_a_release_that_is_there_needs_no_space() -> None:
    assert plan(releases=[{"release": SNAPSHOT.release}], have=["a" * 64, "b" * 64], free_bytes=0).exists


def test_the_title_names_commit_and_changes() -> None:
    git = {"commit": "1c9e4d77", "dirty": True}
    assert (
        title("ct200", "warm", "7f3a91c2" + "0" * 56, git, 2)
        == "ct200 · warm · release 7f3a91c2 (git 1c9e4d7, 2 files changed)"
    )
    assert title("h", "r", "7f3a91c2" + "0" * 56, {"commit": "1c9e4d77", "dirty": False}, 0).endswith(
        "(git 1c9e4d7)"
    )
    assert title("h", "r", "7f3a91c2" + "0" * 56, None, 0) == "h · r · release 7f3a91c2"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (b"x = 1\n# caf\xe9\n", 2),
        (b"#!/usr/bin/python\n\nx = 1  # caf\xe9\n", 3),
        (b"# -*- coding: latin-1 -*-\nx = 1  # caf\xe9\n", None),
        (b"#!/usr/bin/python\n# vim: set fileencoding=latin-1 :\nx = 'caf\xe9'\n", None),
        (b"\xef\xbb\xbfx = 1\r\n", None),
        ("x = 'café'\n".encode(), None),
    ],
)
def test_code_is_refused_where_python_would_refuse_to_run_it(
    tmp_path: Path, source: bytes, line: int | None
) -> None:
    """compile() takes a comment that is no UTF-8; `python FILE` does not."""
    (tmp_path / "a.py").write_bytes(source)
    ran = subprocess.run([sys.executable, "-S", str(tmp_path / "a.py")], capture_output=True)
    problem = compile_source(source, "a.py")
    assert (problem is None) == (ran.returncode == 0) == (line is None)
    assert problem is None or problem.startswith(f"a.py:{line}: SyntaxError: Non-UTF-8 code")


def test_a_release_without_its_commit_is_said() -> None:
    silent = Snapshot(Path("/nowhere"), FILES, None, "git is not installed")
    made = plan_deploy(silent, facts(), GOOD)
    assert made.warnings == ("no commit is recorded with this release: git is not installed",)
    assert plan().warnings == ()
