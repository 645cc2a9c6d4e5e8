"""Which folders the lab shows of the machine's Python, and where root's home lies then."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dflashctl.lab import python_view
from dflashctl.lab.python_view import PythonFacts


@pytest.mark.parametrize(
    ("folders", "home"),
    [
        ([], "/root"),
        (["/home/ann/.venv", "/opt/python"], "/root"),
        (["/root/python3.12", "/opt/venv"], "/home/ct"),
        (["/root"], "/home/ct"),
        (["/root/x", "/home"], "/srv/home"),
        (["/root/x", "/home/ct/y", "/srv/home"], "/opt/home"),
        (["/rootless/venv"], "/root"),
    ],
)
def test_home_never_touches_a_folder_of_python(folders: list[str], home: str) -> None:
    assert python_view.container_home(folders) == home


def test_no_home_left_is_said() -> None:
    with pytest.raises(ValueError, match="/srv/home/b"):
        python_view.container_home(["/root/a", "/home/ct", "/srv/home/b", "/opt/home"])


def test_outermost_drops_what_is_shown_already() -> None:
    assert python_view.outermost(
        ["/usr", "/usr/local/py", "/w/venv", "/w/venv/lib", "/w/venv2", "/etc/x"]
    ) == [
        "/w/venv",
        "/w/venv2",
    ]


@pytest.mark.parametrize("prefix", ["/home/ann", "/home", "/"])
def test_a_prefix_that_holds_a_home_is_shown_in_parts(prefix: str) -> None:
    parts = python_view.narrowed(prefix, "/home/ann")
    assert f"{prefix.rstrip('/')}/bin" in parts
    assert not any(python_view.is_below("/home/ann/.ssh", part) for part in parts)


def test_a_prefix_inside_a_home_is_shown_whole() -> None:
    assert python_view.narrowed("/home/ann/.venv", "/home/ann") == ["/home/ann/.venv"]


def make_python(tmp_path: Path) -> Path:
    """A venv whose interpreter is a link to a link in a managed folder that is itself reached by a link."""
    real = tmp_path / "store/cpython-3.11.9"
    (real / "bin").mkdir(parents=True)
    (real / "bin/python3.11").write_text("")
    (real / "bin/python3").symlink_to("python3.11")
    (tmp_path / "store/cpython-3.11").symlink_to("cpython-3.11.9")
    venv = tmp_path / "venv/bin"
    venv.mkdir(parents=True)
    (venv / "python").symlink_to("python3")
    (venv / "python3").symlink_to(tmp_path / "store/cpython-3.11/bin/python3")
    return venv / "python"


def test_every_hop_of_the_interpreter_is_shown(tmp_path: Path) -> None:
    python = make_python(tmp_path)
    hops = python_view.link_hops(str(python))
    assert hops[-1] == str(tmp_path / "store/cpython-3.11/bin/python3.11")
    facts = PythonFacts(
        str(python),
        os.path.realpath(python),
        (str(tmp_path / "venv"), *(str(Path(hop).parent.parent) for hop in hops[1:])),
    )
    assert python_view.folders_to_show(facts, "/home/ann") == [
        str(tmp_path / "venv"),
        str(tmp_path / "store/cpython-3.11"),
        str(tmp_path / "store/cpython-3.11.9"),
    ]


def test_folders_that_do_not_exist_are_left_out(tmp_path: Path) -> None:
    facts = PythonFacts("/x/bin/python", "/x/bin/python", (str(tmp_path / "nowhere"), str(tmp_path)))
    assert python_view.folders_to_show(facts, "/home/ann") == [str(tmp_path)]


def test_this_interpreter_is_shown_whole() -> None:
    facts = python_view.gather()
    shown = [*python_view.COVERED, *python_view.folders_to_show(facts)]
    for needed in (facts.executable, facts.interpreter, os.__file__, pytest.__file__):
        assert any(python_view.is_below(needed, folder) for folder in shown), needed
    assert facts.executable == str(Path(sys.executable).absolute())
