"""Errors at the command line: exit codes, what is said of them, and the log of errors.

Run: python -m pytest tests/unit/test_cli_errors.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from frame_kit import ROOT

from dflashctl import errors
from dflashctl.cli import errorlog
from dflashctl.cli import main as frame
from dflashctl.errors import DflashError, ExitCode
from dflashctl.render.json import emit

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DflashError)]

pytestmark = pytest.mark.usefixtures("log")


@pytest.mark.parametrize("kind", KINDS)
def test_errors_end_with_their_exit_code_and_say_what_where_next(
    kind: type[DflashError], verb: Any, capsys: pytest.CaptureFixture[str], log: Path
) -> None:
    def fail() -> None:
        raise kind("what happened", where="ct200", next="dflashctl gpu")

    verb(fail)
    assert frame.run(["status"]) == int(kind.exit_code)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: ct200: what happened\nnext: dflashctl gpu\n"
    assert "Traceback" in log.read_text()


def test_every_exit_code_but_three_has_an_error_class() -> None:
    covered = {kind.exit_code for kind in KINDS} | {ExitCode.OK, ExitCode.BUG, ExitCode.INTERRUPTED}
    assert covered == set(ExitCode)


def test_hostile_text_in_an_error_is_made_visible(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise DflashError("\x1b]0;owned\x07\x1b[2J[red]", next="a\rb")

    verb(fail)
    frame.run(["status"])
    err = capsys.readouterr().err
    assert "\x1b" not in err and "\r" not in err and "\x07" not in err
    assert "\\x1b[2J[red]" in err


def test_a_bug_is_one_line_with_the_log_s_name(
    verb: Any, capsys: pytest.CaptureFixture[str], log: Path
) -> None:
    def fail() -> None:
        raise ValueError("first line\nsecond line")

    verb(fail)
    assert frame.run(["status"]) == 1
    err = capsys.readouterr().err
    assert err == f"a bug in dflashctl: ValueError: first line (full traceback in {log})\n"
    assert "second line" in log.read_text() and "Traceback" in log.read_text()


def test_the_log_is_private_and_appended_to(verb: Any, log: Path) -> None:
    def fail() -> None:
        raise ValueError("once more")

    verb(fail)
    frame.run(["status"])
    frame.run(["status"])
    assert log.read_text().count("ValueError: once more") == 2
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.parent.stat().st_mode & 0o777 == 0o700


def test_a_full_log_is_put_aside(verb: Any, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("x")

    verb(fail)
    monkeypatch.setattr(errorlog, "MAX_BYTES", 10)
    frame.run(["status"])
    frame.run(["status"])
    assert log.with_name("errors.log.1").exists()


def test_a_log_that_cannot_be_written_is_told_and_does_not_hide_the_error(
    verb: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASHCTL_LOG", str(tmp_path / "file" / "log"))

    def fail() -> None:
        raise ValueError("the cause")

    verb(fail)
    assert frame.run(["status"]) == 1
    assert "the cause (no traceback kept" in capsys.readouterr().err


def test_secrets_do_not_reach_the_log(verb: Any, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    monkeypatch.setenv("DFLASHCTL_SSH_PASSPHRASE", "correct horse")
    monkeypatch.setenv("MY_API_KEY", "0123456789")

    def fail() -> None:
        raise ValueError(
            "hf_abcdefghijklmnop, correct horse, 0123456789, password=hunter22, --token: 'tuvwxyz1'"
        )

    verb(fail)
    frame.run(["status"])
    text = log.read_text()
    for secret in ("abcdefghijklmnop", "correct horse", "0123456789", "hunter22", "tuvwxyz1"):
        assert secret not in text, secret


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nothing secret here", "nothing secret here"),
        ("HF_TOKEN=abcdefgh rest", "HF_TOKEN=*** rest"),
        ('"api_key": "abcdefgh"', '"api_key": "***"'),
        ("ghp_0123456789abcdef", "ghp_***"),
        ("step 12 tokens/s 49152", "step 12 tokens/s 49152"),
        ("tokens: 12", "tokens: 12"),
        ("value abc", "value abc"),
        ("to https://ann:hunter2@example.org/x now", "to https://ann:***@example.org/x now"),
        ('ProxyCommand("sshpass -p hunter2 ssh j") returned nonzero', "ProxyCommand(***) returned nonzero"),
    ],
)
def test_masking(text: str, expected: str) -> None:
    assert errorlog.mask(text, {"X_TOKEN": "abc"}) == expected


@pytest.mark.parametrize(
    ("raised", "code", "what"),
    [
        (errors.NotFound("no run x", where="runs", next="dflashctl runs"), 6, "no run x"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("1/0"), 1, "a bug in dflashctl: ZeroDivisionError: 1/0"),
        (typer.BadParameter("too many"), 2, "Invalid value: too many"),
    ],
)
def test_an_error_is_a_document_with_json(
    raised: BaseException, code: int, what: str, verb: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(json: bool = False) -> None:
        raise raised

    verb(fail)
    assert frame.run(["status", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["exit_code"], found["error"]) == ("dflashctl.error/1", code, what)
    assert set(found) == {"schema", "error", "where", "next", "exit_code"}
    assert frame.run(["status"]) == code
    assert capsys.readouterr().out == ""


def test_an_error_after_the_document_adds_no_other(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def fail_late(json: bool = False) -> None:
        emit("dflashctl.status/1", {"runs": []})
        raise errors.RunBad("demo failed")

    verb(fail_late)
    for _ in range(2):
        assert frame.run(["status", "--json"]) == 7
        assert json.loads(capsys.readouterr().out) == {"schema": "dflashctl.status/1", "runs": []}


def test_an_outcome_that_is_no_error_keeps_its_code(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def bad_run() -> None:
        raise typer.Exit(int(ExitCode.RUN_BAD))

    verb(bad_run)
    assert frame.run(["status"]) == 7
    assert capsys.readouterr().err == ""


def test_results_of_verbs_are_no_exit_codes(verb: Any) -> None:
    def answer() -> bool:
        return True

    verb(answer)
    assert frame.run(["status"]) == 0


def test_the_table_of_exit_codes_is_complete() -> None:
    rows = re.findall(
        r"^\| (\d+) \| ([A-Z_]+) \| (.+) \|$", (ROOT / "docs" / "exit-codes.md").read_text(), re.MULTILINE
    )
    assert [(int(number), name) for number, name, _ in rows] == [(int(code), code.name) for code in ExitCode]
