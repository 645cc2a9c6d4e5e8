"""Deploys the whole way: ssh, sftp, `pct push`, `pct exec`, and what is then true inside the container.

Run: python -m pytest tests/lab/test_deploy.py
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from deploy_project import RECIPE, Project

from dflashctl.lab.state import LabPaths, Record

pytestmark = pytest.mark.lab


@pytest.fixture
def project(lab: Record, lab_paths: LabPaths, tmp_path: Path) -> Project:
    return Project(tmp_path / "project", lab.endpoint, lab_paths)


# --- the good way -------------------------------------------------------------------------------------------


def test_what_arrived_is_what_runs(project: Project) -> None:
    done = project.cli()
    assert done.returncode == 0, done.stderr
    name = project.current()
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[0] == f"lab · warm · release {name[:8]}"
    assert "  expect            prog/policy.py:2: cudagraph_trees = False" in lines
    assert f"  imports           prog from {project.inside}/code/releases/{name[:8]}" in lines
    assert f"  switched          current -> {name[:8]} (the first)" in lines
    python = shlex.quote(project.host.python)
    code = "import prog.policy; print(prog.policy.__file__, prog.policy.cudagraph_trees)"
    said = project.shell(
        f"cd / && PYTHONPATH={project.inside}/code/current {python} -B -c {shlex.quote(code)}"
    )
    assert said.split() == [f"{project.inside}/code/current/prog/policy.py", "False"]
    assert project.litter() == []


def test_again_sends_nothing_and_a_change_sends_one_file(project: Project) -> None:
    first = project.deploy()
    again = json.loads(project.cli("--json").stdout)
    assert (again["sent_files"], again["proof"]["switched"]) == (0, False)
    project.write("prog/policy.py", "cudagraph_trees = False  # changed\n")
    changed = json.loads(project.cli("--json").stdout)
    assert (changed["sent_files"], changed["proof"]["before"]) == (1, first.proof["release"])
    assert project.litter() == []


def test_modes_links_odd_names_and_empty_things_arrive(project: Project) -> None:
    odd = ["with space.txt", "ümläut-文.txt", "quote'\".txt", "-dash", "$HOME", "back\\slash", "a;b&c", "*"]
    for name in odd:
        project.write(f"prog/{name}", name)
    project.write("prog/empty", "")
    project.write("prog/run.sh", "#!/bin/sh\n")
    (project.root / "prog" / "run.sh").chmod(0o755)
    (project.root / "prog" / "link").symlink_to("run.sh")
    (project.root / "prog" / "hollow").mkdir()
    project.deploy()
    there = project.seen / "code" / "current" / "prog"
    for name in odd:
        assert (there / name).read_text() == name
    assert (there / "run.sh").stat().st_mode & 0o777 == 0o755
    assert str((there / "link").readlink()) == "run.sh"
    assert (there / "hollow").is_dir()


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every ssh session that is opened: one exec or one sftp."""
    opened: list[str] = []
    real = paramiko.Transport.open_session

    def counting(self: paramiko.Transport, *args: Any, **options: Any) -> Any:
        opened.append("session")
        return real(self, *args, **options)

    monkeypatch.setattr(paramiko.Transport, "open_session", counting)
    yield opened


def test_round_trips_do_not_grow_with_the_files(project: Project, sessions: list[str]) -> None:
    for number in range(50):
        project.write(f"prog/f{number}.txt", str(number))
    project.deploy()
    sessions.clear()
    project.deploy()
    assert len(sessions) <= 2, "no change: the host's desk; facts and proof"
    project.write("prog/f1.txt", "changed")
    sessions.clear()
    project.deploy()
    assert len(sessions) <= 3, "one change: the host's desk, facts, proof"


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("prog/policy.py", "cudagraph_trees = False\ndef broken(:\n", "prog/policy.py:2: SyntaxError"),
        (
            "prog/policy.py",
            "cudagraph_trees = None\n",
            "prog/policy.py: no line has: cudagraph_trees = False",
        ),
        (
            "prog/policy.py",
            "cudagraph_trees = False\ncudagraph_trees = True\n",
            "prog/policy.py:2: cudagraph_trees = True",
        ),
        (
            "recipes/warm.yaml",
            RECIPE.replace("entry: prog", "entry: json"),
            "the run would import json from",
        ),
        ("prog/.env", "TOKEN=x\n", "prog/.env looks like a secret"),
        ("recipes/warm.yaml", RECIPE.replace("prog/**", "porg/**"), "'porg/**' matches no file"),
    ],
)
def test_a_deploy_that_cannot_be_proven_leaves_the_running_version(
    project: Project, name: str, text: str, message: str
) -> None:
    before = project.deploy().proof["release"]
    project.write(name, text)
    done = project.cli()
    assert done.returncode in (2, 4), done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert project.current() == before
    assert project.litter() == []


def test_a_release_that_a_live_run_uses_outlives_any_number_of_deploys(project: Project) -> None:
    """keep_releases is 3: current, previous and one more stay anyhow; the run's is older than all of them."""
    project.write("prog/__main__.py", "import time\n\nwhile True:\n    time.sleep(0.2)\n")
    used = project.deploy().proof["release"]
    launched = project.dflashctl("launch", "--tag", "pinned")
    assert launched.returncode == 0, launched.stderr
    for number in range(4):
        project.write("prog/policy.py", f"cudagraph_trees = False  # {number}\n")
        project.deploy()
    assert (project.seen / "code" / "releases" / used / "prog" / "__main__.py").is_file()
    ended = project.dflashctl("kill", "pinned")
    assert ended.returncode == 0, ended.stderr
    project.write("prog/policy.py", "cudagraph_trees = False  # last\n")
    assert used in project.deploy().proof["pruned"]
