"""`logs -f` through what happens to a line and a container: the person has the whole log, each byte once."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bedkit.bed import Bed
from bedkit.project import Project
from proxy import Proxy

pytestmark = pytest.mark.bed

LOG = "/workspace/train_steady_t.log"
DEADLINE_S = 90.0


def wait_for(what: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_followed_log_is_whole_after_cuts_a_freeze_and_a_restart_of_the_container(
    bed: Bed, proxied: Proxy, tmp_path: Path
) -> None:
    project = Project(tmp_path / "project", {"bed": bed.host_entry(port=proxied.port)})
    project.write_recipe("steady", "--seconds", "300", "--step", "0.02", gpus={"count": 0})
    project.ok("deploy")
    project.ok("launch", "--tag", "t")
    shown, said = tmp_path / "shown", tmp_path / "said"
    with shown.open("wb") as out, said.open("wb") as err:
        following = subprocess.Popen(
            project.argv("logs", "t", "-f", "-n", "0"),
            cwd=project.folder,
            env=project.env(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    try:

        def goes_on() -> None:
            size = shown.stat().st_size
            wait_for(lambda: shown.stat().st_size > size + 200)

        goes_on()
        for _ in range(2):
            assert proxied.cut() == 1
            goes_on()
        bed.freeze("main")
        wait_for(lambda: b"is frozen" in said.read_bytes())
        bed.thaw("main")
        goes_on()
        bed.stop("main")
        wait_for(lambda: b"(container" in said.read_bytes().rpartition(b"in contact again")[2])
        bed.start("main")
        assert following.wait(DEADLINE_S) == 0, "the restart has ended the run, and so the log"
    finally:
        following.kill()
        following.wait(10)
    whole = bed.inside("main", ["cat", LOG]).stdout
    assert whole.count(b"step ") > 100
    assert shown.read_bytes().rstrip(b"\n") == whole.rstrip(b"\n")
    notices = said.read_text()
    assert "the connection was lost" in notices and "in contact again" in notices
    assert project.json("status", "t")["runs"][0]["state"] == "lost"
