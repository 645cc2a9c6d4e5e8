"""A call of the agent: the frames, what stands between them, and what a missing answer means.

Run: python -m pytest tests/unit/test_agent_call.py
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl import errors
from dflashctl.agent import AgentError, payload
from dflashctl.agent import main as agent_main
from dflashctl.config.hosts import Host
from dflashctl.errors import ExitCode, Unreachable, UsageError
from dflashctl.remote import agent_call
from dflashctl.remote.agent_call import AgentBug, AnswerReader, call
from dflashctl.remote.engine import Completed
from dflashctl.remote.local import LocalEngine

NONCE = "0123456789abcdef"


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    return LocalEngine(local_host(tmp_path))


def local_host(root: Path, **changes: Any) -> Host:
    values: dict[str, Any] = {
        "name": "here",
        "engine": "local",
        "python": sys.executable,
        "home": str(root),
        "code_root": str(root / "code"),
        "workdir": str(root),
        "log_dir": str(root),
        "state_dir": str(root / "state"),
    }
    return Host(**{**values, **changes})


def frames(body: dict[str, Any], events: Sequence[dict[str, Any]] = (), nonce: str = NONCE) -> bytes:
    """What an agent writes."""
    out = BytesIO()
    emit = agent_main.Emit(out, nonce)
    for event in events:
        emit(event)
    emit.answer(body)
    return out.getvalue()


def test_a_call_returns_the_result_and_its_events(engine: LocalEngine) -> None:
    events: list[dict[str, Any]] = []
    answer = call(
        engine, "ping", {"echo": {"a": [1, None, "é"]}, "events": 3}, timeout_s=20, on_event=events.append
    )
    assert answer["echo"] == {"a": [1, None, "é"]}
    assert answer["python"] == sys.executable
    assert events == [{"number": 0}, {"number": 1}, {"number": 2}]


def test_file_names_that_are_no_text_survive(engine: LocalEngine) -> None:
    assert (
        call(engine, "ping", {"echo": "\udc80\udcff \u2028 \0"}, timeout_s=20)["echo"]
        == "\udc80\udcff \u2028 \0"
    )


def test_a_large_request_travels_on_stdin(engine: LocalEngine) -> None:
    assert call(engine, "ping", {"echo": "x" * 3_000_000}, timeout_s=30)["echo"] == "x" * 3_000_000


def test_no_data_is_in_argv(tmp_path: Path) -> None:
    seen: list[str] = []

    class Recorder(LocalEngine):
        def run(self, argv: Sequence[str], **options: Any) -> Completed:
            seen.extend(argv)
            return super().run(argv, **options)

    call(Recorder(local_host(tmp_path)), "ping", {"echo": "a secret"}, timeout_s=20)
    assert seen == [sys.executable, "-I", "-c", agent_call.LOADER]


def test_the_loader_needs_no_clever_quoting() -> None:
    assert "'" not in agent_call.LOADER and "\n" not in agent_call.LOADER and "!" not in agent_call.LOADER


def test_the_loader_works_where_python_has_no_memfd(tmp_path: Path) -> None:
    without = f"import os\nif hasattr(os, 'memfd_create'): del os.memfd_create\n{agent_call.LOADER}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", without],
        input=agent_call.pack("ping", {"echo": 1}, NONCE, 10),
        capture_output=True,
        timeout=20,
        check=False,
    )
    reader = AnswerReader(NONCE)
    reader.feed(done.stdout)
    assert (reader.body() or {})["result"]["echo"] == 1


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


KINDS = [
    code for code in ExitCode if code not in (ExitCode.OK, ExitCode.BUG, ExitCode.USAGE, ExitCode.INTERRUPTED)
]


@pytest.mark.parametrize("code", KINDS)
def test_every_kind_of_error_comes_back_as_its_class(code: ExitCode) -> None:
    error = agent_call.to_error(
        {"kind": code.name.lower(), "what": "w", "where": "h", "next": "n"}, default_where="d"
    )
    assert isinstance(error, errors.DflashError)
    assert (error.exit_code, error.what, error.where, error.next) == (code, "w", "h", "n")
    assert type(error) is not errors.DflashError


def test_usage_errors_come_back_too_and_get_a_place() -> None:
    error = agent_call.to_error({"kind": "usage", "what": "w", "where": ""}, default_where="ct200")
    assert type(error) is UsageError and error.where == "ct200"


@pytest.mark.parametrize("broken", [None, [], {}, {"kind": "bug", "what": "w"}, {"kind": "ok"}, {"kind": 7}])
def test_other_errors_are_bugs(broken: object) -> None:
    assert isinstance(agent_call.to_error(broken, default_where="ct200"), AgentBug)


def test_an_unforeseen_error_brings_its_traceback(engine: LocalEngine) -> None:
    with pytest.raises(AgentBug, match="ValueError") as caught:
        call(engine, "ping", {"events": "many"}, timeout_s=20)
    assert "dflash_agent/main.py" in str(caught.value)
    with pytest.raises(AgentBug, match="no such operation"):
        call(engine, "dance", {}, timeout_s=20)


def test_a_missing_interpreter_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="/nope/python") as caught:
        call(LocalEngine(local_host(tmp_path, python="/nope/python")), "ping", {}, timeout_s=20)
    assert "python:" in caught.value.next


def test_a_program_that_dies_without_an_answer_shows_the_end_of_its_stderr(tmp_path: Path) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho start; echo 'out of memory' >&2; exit 9\n")
    dying.chmod(0o755)
    with pytest.raises(Unreachable, match=r"without an answer \(exit code 9\): out of memory"):
        call(LocalEngine(local_host(tmp_path, python=str(dying))), "ping", {}, timeout_s=20)


def test_a_deadline_says_that_it_may_still_be_running(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 15\n")
    slow.chmod(0o755)
    with pytest.raises(Unreachable, match="may still be running"):
        call(LocalEngine(local_host(tmp_path, python=str(slow))), "ping", {}, timeout_s=0.4)


def test_a_talkative_login_shell_does_not_matter(tmp_path: Path) -> None:
    chatty = tmp_path / "python"
    chatty.write_text(
        "#!/bin/sh\n"
        "printf 'Welcome!\\nDFLASH-ANSWER deadbeef 3\\n{}\\nno newline at the end: '\n"
        f'{sys.executable} "$@"; code=$?\n'
        "echo; echo 'Goodbye'; exit $code\n"
    )
    chatty.chmod(0o755)
    events: list[dict[str, Any]] = []
    answer = call(
        LocalEngine(local_host(tmp_path, python=str(chatty))),
        "ping",
        {"echo": "x", "events": 1},
        timeout_s=20,
        on_event=events.append,
    )
    assert answer["echo"] == "x"
    assert events == [{"number": 0}]


def test_an_answer_counts_even_when_the_exit_code_does_not_look_like_it(tmp_path: Path) -> None:
    odd = tmp_path / "python"
    odd.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit 255\n')
    odd.chmod(0o755)
    assert (
        call(LocalEngine(local_host(tmp_path, python=str(odd))), "ping", {"echo": 1}, timeout_s=20)["echo"]
        == 1
    )


NOISE = st.binary(max_size=60).filter(lambda noise: NONCE.encode() not in noise)


@given(
    before=NOISE,
    between=NOISE,
    after=NOISE,
    result=st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3),
    cuts=st.lists(st.integers(0, 500), max_size=8),
)
def test_frames_are_found_in_any_noise_and_however_they_are_cut(
    before: bytes, between: bytes, after: bytes, result: dict[str, str], cuts: list[int]
) -> None:
    event = frames({}, [{"n": 1}]).split(b"\nDFLASH-ANSWER")[0]
    answer = frames({"ok": True, "result": result})
    data = before + event + b"\n" + between + answer + after
    seen: list[dict[str, Any]] = []
    reader = AnswerReader(NONCE, seen.append)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, end in itertools.pairwise(edges):
        reader.feed(data[start:end])
    assert reader.body() == {"ok": True, "result": result}
    assert seen == [{"n": 1}]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"DFLASH-ANSWER " + NONCE.encode() + b" 40\n{}",
        b"DFLASH-ANSWER " + NONCE.encode() + b" 2\n{}",  # the end is missing: perhaps more was meant
        frames({"ok": True, "result": {}}, nonce="another"),
        frames({"ok": True, "result": {}})[:-20],
        b"DFLASH-ANSWER " + NONCE.encode() + b" 2\nno\nDFLASH-END " + NONCE.encode() + b"\n",
        b"DFLASH-ANSWER " + NONCE.encode() + b" 2\n[]\nDFLASH-END " + NONCE.encode() + b"\n",
    ],
)
def test_what_is_no_whole_answer_is_none(data: bytes) -> None:
    reader = AnswerReader(NONCE)
    reader.feed(data)
    assert reader.body() is None


def test_an_event_that_is_no_json_is_passed_over() -> None:
    seen: list[dict[str, Any]] = []
    reader = AnswerReader(NONCE, seen.append)
    reader.feed(f"DFLASH-EVENT {NONCE} {{broken\nDFLASH-EVENT {NONCE} [1]\n".encode())
    reader.feed(frames({"ok": True, "result": {}}, [{"n": 1}]))
    assert seen == [{"n": 1}]
    assert reader.body() == {"ok": True, "result": {}}


def test_the_payload_depends_on_the_sources_alone() -> None:
    assert payload.build_payload() == payload.build_payload()
    with zipfile.ZipFile(BytesIO(payload.build_payload())) as archive:
        names = archive.namelist()
        assert names == sorted(names)
        assert {"__main__.py", "dflash_agent/__init__.py", "dflash_agent/main.py"} <= set(names)
        assert all(info.date_time == (1980, 1, 1, 0, 0, 0) for info in archive.infolist())


def test_the_payload_is_the_same_from_a_zipped_install(tmp_path: Path) -> None:
    """As from a wheel that was not unpacked."""
    package = Path(agent_main.__file__).parent
    bundle = tmp_path / "bundle.zip"
    with zipfile.ZipFile(bundle, "w") as archive:
        archive.writestr("dflashctl/__init__.py", "__version__ = '0'\n")
        for source in package.glob("*.py"):
            archive.write(source, f"dflashctl/agent/{source.name}")
    script = (
        "import sys, hashlib\n"
        f"sys.path.insert(0, {str(bundle)!r})\n"
        "from dflashctl.agent import payload\n"
        "assert '.zip' in payload.__file__\n"
        "print(hashlib.sha256(payload.build_payload()).hexdigest())"
    )
    printed = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=20, check=True
    )
    import hashlib

    assert printed.stdout.strip() == hashlib.sha256(payload.build_payload()).hexdigest()


def test_the_agent_can_write_the_zip_that_it_came_from(tmp_path: Path) -> None:
    """So a supervisor is of the version that launched it, whatever the laptop sends later."""
    archive = tmp_path / "agent.zip"
    archive.write_bytes(payload.build_payload())
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(archive)!r})\n"
        "from dflash_agent import payload\n"
        f"payload.write_payload({str(tmp_path / 'supervisor.pyz')!r})"
    )
    subprocess.run([sys.executable, "-I", "-c", script], timeout=20, check=True)
    written = tmp_path / "supervisor.pyz"
    assert written.read_bytes() == archive.read_bytes()
    usage = subprocess.run(
        [sys.executable, "-I", str(written), "dance"], capture_output=True, text=True, timeout=20, check=False
    )
    assert usage.returncode == 2 and "supervise RUN_DIR" in usage.stderr


def test_every_operation_of_the_table_exists() -> None:
    for op in agent_main.OPS:
        assert callable(agent_main.find_op(op)), op


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


def zip_with(op: bytes, modules: dict[str, str]) -> bytes:
    """An agent whose "ping" is another operation, `op`, of one of `modules`."""
    folder = Path(agent_main.__file__).parent
    sources = {
        "__init__": (folder / "__init__.py").read_bytes(),
        "main": (folder / "main.py").read_bytes().replace(b"main:ping", op),
        **{name: text.encode() for name, text in modules.items()},
    }
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in sources.items():
            archive.writestr(f"dflash_agent/{name}.py", data)
    return buffer.getvalue()


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


@pytest.mark.skipif(shutil.which("python3") is None, reason="no other python3 on this machine's PATH")
def test_the_machine_s_own_python_answers_too(tmp_path: Path) -> None:
    engine = LocalEngine(local_host(tmp_path, python=shutil.which("python3")))
    assert call(engine, "ping", {}, where="host", timeout_s=20)["protocol"] == agent_main.PROTOCOL


def test_the_envelope_is_json_in_ascii_after_the_zip() -> None:
    data = agent_call.pack("ping", {"é": 1}, NONCE, 7.0)
    size = int.from_bytes(data[:8], "big")
    envelope = data[8 + size + 8 :]
    assert envelope.isascii()
    assert json.loads(envelope) == {
        "op": "ping",
        "nonce": NONCE,
        "timeout_s": 7.0 + agent_call.AGENT_GRACE_S,
        "request": {"é": 1},
    }
