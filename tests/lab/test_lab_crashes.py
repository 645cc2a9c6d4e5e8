"""A lab that lost a process, its record or its maker ends; an interrupted `lab up` leaves one or nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from typing import Any

import pytest
from lab_client import cli_argv, cli_environment, enter, ssh
from own_lab import child_of_host, processes_of, wait_for
from own_lab import own as own

from dflashctl.agent.processes import kin, proc
from dflashctl.errors import Unreachable
from dflashctl.lab import ending, lifecycle
from dflashctl.lab.state import LabPaths, load_endpoint, read_record

pytestmark = pytest.mark.lab


# --- crashes ----------------------------------------------------------------------------------------------


def test_killing_the_host_ends_everything_and_the_next_up_works(own: LabPaths) -> None:
    record = lifecycle.up().record
    enter(record.endpoint, "echo kept > /workspace/f; setsid sleep 300.875 </dev/null >/dev/null 2>&1 &")
    ssh(record.endpoint, "setsid sleep 300.875 </dev/null >/dev/null 2>&1 &")
    everything = kin.descendants([record.pid], proc.table())
    assert len(everything) == 5  # two servers, the container's first process, two sleepers
    os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: not record.alive())
    wait_for(lambda: processes_of(own) == [])
    assert [pid for pid in everything if (p := proc.read_process(pid)) and not p.dead] == []
    with pytest.raises(Unreachable):
        load_endpoint()
    found = lifecycle.status()
    assert found.record is None and str(own.log) in found.word
    again = lifecycle.up()
    assert again.cleaned and not again.already and again.record.endpoint.port != 0
    assert enter(again.record.endpoint, "cat /workspace/f; nvidia-smi -L | wc -l").stdout == b"kept\n8\n"


def test_down_after_a_crash_leaves_nothing(own: LabPaths) -> None:
    record = lifecycle.up().record
    os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: not record.alive())
    assert lifecycle.down()
    assert not own.root.exists() and processes_of(own) == []


@pytest.mark.parametrize(("name", "words"), [("sshd", "the ssh server"), ("gpu-driver", "the GPU driver")])
def test_the_lab_ends_with_its_servers_and_says_so(own: LabPaths, name: str, words: str) -> None:
    record = lifecycle.up().record
    os.kill(child_of_host(record, name), signal.SIGKILL)
    wait_for(lambda: not record.alive())
    wait_for(lambda: processes_of(own) == [])
    assert f"{words} ended: so does the lab" in own.log.read_text()


def test_a_lab_that_does_not_answer_is_made_anew(own: LabPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "ANSWER_DEADLINE_S", 0.5)
    record = lifecycle.up().record
    os.kill(child_of_host(record, "sshd"), signal.SIGSTOP)
    assert lifecycle.status().word.startswith("half dead")
    again = lifecycle.up()
    assert not again.already and again.record.pid != record.pid
    assert not record.alive()
    assert ssh(again.record.endpoint, "echo ok").stdout == b"ok\n"


def test_a_strangers_process_with_the_recorded_pid_is_left_alone(own: LabPaths) -> None:
    record = lifecycle.up().record
    stranger = subprocess.Popen(["sleep", "300"])
    try:
        wrong = replace(record, pid=stranger.pid)
        assert ending.kill((wrong.pid, wrong.start), 5)
        text = own.record.read_text().replace(f'"pid": {record.pid}', f'"pid": {stranger.pid}')
        os.kill(record.pid, signal.SIGKILL)
        wait_for(lambda: not record.alive())
        own.record.write_text(text)
        assert read_record(own) == wrong
        assert lifecycle.up().cleaned
        assert lifecycle.down()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_half_written_record_is_cleaned_away(own: LabPaths) -> None:
    record = lifecycle.up().record
    text = own.record.read_text()
    os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: not record.alive())
    own.record.write_text(text[: len(text) // 2])
    assert lifecycle.status().record is None
    assert lifecycle.up().cleaned


@pytest.mark.parametrize("text", [None, "", "{"])
def test_a_live_lab_whose_record_is_lost_is_found(own: LabPaths, text: str | None) -> None:
    record = lifecycle.up().record
    own.record.unlink()
    if text is not None:
        own.record.write_text(text)
    assert lifecycle.status().word == "half dead: its record is gone"
    again = lifecycle.up()
    assert not again.already and again.cleaned and not record.alive()
    own.record.unlink()
    assert lifecycle.down()
    assert not again.record.alive() and processes_of(own) == [] and not own.root.exists()


# --- interrupted ------------------------------------------------------------------------------------------


# seconds; `make soak` looks more closely
FINER = [pytest.param(round(0.017 * n, 3), marks=pytest.mark.soak) for n in range(1, 25)]


def interrupted_up(paths: LabPaths, after_s: float, number: int) -> int:
    """Start `lab up`, and signal it that long after it has begun its work."""
    process = subprocess.Popen(
        cli_argv("lab", "up"),
        env=cli_environment(paths.root),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(paths.root.exists)
    time.sleep(after_s)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors
    return process.returncode


@pytest.mark.parametrize("after_s", [0, 0.04, 0.12, 0.2, 0.3, *FINER])
def test_ctrl_c_leaves_a_lab_or_nothing(own: LabPaths, after_s: float) -> None:
    code = interrupted_up(own, after_s, signal.SIGINT)
    record = read_record(own)
    if record is not None and record.alive():
        assert ssh(record.endpoint, "echo ok").stdout == b"ok\n"
    else:
        assert code == 130
        assert processes_of(own) == []
        assert not own.record.exists() and not own.pct.exists()
    assert ssh(lifecycle.up().record.endpoint, "echo ok").stdout == b"ok\n"


def test_ctrl_c_while_the_host_is_being_started_leaves_nothing(
    own: LabPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, before = subprocess.Popen, signal.getsignal(signal.SIGINT)

    def started(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = real(*words, **options)
        signal.raise_signal(signal.SIGINT)  # before the caller has it
        return process

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(KeyboardInterrupt):
        lifecycle.up()
    assert processes_of(own) == []
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("after_s", [0, 0.05, 0.15, 0.3, *FINER])
def test_killing_up_leaves_a_lab_or_no_process(own: LabPaths, after_s: float) -> None:
    interrupted_up(own, after_s, signal.SIGKILL)
    record = read_record(own)
    if record is None or not record.alive():
        wait_for(lambda: processes_of(own) == [] or ((r := read_record(own)) and r.alive()))
    assert ssh(lifecycle.up().record.endpoint, "echo ok").stdout == b"ok\n"
