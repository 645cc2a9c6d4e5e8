"""Where the processes of a run stand, by each of the three ways, over ssh and pct: py-spy in the container;
where it is absent or not permitted, py-spy on the host, which finds the process through its NSpid; else the
program's own faulthandler; else the reason."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bedkit.bed import Bed
from bedkit.plan import PATH
from bedkit.project import Project

pytestmark = pytest.mark.bed

PY_SPY = Path(sys.executable).with_name("py-spy")
PLAIN = Path("/workspace/plain/python")
"""The same Python under a name without py-spy beside it."""
REFUSED = Path("/workspace/refused/python")
"""Beside this one is the real py-spy, which the kernel forbids to look into others."""
NOT_PERMITTED = "py-spy is not permitted to look into it (ptrace)"
WITHOUT_PTRACE = f"""#!/bin/sh
exec setpriv --bounding-set -sys_ptrace --inh-caps -sys_ptrace {PY_SPY} "$@"
"""


@pytest.fixture
def project(bed: Bed, tmp_path: Path) -> Project:
    """Hosts `bed`, `plain` and `refused`: one container by three names, each with a Python of its own."""
    real = str(Path(sys.executable).resolve())
    for python in (PLAIN, REFUSED):
        bed.inside("main", ["mkdir", str(python.parent)])
        bed.inside("main", ["ln", "-s", real, str(python)])
    script = 'cat >"$1"; chmod 755 "$1"'
    place = str(REFUSED.with_name("py-spy"))
    bed.inside("main", ["sh", "-c", script, "sh", place], input=WITHOUT_PTRACE.encode())
    hosts = {"bed": {}, "plain": {"python": str(PLAIN)}, "refused": {"python": str(REFUSED)}}
    project = Project(tmp_path / "project", {name: bed.host_entry(**more) for name, more in hosts.items()})
    project.write_recipe("stalls", "--seconds", "120", gpus={"count": 0})
    answering = ["python", "-m", "jobs.job", "stalls", "--seconds", "120", "--stacks"]
    project.write_recipe("answers", command=answering, gpus={"count": 0})
    project.ok("deploy", "-r", "stalls")
    return project


@pytest.fixture
def host_py_spy(bed: Bed) -> Iterator[Callable[[bool], None]]:
    """Put a py-spy beside the host's Python, one that works or one that is refused, whatever this machine
    has."""
    spy, python = bed.layout.bin / "py-spy", bed.layout.bin / "python3"

    def put(works: bool) -> None:
        python.symlink_to(str(shutil.which("python3", path=PATH)))
        if works:
            spy.symlink_to(PY_SPY)
        else:
            spy.write_text("#!/bin/sh\necho 'Error: Operation not permitted (os error 1)' >&2\nexit 1\n")
            spy.chmod(0o755)

    yield put
    spy.unlink(missing_ok=True)
    python.unlink(missing_ok=True)


def looked_at(project: Project, host: str, tag: str, recipe: str = "stalls") -> dict[str, Any]:
    """The one process of a run that has come to rest, as `dflashctl stacks --json` tells of it."""
    project.ok("launch", "-r", recipe, "--tag", tag, "-H", host)
    end = time.monotonic() + 40
    while project.json("status", tag, "-H", host)["runs"][0]["step"] != 3:
        assert time.monotonic() < end
    (process,) = project.json("stacks", tag, "-H", host, "--again", "0.5")["processes"]
    return dict(process)


def rests(process: dict[str, Any]) -> bool:
    """Its one thread stood in job.py's rest() both times."""
    (thread,) = process["threads"]
    return thread["unmoved"] and "rest" in [frame["function"] for frame in thread["frames"]]


def test_by_py_spy_in_the_container(project: Project) -> None:
    process = looked_at(project, "bed", "inside")
    assert process["how"] == "py-spy" and process["problems"] == [] and rests(process)


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("plain", "py-spy is not installed there"),
        ("refused", NOT_PERMITTED),
    ],
)
def test_by_py_spy_on_the_host_where_the_container_cannot(
    project: Project, host_py_spy: Callable[[bool], None], host: str, problem: str
) -> None:
    host_py_spy(True)
    process = looked_at(project, host, "outside")
    assert process["how"] == "py-spy on the host" and process["problems"] == [problem] and rests(process)


def test_by_the_programs_own_faulthandler_where_neither_can(
    project: Project, host_py_spy: Callable[[bool], None]
) -> None:
    host_py_spy(False)
    process = looked_at(project, "plain", "own", "answers")
    assert process["how"] == "faulthandler" and rests(process)
    assert process["problems"] == ["py-spy is not installed there", NOT_PERMITTED]
    assert project.json("status", "own")["runs"][0]["processes"] == 1, "it lives"


def test_the_reason_where_nothing_works(project: Project, host_py_spy: Callable[[bool], None]) -> None:
    host_py_spy(False)
    project.ok("launch", "-r", "stalls", "--tag", "mute", "-H", "refused")
    done = project.run("stacks", "mute", "-H", "refused", "--again", "0.5")
    assert done.returncode == 2 and "no stack of any process could be read" in done.stderr
    for reason in (NOT_PERMITTED, "it did not register faulthandler"):
        assert reason in done.stdout and reason in done.stderr, done
    assert "threads: python" in done.stdout, "what the kernel knows of it"
    assert project.json("status", "mute")["runs"][0]["processes"] == 1, "it lives"
