"""`dflashctl inspect` and `dflashctl probe` on the lab: through ssh and pct, in few commands, without a GPU
that torch could see (the lab's are simulated)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dflashctl.config import load_hosts
from dflashctl.inspect.reading import look
from dflashctl.inspect.subject import Subject
from dflashctl.probe import running
from dflashctl.probe.document import AnyProbeDocument
from dflashctl.probe.plan import of_file
from dflashctl.remote.factory import open_engine
from dflashctl.remote.pct import PctEngine

if TYPE_CHECKING:
    from life_kit import Project

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

PATIENCE_S = 500.0
"""Programs that import torch, on a machine where others do the same."""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every remote command, by where it ran. (A long silence has the freezer asked besides.)"""
    found: list[str] = []
    for name in ("run", "run_on_host"):
        genuine = getattr(PctEngine, name)

        def counted(self: Any, *args: Any, _name: str = name, _genuine: Any = genuine, **how: Any) -> Any:
            found.append(_name)
            return _genuine(self, *args, **how)

        monkeypatch.setattr(PctEngine, name, counted)
    return found


def test_a_look_at_a_torch_without_cuda_is_one_command(project: Project, commands: list[str]) -> None:
    """Of the configuration, docs/inspect.md shows the same on the lab, and tests/local reads every value."""
    import torch

    heard: list[str] = []
    host = load_hosts(project.root).host("lab")
    with open_engine(host) as engine:
        facts = look(engine, Subject(host), ["env"], progress=heard.append)
    assert commands == ["run"]
    assert facts.machine["torch"] == torch.__version__ and facts.machine["torch gpus"] == 0
    assert facts.packages["torch"] == torch.__version__ and facts.machine["python"]
    assert heard == ["lab: asking", "lab: looking at torch's libraries"]


def test_what_needs_a_gpu_says_so_and_the_rest_runs(project: Project) -> None:
    words = ["probe", "ipc", "--case", "host-memory,one-gpu", "--gpu", "3", "--json"]
    done = project.run(*words, code=5, timeout=PATIENCE_S)
    document = json.loads(done.stdout)
    AnyProbeDocument.model_validate(document)
    assert [gpu["index"] for gpu in document["gpus"]] == [3]
    ran, lacking = document["cases"]
    assert ran["answer"] == "passes", document
    assert (lacking["answer"], lacking["said"]) == ("needs", "a GPU: torch sees none")
    assert "one-gpu: needs a GPU: torch sees none" in done.stderr
    assert all(gpu["idle"] for gpu in project.json("gpu")["gpus"])  # reserved for it, and free again


def test_a_persons_file_has_an_idle_gpu_a_record_and_an_end(project: Project, tmp_path: Path) -> None:
    project.inside("rm -f /workspace/ready")
    program = tmp_path / "mine.py"
    program.write_text(
        "import os, time\n"
        "print('on', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
        "open('/workspace/ready', 'w').write('x')\n"
        "time.sleep(600)\n"
    )
    process = project.popen("probe", str(program), "--gpu", "5")
    try:
        project.until(lambda: project.inside("cat /workspace/ready", check=False).stdout)
        (run,) = [one for one in project.json("runs")["runs"] if one["tag"] == "probe-mine"]
        assert run["recipe"] == "probe"
        busy = {gpu["index"]: gpu["why_not_idle"] for gpu in project.json("gpu")["gpus"] if not gpu["idle"]}
        assert list(busy) == [5] and "probe-mine" in busy[5]
        refused = project.run("probe", str(program), "--gpu", "5", "--tag", "other", code=5)
        assert "GPU 5: held by probe-mine" in refused.stderr and "--allow-busy" not in refused.stderr
        assert "on GPU-" in project.run("logs", "probe-mine").stdout
        project.run("kill", "probe-mine")
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 7 and "on GPU-" in out and "killed by" in err


def test_a_file_is_three_commands(project: Project, commands: list[str]) -> None:
    work = of_file("mine.py", "print('said')", [], tag="short", deadline_s=PATIENCE_S, env={})
    heard: list[str] = []
    with open_engine(load_hosts(project.root).host("lab")) as engine:
        started = running.start(engine, work, None)
        watched = running.watch(engine, started.plan, work, on_log=heard.append)
    assert sorted(commands) == ["run", "run", "run_on_host"] and "".join(heard) == "said\n"
    assert (watched.end.exit or {})["code"] == 0
