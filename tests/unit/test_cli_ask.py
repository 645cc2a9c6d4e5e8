"""Run with: pytest tests/unit/test_cli_ask.py. A question has a yes, a no, or nobody who hears it."""

from __future__ import annotations

import io
from typing import Any

import pytest

from dflashctl.cli import killtext
from dflashctl.cli.ask import ask
from dflashctl.errors import ExitCode, UsageError


def asked(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    ask("Remove them?", where="ct200")


@pytest.mark.parametrize("answer", ["y\n", "Yes\n", " y"])
def test_a_yes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str) -> None:
    asked(monkeypatch, answer)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "Remove them? [y/N]: "), "stdout is for what was asked for"


@pytest.mark.parametrize("answer", ["n\n", "\n", "yes please\n", "j\n"])
def test_a_no(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    with pytest.raises(UsageError) as said:
        asked(monkeypatch, answer)
    assert (said.value.what, said.value.where) == ("nothing was done", "ct200")


def test_nobody_is_no_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`runs prune` from cron ended with 130 and the word `interrupted`."""
    with pytest.raises(UsageError) as said:
        asked(monkeypatch, "")
    assert said.value.exit_code == ExitCode.USAGE and said.value.next == "add --yes"
    assert "nobody is there to ask; nothing was done" in said.value.what
    assert capsys.readouterr().err.endswith("\n"), "the error begins a line of its own"


def test_a_run_without_a_readable_record_is_named_by_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    answer: dict[str, Any] = {
        "id": "20261130T120000000-abcdef", "tag": None, "outcome": "killed", "signalled": {"KILL": []},
        "seconds": 0.1, "problems": [], "zombies": [],
    }  # fmt: skip
    killtext.show_stopped("ct200", answer, quiet=False)
    run = {"id": answer["id"], "tag": None, "family": [], "gpus": []}
    killtext.show_targets("ct200", None, [run], quiet=False)
    said = capsys.readouterr().out
    assert "None" not in said and said.count(answer["id"]) == 2
