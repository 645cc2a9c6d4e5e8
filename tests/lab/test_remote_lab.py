"""Engine `lab` (which is engine `pct`) through the lab: real ssh, sftp, the strict `pct`, a container.

Run: python -m pytest tests/lab/test_remote_lab.py
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflashctl.config.hosts import Host
from dflashctl.errors import ContainerDown, NotFound, Unreachable, UsageError, VerificationFailed
from dflashctl.lab import layout
from dflashctl.lab.state import LabPaths, Record, lab_defaults
from dflashctl.remote.agent_call import AgentBug, call
from dflashctl.remote.factory import open_engine
from dflashctl.remote.pct import PctEngine

sys.path.insert(0, str(Path(__file__).parent))

from lab_client import on_host

pytestmark = pytest.mark.lab


def engine_of(**changes: Any) -> PctEngine:
    engine = open_engine(Host(**{"name": "lab", "engine": "lab", **lab_defaults(), **changes}))
    assert isinstance(engine, PctEngine)
    return engine


@pytest.fixture(scope="module")
def engine(lab: Record) -> Iterator[PctEngine]:
    with engine_of() as made:
        yield made


@pytest.fixture
def folder(lab_paths: LabPaths, engine: PctEngine) -> Iterator[str]:
    """A fresh folder inside, gone afterwards."""
    name = f"/workspace/remote-{os.urandom(4).hex()}"
    engine.run(["mkdir", name], timeout_s=20)
    yield name
    shutil.rmtree(lab_paths.workspace / Path(name).name)


def staged(engine: PctEngine) -> list[str]:
    names = engine.run_on_host(["ls", "-A", "/tmp"], timeout_s=20).stdout.decode().split()
    return [name for name in names if name.startswith("dflashctl-")]


def test_the_agent_answers_from_both_sides(engine: PctEngine) -> None:
    events: list[dict[str, Any]] = []
    inside = call(engine, "ping", {"echo": "é\udc80", "events": 2}, timeout_s=30, on_event=events.append)
    host = call(engine, "ping", {"echo": 1}, where="host", timeout_s=30)
    assert inside["echo"] == "é\udc80" and inside["python"] == engine.host.python
    assert events == [{"number": 0}, {"number": 1}]
    assert host["echo"] == 1 and host["python"] != inside["python"]
    assert engine.has_separate_host


def test_a_bug_of_the_agent_brings_its_traceback_home(engine: PctEngine) -> None:
    with pytest.raises(AgentBug, match="ValueError"):
        call(engine, "ping", {"events": "many"}, timeout_s=30)


def test_a_missing_interpreter_inside_names_the_setting(lab: Record) -> None:
    with engine_of(python="/nope/python") as engine, pytest.raises(UsageError) as caught:
        call(engine, "ping", {}, timeout_s=30)
    assert "python:" in caught.value.next and "/nope/python" in caught.value.what


def test_commands_inside_start_in_a_known_environment(engine: PctEngine) -> None:
    lines = engine.run(["env"], timeout_s=20).stdout.decode().splitlines()
    expected = [f"PATH={engine.host.path}", f"HOME={engine.host.home}", "LANG=C.UTF-8"]
    assert sorted(lines) == sorted(expected)


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(words=st.lists(st.text(st.characters(min_codepoint=1, max_codepoint=127), max_size=20), max_size=5))
def test_arguments_arrive_unchanged_inside(engine: PctEngine, words: list[str]) -> None:
    done = engine.run(["printf", "%s\\0", "-", *words], timeout_s=30)
    assert done.stdout.decode() == "".join(f"{word}\0" for word in ["-", *words])


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.binary(max_size=3000))
def test_any_bytes_on_stdin_come_back(engine: PctEngine, data: bytes) -> None:
    assert engine.run(["cat"], stdin=data, timeout_s=30).stdout == data


def test_arguments_that_pct_would_change_are_refused(engine: PctEngine) -> None:
    for argv in (["echo", "café"], ["echo", "a\0"], ["echo", "x" * 200_000]):
        with pytest.raises(UsageError):
            engine.run(argv, timeout_s=20)


def test_50_mb_on_both_streams_at_once(engine: PctEngine) -> None:
    script = "head -c 50000000 /dev/zero & head -c 50000000 /dev/zero >&2; wait"
    done = engine.run(["sh", "-c", script], timeout_s=120)
    assert (len(done.stdout), len(done.stderr), done.exit_code) == (50_000_000, 50_000_000, 0)


def test_several_threads_share_one_connection(engine: PctEngine) -> None:
    def work(number: int) -> bytes:
        return engine.run(["echo", str(number)], timeout_s=60).stdout

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [f"{number}\n".encode() for number in range(6)]


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_files_go_in_and_come_out_and_nothing_stays_on_the_host(
    engine: PctEngine, folder: str, tmp_path: Path, size: int
) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(size))
    engine.put(source, f"{folder}/file", mode=0o755, timeout_s=60)
    done = engine.run(["sh", "-c", f"sha256sum <{folder}/file; stat -c %a {folder}/file"], timeout_s=20)
    digest, mode = done.stdout.decode().split()[0], done.stdout.decode().split()[-1]
    assert (digest, mode) == (hashlib.sha256(source.read_bytes()).hexdigest(), "755")
    engine.get(f"{folder}/file", tmp_path / "back", timeout_s=60)
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert staged(engine) == []


def test_a_push_that_pct_calls_a_success_is_still_a_failure(engine: PctEngine) -> None:
    with pytest.raises(VerificationFailed, match="failed to create file"):
        engine.put(Path(__file__), "/nope/x", timeout_s=30)
    with pytest.raises(VerificationFailed, match="Is a directory"):
        engine.put(Path(__file__), "/workspace", timeout_s=30)
    assert staged(engine) == []


def test_a_file_that_is_not_there(engine: PctEngine, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file: /workspace/nope"):
        engine.get("/workspace/nope", tmp_path / "back", timeout_s=30)
    assert not (tmp_path / "back").exists()
    assert staged(engine) == []


def test_a_stopped_container_is_down(lab: Record) -> None:
    with engine_of(container=layout.STOPPED_CONTAINER) as engine:
        with pytest.raises(ContainerDown, match=f"container {layout.STOPPED_CONTAINER} is not running"):
            engine.run(["true"], timeout_s=30)
        with pytest.raises(ContainerDown):
            engine.put(Path(__file__), "/workspace/x", timeout_s=30)
        with pytest.raises(ContainerDown):
            call(engine, "ping", {}, timeout_s=30)
        assert call(engine, "ping", {"echo": 1}, where="host", timeout_s=30)["echo"] == 1


def test_a_container_that_does_not_exist_is_not_found(lab: Record) -> None:
    with engine_of(container=999) as engine, pytest.raises(NotFound, match="no container 999"):
        engine.run(["true"], timeout_s=30)


def test_a_deadline_says_that_the_command_may_still_be_running(engine: PctEngine) -> None:
    with pytest.raises(Unreachable, match="may still be running in container 200"):
        engine.run(["sleep", "20"], timeout_s=0.5)


def test_a_frozen_container_is_told_from_a_slow_one(engine: PctEngine, lab: Record) -> None:
    freezer(lab, "freeze")
    try:
        with pytest.raises(ContainerDown, match="frozen") as caught:
            engine.run(["true"], timeout_s=1.0)
    finally:
        freezer(lab, "thaw")
    assert caught.value.exit_code == 12
    assert engine.run(["echo", "thawed"], timeout_s=30).stdout == b"thawed\n"


def test_a_frozen_container_is_told_long_before_the_deadline_and_does_nothing_later(
    engine: PctEngine, lab: Record, lab_paths: LabPaths
) -> None:
    """The command waits inside until the thaw; by then its caller is gone, and it must not act."""
    marker = lab_paths.workspace / "acted"
    freezer(lab, "freeze")
    try:
        started = time.monotonic()
        with pytest.raises(ContainerDown, match="frozen"):
            call(engine, "learn_idle", {"state_dir": "/workspace/acted", "gpus": {}}, timeout_s=100)
        assert time.monotonic() - started < 90
        time.sleep(1.5)  # the server has noticed that nobody listens any more
    finally:
        freezer(lab, "thaw")
    assert call(engine, "ping", {"echo": 1}, timeout_s=30)["echo"] == 1
    time.sleep(1.0)  # the one that was held had its chance, too
    assert not marker.exists()


def freezer(lab: Record, what: str) -> None:
    code = (
        f"sys.argv = ['freezer', S, '200', '{what}']\n"
        "import runpy\nrunpy.run_module('dflashctl.lab.pct.outside', run_name='__main__')"
    )
    done = on_host(lab.endpoint, code)
    assert done.returncode == 0, done.stderr


def test_a_push_waits_for_the_lock_of_another(engine: PctEngine, folder: str) -> None:
    """pct gives up after 10 s with a message; the engine goes on trying."""
    lock = "/run/lock/lxc/pve-config-200.lock"
    hold = ["timeout", "13", "flock", lock, "sleep", "12"]
    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(engine.run_on_host, hold, timeout_s=60)
        time.sleep(1.0)
        started = time.monotonic()
        engine.put(Path(__file__), f"{folder}/file", timeout_s=60)
        assert time.monotonic() - started > 5
        holder.result(60)
    assert engine.run(["cat", f"{folder}/file"], timeout_s=20).stdout == Path(__file__).read_bytes()
    assert staged(engine) == []


def test_the_connection_is_checked_against_the_pinned_key(lab: Record, tmp_path: Path) -> None:
    from dataclasses import replace

    from dflashctl.remote.connection import SshConnection
    from dflashctl.remote.hostkeys import UnknownHostKey
    from dflashctl.remote.lab import lab_target

    target = lab_target(engine_of().host)
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    with pytest.raises(UnknownHostKey):
        SshConnection(replace(target, known_hosts=str(empty))).run(["true"], timeout_s=20)


def test_no_lab_no_engine(tmp_path: Path, lab: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASHCTL_LAB_DIR", str(tmp_path / "none"))
    with pytest.raises(Unreachable, match="the lab is not up") as caught:
        engine_of()
    assert caught.value.next == "dflashctl lab up"
