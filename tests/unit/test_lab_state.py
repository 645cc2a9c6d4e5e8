"""How a lab is found, and how a dead one is told from a live one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflashctl.agent.processes import proc
from dflashctl.cli.main import run
from dflashctl.config.hosts import Host
from dflashctl.errors import ExitCode, Unreachable, UsageError
from dflashctl.lab import layout, lifecycle, state
from dflashctl.lab.state import LabEndpoint, LabPaths, Record

ENDPOINT = LabEndpoint("127.0.0.1", 1, "root", "/k", "/kh", "/other/python", "/srv/home", env={"A": "b"})


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LabPaths:
    monkeypatch.setenv("DFLASHCTL_LAB_DIR", str(tmp_path))
    return LabPaths(tmp_path)


def record_of_this_process() -> Record:
    me = proc.read_process(os.getpid())
    assert me is not None
    return Record(ENDPOINT, me.pid, me.start, proc.boot_id(), proc.pid_namespace() or 0, 0.0)


def write(paths: LabPaths, record: Record) -> None:
    paths.record.write_text(layout.to_text(record.to_json()))


def test_a_live_record_gives_its_endpoint(paths: LabPaths) -> None:
    write(paths, record_of_this_process())
    assert state.load_endpoint() == ENDPOINT


@pytest.mark.parametrize(
    "change",
    [
        {"start": 1},  # the pid was given out again
        {"boot_id": "00000000-0000-0000-0000-000000000000"},  # the machine was started again
        {"pid": 2**22 + 1},  # nobody
        {"pid_namespace": 1},  # a pid of somewhere else
    ],
)
def test_a_record_of_another_process_is_no_lab(paths: LabPaths, change: dict) -> None:
    write(paths, replace(record_of_this_process(), **change))
    with pytest.raises(Unreachable) as caught:
        state.load_endpoint()
    assert caught.value.next == "dflashctl lab up"
    assert caught.value.exit_code == ExitCode.UNREACHABLE


def test_a_zombie_is_no_lab(paths: LabPaths) -> None:
    child = os.posix_spawn("/bin/sh", ["sh", "-c", "exit"], {})
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        found = proc.read_process(child)
        assert found is not None and found.dead
        assert not replace(record_of_this_process(), pid=child, start=found.start).alive()
    finally:
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"version": "2"}', '{"version": 1}', '{"version": 1, "endpoint": {"x": 1}}']
)
def test_a_damaged_record_is_no_record(paths: LabPaths, text: str) -> None:
    paths.record.write_text(text)
    assert state.read_record(paths) is None
    with pytest.raises(Unreachable):
        state.load_endpoint()


def test_a_lab_of_a_newer_dflashctl_is_told_and_not_ended(paths: LabPaths) -> None:
    """It was no record, so `lab up` took the lab for a half-dead one: it ended it, with all its runs."""
    write(paths, record_of_this_process())
    paths.lock.touch()
    paths.record.write_text(json.dumps({**json.loads(paths.record.read_text()), "version": 2, "new": 1}))
    for act in (state.load_endpoint, lifecycle.up, lifecycle.down, lifecycle.status):
        with pytest.raises(UsageError, match="newer dflashctl") as caught:
            act()
        assert "DFLASHCTL_LAB_DIR" in str(caught.value.next)
    assert json.loads(paths.record.read_text())["new"] == 1


def test_defaults_make_a_host_without_a_lab(paths: LabPaths) -> None:
    host = Host.model_validate({"name": "lab", "engine": "lab", **state.lab_defaults()})
    assert host.python == str(Path(sys.executable).absolute())
    assert (host.container, host.workdir, host.gpus.expect) == (200, "/workspace", 8)
    assert host.path.split(":")[0] == "/sbin"
    assert host.env["PYTHONPATH"] == "/opt/lab/python"


def test_defaults_are_those_of_the_lab_that_is_up(paths: LabPaths) -> None:
    write(paths, record_of_this_process())
    values = state.lab_defaults()
    assert (values["python"], values["home"], values["env"]) == ("/other/python", "/srv/home", {"A": "b"})


def test_the_folder_is_the_persons_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASHCTL_LAB_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere/state")
    assert state.lab_dir() == Path("/somewhere/state/dflashctl/lab")
    monkeypatch.setenv("DFLASHCTL_LAB_DIR", "rel")
    assert state.lab_dir() == Path.cwd() / "rel"


def test_asking_for_defaults_loads_no_ssh() -> None:
    code = (
        "import json, sys; from dflashctl.lab import state; state.lab_defaults();"
        "print(json.dumps([m for m in ('paramiko', 'fabric', 'cryptography', 'pydantic', 'typer')"
        " if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == []


def test_containers_start_without_site_packages() -> None:
    """`pct` imports it in a Python that has only the standard library."""
    parent = str(Path(state.__file__).parents[2])
    code = (
        f"import sys; sys.path.append({parent!r}); from dflashctl.lab import container; print(container.INIT)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "/sbin/init\n"


def test_lab_down_names_the_runs_that_had_no_end(
    paths: LabPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lifecycle.open_runs() == []
    folders = paths.workspace / ".dflashctl" / "runs"
    files = ("supervisor.json", "exit.json")
    for number, (tag, there) in enumerate([("done", 2), ("lost", 1), ("live", 1), ("never", 0), ("\x1b", 1)]):
        run_dir = folders / f"20260101T00000000{number}-aaaaaa"
        run_dir.mkdir(parents=True)
        started = 40 if tag == "lost" else 50
        record = {"version": 1, "tag": tag, "init_start": started}
        (run_dir / "record.json").write_text(json.dumps(record))
        for name in files[:there]:
            (run_dir / name).write_text("{}")
    (paths.pct / "ns").mkdir(parents=True)
    (paths.pct / "ns" / "200.init").write_text("7 50")
    assert lifecycle.open_runs() == ["\x1b", "live"], "the lost one ended when its container was restarted"
    downs = [True, False]
    monkeypatch.setattr(lifecycle, "down", lambda keep: downs.pop(0))
    assert run(["lab", "down"]) == 0
    said = "the lab is down\nruns that ended with it: \\x1b, live\n"
    assert capsys.readouterr().out == said
    assert run(["lab", "down"]) == 0
    assert capsys.readouterr().out == "the lab was not up\n"
