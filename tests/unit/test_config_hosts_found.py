"""Which hosts.yaml is taken: of the folder or one above, the variable's, the person's, or none.

Run: python -m pytest tests/unit/test_config_hosts_found.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts_kit import CT200, written

from dflashctl.config import load_hosts
from dflashctl.errors import NotFound, UsageError


@pytest.fixture(autouse=True)
def _away_from_the_person(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DFLASHCTL_HOSTS", raising=False)
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def test_found_in_the_working_folder_or_above(tmp_path: Path) -> None:
    path = written(tmp_path / "project", CT200)
    below = tmp_path / "project" / "a" / "b"
    below.mkdir(parents=True)
    assert load_hosts(below).path == path


def test_the_variable_wins_and_must_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "project", CT200)
    named = written(tmp_path / "elsewhere", CT200)
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(named))
    assert load_hosts(tmp_path / "project").path == named
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(tmp_path / "nothing.yaml"))
    with pytest.raises(UsageError, match="DFLASHCTL_HOSTS: no such file"):
        load_hosts(tmp_path / "project")
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(tmp_path))
    with pytest.raises(UsageError, match="it is a folder"):
        load_hosts(tmp_path / "project")


@pytest.mark.parametrize("place", ["project/a", "project", "XDG_CONFIG_HOME/dflashctl"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.mkdir(), "it is a folder"),
        (lambda path: path.symlink_to("gone.yaml"), "it is a link to gone.yaml, which is not there"),
        (lambda path: path.symlink_to("."), "it is a folder"),
        (lambda path: path.symlink_to(path.name), "it is a link to hosts.yaml, which is not there"),
        (os.mkfifo, "it is no ordinary file"),
        (lambda path: path.symlink_to("/dev/null"), "it is no ordinary file"),
    ],
)
def test_something_of_that_name_that_is_no_file_is_never_passed_over(
    tmp_path: Path, place: str, make: Callable[[Path], None], said: str
) -> None:
    """Neither for the hosts.yaml above it nor for the built-in lab."""
    written(tmp_path, CT200)
    below = tmp_path / "project" / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    if place.startswith("XDG"):
        (tmp_path / "hosts.yaml").unlink()
    make(tmp_path / place / "hosts.yaml")
    with pytest.raises(UsageError) as caught:
        load_hosts(below)
    assert (caught.value.what, caught.value.where) == (said, str(tmp_path / place / "hosts.yaml"))


def test_a_link_to_a_file_is_a_hosts_yaml(tmp_path: Path) -> None:
    written(tmp_path / "shared", CT200)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "hosts.yaml").symlink_to("../shared/hosts.yaml")
    assert load_hosts(tmp_path / "project").path == tmp_path / "project" / "hosts.yaml"


def test_the_configuration_folder_comes_last(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    configured = written(tmp_path / "XDG_CONFIG_HOME" / "dflashctl", CT200)
    assert load_hosts(tmp_path / "work").path == configured


def test_who_is_in_another_folder_than_their_hosts_yaml_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dflashctl status` from home said that the lab is not up, to someone who never had a lab."""
    from dflashctl.errors import Unreachable
    from dflashctl.remote.lab import lab_target

    elsewhere, project = tmp_path / "elsewhere", tmp_path / "project"
    for folder in (elsewhere, project):
        folder.mkdir()
    (project / "hosts.yaml").write_text("version: 1\nhosts: {lab: {engine: lab}}\n")
    monkeypatch.setenv("DFLASHCTL_LAB_DIR", str(tmp_path / "no-lab"))
    monkeypatch.chdir(elsewhere)
    told = "go to the folder of your hosts.yaml (none is here or above), or set DFLASHCTL_HOSTS"
    with pytest.raises(NotFound) as caught:
        load_hosts().host("ct200")
    assert caught.value.next == f"{told}; known hosts: lab"
    with pytest.raises(Unreachable, match="the lab is not up") as down:
        lab_target(load_hosts().host())
    assert down.value.next == f"dflashctl lab up; for a machine of yours: {told}"
    monkeypatch.chdir(project)
    with pytest.raises(Unreachable, match="the lab is not up") as down:
        lab_target(load_hosts().host())
    assert down.value.next == "dflashctl lab up"


def test_without_any_file_there_is_the_lab(tmp_path: Path) -> None:
    hosts = load_hosts(tmp_path)
    assert hosts.path is None
    assert hosts.names == ["lab"]
    assert hosts.defaults.host == "lab"
    assert hosts.defaults.recipe == "demo"
