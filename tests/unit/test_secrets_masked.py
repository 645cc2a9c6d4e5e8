"""Run with: pytest tests/unit/test_secrets_masked.py. What is secret is not shown when it comes back."""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dflashctl.cli import errorlog
from dflashctl.history import listing as history
from dflashctl.logs.reading import Position, receive
from dflashctl.render import json, secrets, table, text
from dflashctl.runs.readfacts import read_run

SET = {
    "LICENCE": "open sesame",
    "HF_TOKEN": "hf-12345678",
    "WORD_TOKEN": "yes",
    "PLAIN": "me",
    "NONE": "",
}


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    secrets.begin({})
    for name, value in SET.items():
        monkeypatch.setenv(name, value)
    yield
    secrets.begin({})


def test_named_ones_and_those_that_sound_so() -> None:
    secrets.begin()
    secrets.hide(["LICENCE", "NOT_SET", "NONE"])
    said = "open sesame hf-12345678 yes me"
    assert secrets.masked(said) == "*** *** yes me"
    secrets.hide(["WORD_TOKEN"])
    assert secrets.masked(said) == "*** *** *** me", "who names it has it hidden, though it is short"


def test_every_way_out_masks() -> None:
    secrets.hide(["LICENCE"])
    said = "got open sesame here"
    assert text.line(said) == text.block(said) == text.clip(said, 40) == "got *** here"
    assert "sesame" not in json.document("dflashctl.status/1", {"runs": [{"evidence": [said]}]})
    shown = io.StringIO()
    table.say(said, file=shown)
    table.show(table.table(("A", "B"), [["1", said]]), shown)
    assert "sesame" not in shown.getvalue() and shown.getvalue().count("***") == 2
    assert "sesame" not in errorlog.mask(said, {})


def test_a_narrow_table_does_not_break_a_secret_in_two() -> None:
    secrets.hide(["HF_TOKEN"])
    assert "12345678" not in table.plain(table.table(("A", "B"), [["x", "hf-12345678 " * 4]]), 14)


def test_a_value_of_several_lines_is_masked_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_FILE", "-----BEGIN-----\nabcdefgh\n}\n")
    secrets.hide(["KEY_FILE"])
    assert text.line("key: abcdefgh }") == "key: *** }"


def test_a_longer_one_goes_before_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "abcdef")
    monkeypatch.setenv("B", "abcdefghij")
    secrets.hide(["A", "B"])
    assert text.line("abcdefghij") == "***"


class Sink:
    def on_run(self, run: object) -> None: ...
    def on_data(self, data: bytes) -> None: ...
    def on_notice(self, words: str) -> None: ...


def test_the_names_come_with_the_run() -> None:
    receive({"run": {"id": "x", "secrets": ["LICENCE"]}}, Position("/s", None, 0), Sink())  # type: ignore[arg-type]
    assert text.line("open sesame") == "***"
    secrets.begin({})
    read_run({"record": {"secrets": ["LICENCE"]}}, {})
    assert text.line("open sesame") == "***"


def test_a_value_that_was_written_into_a_recipe_is_masked_in_what_is_told_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = {
        "tag": "a",
        "env": {"WANDB_API_KEY": "0123456789abcdef", "OTHER": "left-alone", "A_TOKEN": "no"},
    }
    answer = {"runs": [{"id": "x", "record": record}], "detail": {"record": record}}
    monkeypatch.setattr(history, "call", lambda *args, **more: answer)
    host = SimpleNamespace(name="lab", state_dir="/s", code_root="/c")
    history.show_run(SimpleNamespace(host=host), "a")  # type: ignore[arg-type]
    assert text.line("key 0123456789abcdef left-alone no") == "key *** left-alone no"


@pytest.mark.parametrize("damaged", [None, "LICENCE", 7, {"LICENCE": 1}, [7, None]])
def test_a_damaged_record_hides_nothing_and_breaks_nothing(damaged: object) -> None:
    secrets.hide(damaged)
    assert secrets.masked("open sesame") == "open sesame"
