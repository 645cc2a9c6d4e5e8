"""Run with: pytest tests/unit/test_proc.py. Processes by identity, signals to nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.agent.processes import kin, proc, signals

STAT = b"%d (%b) S %d 77 78 0 -1 4194304 5 0 0 0 40 2 0 0 20 0 3 0 %d 1000 25 18446744073709551615 1"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], env={"DFLASH_RUN_ID": "mine"})
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("comm", [b"python3", b"a) b (c", b"VLLM::Worker", b")", b"", "café".encode()])
def test_stat_is_read_whatever_the_name_holds(comm: bytes) -> None:
    found = proc.parse_stat(STAT % (12, comm, 1, 4567))
    assert found is not None
    assert (found.pid, found.ppid, found.start, found.state) == (12, 1, 4567, "S")
    assert (found.pgid, found.session, found.threads, found.cpu_ticks) == (77, 78, 3, 42)
    assert found.rss_bytes == 25 * proc.PAGE_BYTES
    assert found.comm.encode() == comm


@given(st.binary(max_size=200))
def test_no_bytes_make_the_parser_raise(data: bytes) -> None:
    proc.parse_stat(data)


def test_own_process_is_in_the_table_with_its_identity() -> None:
    mine = proc.table()[os.getpid()]
    assert mine.identity == proc.own_identity()
    assert mine.ppid == os.getppid()
    assert mine.rss_bytes > 10**6
    started = proc.started_at(mine.start)
    assert started is not None and 0 < time.time() - started < 86400


def test_details_of_a_live_process(sleeper: subprocess.Popen[bytes]) -> None:
    process = proc.read_process(sleeper.pid)
    assert process is not None
    told = proc.describe(process)
    assert told["cmdline"] == ["sleep", "60"]
    assert told["uid"] == os.getuid()
    assert proc.ns_pids(sleeper.pid)[0] == sleeper.pid
    assert proc.pid_namespace(sleeper.pid) == proc.pid_namespace()
    assert [thread["tid"] for thread in proc.thread_states(sleeper.pid)] == [sleeper.pid]
    assert kin.run_of(sleeper.pid) == "mine"
    assert sleeper.pid in kin.tagged(proc.table())["mine"]


def test_what_is_gone_reads_as_nothing() -> None:
    gone = 2**22 + 5  # above pid_max
    assert proc.read_process(gone) is None
    assert proc.cmdline(gone) == []
    assert proc.status_fields(gone) == {}
    assert proc.uid(gone) is None
    assert proc.ns_pids(gone) == []
    assert proc.thread_states(gone) == []
    assert proc.pid_namespace(gone) is None
    assert kin.run_of(gone) is None


def test_a_zombie_is_not_living(until: Callable[..., Any]) -> None:
    process = subprocess.Popen(["true"])
    identity = until(lambda: (one := proc.read_process(process.pid)) and one.state == "Z" and one.identity)
    assert proc.living(identity) is None
    process.wait()


def test_another_start_is_another_process(sleeper: subprocess.Popen[bytes]) -> None:
    process = proc.read_process(sleeper.pid)
    assert process is not None and proc.living(process.identity) is not None
    recycled = (process.pid, process.start - 1)
    assert proc.living(recycled) is None
    assert signals.send_signal(recycled, signal.SIGKILL) is False
    assert sleeper.poll() is None, "a recycled pid was signalled"


@pytest.mark.parametrize("pidfd", [True, False])
def test_exactly_the_identified_process_is_signalled(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    if not pidfd:  # Python 3.8, or an old kernel
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    process = proc.read_process(sleeper.pid)
    assert process is not None
    assert signals.send_signal(process.identity, signal.SIGTERM) is True
    assert sleeper.wait(10) == -signal.SIGTERM
    assert signals.send_signal(process.identity, signal.SIGTERM) is False


@pytest.mark.parametrize("pid", [-1, 0, 1, os.getpid()], ids=["group", "zero", "init", "self"])
def test_never_a_group_nor_init_nor_oneself(pid: int) -> None:
    with pytest.raises(ValueError, match="refusing"):
        signals.send_signal((pid, 1), signal.SIGKILL)


def test_a_kernel_without_pidfd_falls_back(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    process = proc.read_process(sleeper.pid)
    assert process is not None
    assert signals.send_signal(process.identity, signal.SIGTERM) is True
    assert sleeper.wait(10) == -signal.SIGTERM


def test_same_place_needs_boot_and_container_start() -> None:
    here = proc.here()
    assert proc.same_place(here)
    assert not proc.same_place({**here, "init_start": here["init_start"] + 1})
    assert not proc.same_place({**here, "boot_id": "another"})
    assert not proc.same_place({})


@pytest.mark.parametrize("recorded", [None, [], {}, {"pid": "1", "start": 2}, {"pid": 1}, "x"])
def test_a_damaged_identity_is_none(recorded: Any) -> None:
    assert proc.as_identity(recorded) is None
