"""What a deploy inside refuses, and that a refusal leaves the old release and nothing else.

Run: python -m pytest tests/unit/test_install_refusals.py
"""

from __future__ import annotations

import io
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent import AgentError
from dflashctl.agent.releases import install, release
from dflashctl.agent.releases import tree as agent_tree

sys.path.insert(0, str(Path(__file__).parent))

from install_box import Box, Emit, refused, unharmed


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


@pytest.fixture
def running(box: Box) -> tuple[Box, str]:
    """A box with a current release; a failing deploy must leave exactly this."""
    return box, box.deploy()["release"]


# --- proofs that fail ---------------------------------------------------------------------------------------


def test_a_syntax_error_is_shown_with_its_line_and_nothing_switches(running: tuple[Box, str]) -> None:
    box, name = running
    box.write("prog/a.py", "ok = 1\ndef broken(:\n")
    with refused() as caught:
        box.deploy()
    assert "prog/a.py:2: SyntaxError: " in caught[0].what
    assert "def broken(:" in caught[0].what
    assert "; nothing was switched:\n" in caught[0].what and "mend the file" in caught[0].next
    unharmed(box, name)


def test_a_missing_expected_line_names_the_nearest(running: tuple[Box, str]) -> None:
    box, name = running
    box.write("prog/a.py", "import os\ngraphs  = Falsch\n")
    with refused() as caught:
        box.deploy(expect=[{"file": "prog/a.py", "text": "graphs = False", "regex": None, "present": True}])
    assert "prog/a.py: no line has: graphs = False" in caught[0].what
    assert "nearest: line 2: graphs  = Falsch" in caught[0].what
    assert caught[0].what.startswith("the files are not what the recipe expects; nothing was switched:\n")
    assert caught[0].next == "mend the file, or `deploy.expect` of the recipe"
    unharmed(box, name)


def test_a_line_that_must_not_be_there_is_shown(running: tuple[Box, str]) -> None:
    box, name = running
    box.write("prog/b.py", "a = 1\nif a:\n  graphs = True\n")
    with refused() as caught:
        box.deploy(
            expect=[{"file": "prog/b.py", "text": None, "regex": r"graphs\s*=\s*True", "present": False}]
        )
    assert r"prog/b.py:3: graphs = True (must not have: graphs\s*=\s*True)" in caught[0].what
    unharmed(box, name)


def test_expectations_are_checked_again_for_code_that_is_there(running: tuple[Box, str]) -> None:
    box, name = running
    with refused():
        box.deploy(expect=[{"file": "prog/a.py", "text": "no such line", "regex": None, "present": True}])
    unharmed(box, name)


def test_a_package_that_the_run_would_not_import_from_here(running: tuple[Box, str]) -> None:
    box, name = running
    box.write("prog/a.py", "x = 2\n")
    with refused() as caught:
        box.deploy(entry="json")  # Python's own
    assert "the run would import json from " in caught[0].what
    assert "not from the release" in caught[0].what
    with refused() as caught:
        box.deploy(entry="prog.nothing")
    assert caught[0].what == "the run could not import prog.nothing: nothing is named prog.nothing"
    unharmed(box, name)


def test_finding_the_module_executes_nothing(box: Box, tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'executed')!r}, 'w')\n"
    box.write("prog/__init__.py", trap)
    box.write("prog/sub/__init__.py", trap)
    for name in ("ast", "json", "re", "os", "sitecustomize"):
        box.write(f"{name}.py", trap)  # nor is a module of the tree taken for the interpreter's own
    assert box.deploy(entry="prog.sub")["imports"].endswith("prog/sub/__init__.py")
    assert not (tmp_path / "executed").exists()
    assert not list(box.code_root.rglob("__pycache__"))


# --- an archive that lies -----------------------------------------------------------------------------------


def damaged(box: Box, spoil: Any) -> AgentError:
    """Deploy a change whose archive was spoilt on the way."""
    box.write("prog/a.py", "x = 'a longer change, to have something to cut'\n")
    request = box.request(box.snapshot())
    spoil(box.archive(request["id"]), request)
    with refused() as caught:
        install.install_release(request, Emit())
    return caught[0]


def cut(path: Path, request: dict[str, Any]) -> None:
    path.write_bytes(path.read_bytes()[:20])


def cut_with_the_right_size(path: Path, request: dict[str, Any]) -> None:
    path.write_bytes(path.read_bytes()[:20])
    request["archive_size"] = 20


def empty(path: Path, request: dict[str, Any]) -> None:
    path.write_bytes(b"")


def gone(path: Path, request: dict[str, Any]) -> None:
    path.unlink()


def foreign(path: Path, request: dict[str, Any]) -> None:
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("../../evil"))
    request["archive_size"] = path.stat().st_size


def another_content(path: Path, request: dict[str, Any]) -> None:
    with tarfile.open(path) as tar:
        name = tar.getnames()[0]
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo(name)
        info.size = 5
        tar.addfile(info, io.BytesIO(b"wrong"))
    request["archive_size"] = path.stat().st_size


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, r"the archive arrived with 20 of \d+ bytes"),
        (empty, r"the archive arrived with 0 of \d+ bytes"),
        (gone, r"the archive did not arrive"),
        (cut_with_the_right_size, r"the archive arrived damaged"),
        (foreign, r"the archive holds '../../evil', which nobody asked for"),
        (another_content, r"prog/a.py arrived with sha256 "),
    ],
)
def test_an_archive_that_arrived_wrong_changes_nothing(
    running: tuple[Box, str], spoil: Any, message: str
) -> None:
    box, name = running
    assert re.search(message, damaged(box, spoil).what)
    unharmed(box, name)


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "../x"},
        {"path": "/etc/x"},
        {"path": "a//b"},
        {"path": "a/../b"},
        {"path": ""},
        {"path": "a\0b"},
        {"mode": "100600"},
        {"mode": "120000", "link": "elsewhere"},
    ],
)
def test_a_manifest_that_would_write_elsewhere_is_refused(box: Box, entry: dict[str, str]) -> None:
    row = {"path": "x", "sha256": "0" * 64, "mode": "100644", "size": 0, **entry}
    with refused("usage"):
        agent_tree.check_entries([row])


def test_a_manifest_below_a_link_is_refused() -> None:
    link = {
        "path": "a",
        "sha256": release.sha256_of_text("/etc"),
        "mode": "120000",
        "link": "/etc",
        "size": 4,
    }
    with refused("usage"):
        agent_tree.check_entries([link, {"path": "a/b", "sha256": "0" * 64, "mode": "100644", "size": 0}])
