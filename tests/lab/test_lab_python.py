"""However a person's Python is set up, it works in the lab's host and container as it does outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from lab_client import REPOSITORY, enter, ssh

from dflashctl.lab.state import LabEndpoint, LabPaths, read_record

pytestmark = pytest.mark.lab

PACKAGES = str(Path(paramiko.__file__).parents[1])
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
BASE = os.path.realpath(sys.executable)


class OtherPython:
    """A Python, the environment that it needs, and a lab of its own made by it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = LabPaths(folder / "lab")
        self.python = BASE
        self.env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "DFLASHCTL_LAB_DIR": str(self.paths.root)}
        self.path = [str(REPOSITORY)]

    def cli(self, *words: str) -> str:
        code = "import sys; from dflashctl.cli.main import main; main(sys.argv[1:])"
        done = subprocess.run(
            [self.python, "-P", "-c", code, *words],
            env=self.env | {"PYTHONPATH": ":".join(self.path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def up(self) -> LabEndpoint:
        self.cli("lab", "up")
        record = read_record(self.paths)
        assert record is not None
        return record.endpoint


@pytest.fixture
def other(tmp_path: Path) -> Iterator[OtherPython]:
    made = OtherPython(tmp_path)
    yield made
    made.cli("lab", "down")


def venv(folder: Path, base: str) -> str:
    """A virtual environment that finds the packages of this one by a .pth file."""
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    (folder / f"lib/{VERSION}/site-packages/shared.pth").write_text(PACKAGES + "\n")
    return str(folder / "bin/python")


def check(endpoint: LabEndpoint, python: str) -> None:
    env = " ".join(f"{name}='{value}'" for name, value in endpoint.env.items())
    code = "import sys, paramiko as p, sitecustomize as s; print(sys.executable, p.__file__, s.__file__)"
    done = enter(endpoint, f"HOME={endpoint.home} {env} '{endpoint.python}' -c '{code}'")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().split() == [python, paramiko.__file__, "/opt/lab/python/sitecustomize.py"]
    assert enter(endpoint, f"'{endpoint.python}' -I -c 'print(1)'").stdout == b"1\n"
    assert ssh(endpoint, "python3 -I -c 'import json; print(1)'").stdout == b"1\n"


def test_a_venv_with_packages_of_another(other: OtherPython) -> None:
    other.python = venv(other.folder / "project/.venv", BASE)
    check(other.up(), other.python)


def test_an_interpreter_reached_by_linked_folders(other: OtherPython) -> None:
    """As uv keeps them: venv/bin/python leads to cpython-3.11/bin/python3, and cpython-3.11 is a link."""
    (other.folder / "store").mkdir()
    (other.folder / "store/cpython").symlink_to(Path(BASE).parents[1])
    other.python = venv(other.folder / "venv", str(other.folder / "store/cpython/bin" / Path(BASE).name))
    check(other.up(), other.python)


def test_packages_on_the_search_path(other: OtherPython) -> None:
    other.path.append(PACKAGES)
    check(other.up(), BASE)


def test_packages_of_the_user(other: OtherPython) -> None:
    base = other.folder / "user base"
    (base / f"lib/{VERSION}/site-packages").mkdir(parents=True)
    (base / f"lib/{VERSION}/site-packages/shared.pth").write_text(PACKAGES + "\n")
    other.env["PYTHONUSERBASE"] = str(base)
    endpoint = other.up()
    assert endpoint.env["PYTHONUSERBASE"] == str(base)
    check(endpoint, BASE)


def test_a_venv_that_is_the_home_itself_shows_only_python(other: OtherPython) -> None:
    other.python = venv(other.folder, BASE)
    (other.folder / "diary.txt").write_text("secret")
    home = repr(str(other.folder))
    code = f"from dflashctl.lab import python_view as v; print(v.folders_to_show(v.gather(), {home}))"
    done = subprocess.run(
        [other.python, "-c", code],
        env=other.env | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    shown = done.stdout
    assert f"'{other.folder}/bin'" in shown and f"'{other.folder}'" not in shown, done.stderr
