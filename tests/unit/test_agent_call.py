"""A call of the agent, as the command line makes it: results, events, errors, no answer.

Run: python -m pytest tests/unit/test_agent_call.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_kit import local_host

from dflashctl import errors
from dflashctl.config.hosts import Ssh
from dflashctl.errors import ExitCode, Unreachable, UsageError
from dflashctl.remote import agent_call
from dflashctl.remote.agent_call import HOST_PYTHON, AgentBug, call, no_answer
from dflashctl.remote.engine import Completed
from dflashctl.remote.local import LocalEngine


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    return LocalEngine(local_host(tmp_path))


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


IN_THE_WAY = [
    ("echo 'This account is currently not available.'; exit 1", "This account is currently not available."),
    ("exit 3", r"\(exit code 3\): not a word"),
    (f'read eaten; exec {sys.executable} "$@"', "without an answer"),
    (f'head -c 8 > /dev/null; exec {sys.executable} "$@"', "without an answer"),
]


@pytest.mark.parametrize(("script", "said"), IN_THE_WAY, ids=["nologin", "exits", "reads a line", "reads"])
def test_what_stands_before_the_command_is_told(tmp_path: Path, script: str, said: str) -> None:
    """A login shell or its start-up file: it took the command's place, or its input."""
    shell = tmp_path / "python"
    shell.write_text(f"#!/bin/sh\n{script}\n")
    shell.chmod(0o755)
    host = local_host(tmp_path, python=str(shell)).model_copy(update={"ssh": Ssh(host="box")})
    with pytest.raises(Unreachable, match=said) as caught:
        call(LocalEngine(host), "ping", {}, timeout_s=20)
    assert "did not begin" in caught.value.next
    assert "Traceback" not in caught.value.what


def test_a_host_without_python_is_not_told_to_set_the_container_s() -> None:
    bare = Completed(("python3",), 127, b"", b"bash: line 1: python3: command not found\n", 0.1)
    error = no_answer(bare, op="ping", python=HOST_PYTHON, where="box (the host)", began=False, by_ssh=True)
    assert isinstance(error, UsageError)
    assert "hosts.yaml" not in error.next and "PATH" in error.next


@pytest.mark.parametrize(
    "said",
    [
        "lxc-attach: 200: attach.c: 1611 Resource temporarily unavailable - Failed to clone attached process",
        "bash: fork: retry: Resource temporarily unavailable",
        "OSError: [Errno 12] Cannot allocate memory",
        "RuntimeError: can't start new thread",
    ],
)
@pytest.mark.parametrize("began", [True, False])
def test_a_machine_at_its_limits_is_told_as_that(said: str, began: bool) -> None:
    done = Completed(("python3",), 1, b"", said.encode() + b"\n", 0.1)
    error = no_answer(done, op="ping", python="/v/python", where="ct200", began=began, by_ssh=True)
    assert "pids.max" in error.next and said in error.what


def test_a_container_that_cannot_be_entered_is_no_matter_of_the_login_shell() -> None:
    for said in (b"lxc-attach: 200: lxclock.c: 190 Read-only file system\n", b"Failed to rexec as memfd\n"):
        done = Completed(("python3",), 1, b"", said, 0.1)
        error = no_answer(done, op="ping", python="/v/python", where="ct200", began=False, by_ssh=True)
        assert said.decode().strip() in error.what and "shell" not in error.next
