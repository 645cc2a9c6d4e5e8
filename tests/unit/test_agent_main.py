"""The agent over there: deadlines, broken requests, callers that went away, operations that print.

Run: python -m pytest tests/unit/test_agent_main.py
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_kit import NONCE, local_host, zip_with

from dflashctl.agent import AgentError, payload
from dflashctl.agent import main as agent_main
from dflashctl.remote import agent_call
from dflashctl.remote.agent_call import AgentBug, call
from dflashctl.remote.local import LocalEngine


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    return LocalEngine(local_host(tmp_path))


def test_what_an_operation_prints_does_not_reach_the_answer(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of an operation may write to stdout, and may read stdin."""
    noisy = (
        "import subprocess\n"
        "def noisy(request, emit):\n"
        "    print('DFLASH-END nonsense')\n"
        "    subprocess.run(['sh', '-c', 'cat; echo child; echo DFLASH-ANSWER 1 2'])\n"
        "    return {'fine': True}\n"
    )
    zipped = zip_with(b"noisy:noisy", {"noisy": noisy})
    monkeypatch.setattr(agent_call, "payload", lambda: zipped)
    assert call(engine, "ping", {}, timeout_s=20) == {"fine": True}


def test_an_operation_that_takes_too_long_is_stopped_over_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(request: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        try:
            time.sleep(60)
        finally:
            emit({"cleaned": True})
        return {}

    monkeypatch.setattr(agent_main, "find_op", lambda op: slow)
    events: list[dict[str, Any]] = []
    started = time.monotonic()
    body = agent_main.perform("slow", {}, events.append, 0.2)
    assert time.monotonic() - started < 40
    assert body["error"]["kind"] == "unreachable"
    assert "did not end within" in body["error"]["what"]
    assert events == [{"cleaned": True}]


def test_a_foreseen_error_is_answered_with_all_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: dict[str, Any], emit: object) -> dict[str, Any]:
        raise AgentError("locked", "held", "/x", "wait")

    monkeypatch.setattr(agent_main, "find_op", lambda op: refuse)
    assert agent_main.perform("x", {}, None) == {
        "ok": False,
        "error": {"kind": "locked", "what": "held", "where": "/x", "next": "wait"},
    }


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.ENOSPC, "free some space"), (errno.EACCES, "owner"), (errno.EROFS, "read-only"),
     (errno.EIO, "dmesg"), (errno.ESTALE, "mount it anew"),
     (errno.EDQUOT, "quota"), (errno.EMFILE, "ulimit -n")],
)  # fmt: skip
def test_what_is_wrong_around_an_operation_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    """A note on the run of another user, or any write on a full disk, read as a bug in dflashctl."""

    def write(request: dict[str, Any], emit: object) -> dict[str, Any]:
        raise OSError(number, os.strerror(number), "/run/x")

    monkeypatch.setattr(agent_main, "find_op", lambda op: write)
    error = agent_main.perform("x", {}, None)["error"]
    assert (error["kind"], error["what"], error["where"]) == ("verification", os.strerror(number), "/run/x")
    assert hint in error["next"]


def test_a_failed_call_that_points_at_the_program_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    for failing in (OSError(errno.EBADF, "Bad file descriptor"), OSError("no number"), ValueError("x")):

        def fail(request: dict[str, Any], emit: object, failing: Exception = failing) -> dict[str, Any]:
            raise failing

        monkeypatch.setattr(agent_main, "find_op", lambda op, fail=fail: fail)
        assert agent_main.perform("x", {}, None)["error"]["kind"] == "bug"


def test_events_stop_when_nobody_reads_any_more_and_the_work_goes_on() -> None:
    reader, writer = os.pipe()
    emit = agent_main.Emit(os.fdopen(writer, "wb"), NONCE)
    emit({"n": 1})
    assert not emit.gone
    os.close(reader)
    emit({"n": 2})
    emit({"n": 3})
    assert emit.gone


def test_nothing_is_done_for_a_caller_that_is_gone(tmp_path: Path) -> None:
    """As after a thaw: the request is still in the pipe, but its person was told that it did not happen."""
    done = tmp_path / "done"
    zipped = zip_with(
        b"effect:effect",
        {"effect": f"def effect(request, emit):\n    open({str(done)!r}, 'w').close()\n    return {{}}\n"},
    )
    envelope = json.dumps({"op": "ping", "nonce": NONCE, "request": {}}).encode()
    data = len(zipped).to_bytes(8, "big") + zipped + len(envelope).to_bytes(8, "big") + envelope
    for gone in (True, False):
        reader, writer = os.pipe()
        if gone:
            os.close(reader)
        ended = subprocess.run(
            [sys.executable, "-I", "-c", agent_call.LOADER],
            input=data,
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=20,
            check=False,
        )
        os.close(writer)
        assert done.exists() is not gone
        assert (b"nothing was done" in ended.stderr) is gone
    os.close(reader)


def test_an_answer_that_is_no_json_is_a_bug(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    zipped = zip_with(b"odd:odd", {"odd": "def odd(request, emit):\n    return {'x': {1, 2}}\n"})
    monkeypatch.setattr(agent_call, "payload", lambda: zipped)
    with pytest.raises(AgentBug, match="no JSON"):
        call(engine, "ping", {}, timeout_s=20)


@pytest.mark.parametrize(
    "stdin",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\0\0\0\0\x05{}",
        b"\xff" * 8,
        b"\0\0\0\0\0\0\0\x02[]",
        b"\0\0\0\0\0\0\0\x02{}",
        b"\0\0\0\0\0\0\0\x03{}}",
    ],
)
def test_a_broken_request_is_refused_without_an_answer(stdin: bytes) -> None:
    zipped = payload.build_payload()
    data = len(zipped).to_bytes(8, "big") + zipped + stdin
    done = subprocess.run(
        [sys.executable, "-I", "-c", agent_call.LOADER],
        input=data,
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == b""
    assert b"no request" in done.stderr and b"Traceback" not in done.stderr
