"""Run with: pytest tests/unit/test_render.py. Hostile text stays text; times and sizes read as documented."""

from __future__ import annotations

import io
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.render import json as render_json
from dflashctl.render import table, text

DANGEROUS = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@given(st.text(alphabet=st.characters()))
def test_a_line_has_no_character_that_a_terminal_obeys(hostile: str) -> None:
    shown = text.line(hostile)
    assert not any(unicodedata.category(char) in DANGEROUS for char in shown)


@given(st.text(alphabet=st.characters()))
def test_a_block_has_only_newlines(hostile: str) -> None:
    shown = text.block(hostile)
    assert not any(unicodedata.category(char) in DANGEROUS for char in shown.replace("\n", ""))


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("10%\r20%", "10%\\r20%"),
        ("a\tb", "a b"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\x9b31m", "\\x9b31m"),
        ("two\nlines", "two\\nlines"),
        ("Größe 日本 ✓", "Größe 日本 ✓"),
        ("\udcff", "\\udcff"),
    ],
)
def test_what_a_hostile_line_looks_like(hostile: str, shown: str) -> None:
    assert text.line(hostile) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (-3, "0 s"),
        (0, "0 s"),
        (0.052, "52 ms"),
        (0.0999, "0.1 s"),
        (3.1, "3.1 s"),
        (9.96, "10 s"),
        (34.4, "34 s"),
        (59.6, "1m00s"),
        (252, "4m12s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (86400 * 3 + 3600 * 4, "3d04h"),
    ],
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert text.duration(seconds) == shown


def test_an_age_stays_in_seconds_for_ten_minutes() -> None:
    assert [text.age(each) for each in (3.6, 251, 599, 601)] == ["3.6 s", "251 s", "599 s", "10m01s"]


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (12_300, "12 kB"),
        (1_040_000, "1,040 kB"),
        (2**20, "1.0 MiB"),
        (int(2.3 * 2**30), "2.3 GiB"),
        (124 * 2**30, "124 GiB"),
        (3 * 2**40, "3.0 TiB"),
    ],
)
def test_sizes(count: int | None, shown: str) -> None:
    assert text.size(count) == shown


def test_counts_plurals_and_ranges() -> None:
    assert text.count(49152) == "49,152"
    assert text.count(None) == "-"
    assert text.plural(1, "run") == "1 run"
    assert text.plural(2000, "run") == "2,000 runs"
    assert text.plural(2, "entry", "entries") == "2 entries"
    assert text.ranges([7, 0, 1, 2, 3, 4, 5, 6]) == "0-7"
    assert text.ranges([5, 3, 0, 4]) == "0,3-5"
    assert text.ranges([]) == "-"


def test_a_table_without_a_terminal_is_one_line_a_row_and_escaped() -> None:
    out = io.StringIO()
    table.show(
        table.table(["TAG", ">STEP", "EVIDENCE"], [["[bold]x[/]", 118, "e" * 300], ["y", 7, "\x1b[2Jgone"]]),
        out,
    )
    lines = out.getvalue().splitlines()
    assert lines[0] == "TAG         STEP  EVIDENCE"
    assert lines[1] == "[bold]x[/]   118  " + "e" * 300
    assert lines[2] == "y              7  \\x1b[2Jgone"


def test_columns_wrap_evidence_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = io.StringIO()
    table.show(table.table(["TAG", "EVIDENCE"], [["demo", "word " * 20]]), out)
    assert len(out.getvalue().splitlines()) > 3
    assert max(len(each) for each in out.getvalue().splitlines()) <= 40


@pytest.mark.parametrize("columns", ["40", "60"])
def test_where_columns_have_no_room_every_row_is_told_whole(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    names = ["TAG", "STATE", "FOR", ">STEP", ">TOK/S", "GPUS", "EVIDENCE"]
    rows = [
        [
            "localtls-long",
            table.state("wedged"),
            "4m12s",
            "118/1,000",
            "-",
            "0-7",
            "no step for 251 s (usually 3.6 s)",
        ],
        ["b", table.state("finished"), "2m ago", "-", "-", "-", "[exit] code 0"],
    ]
    out = io.StringIO()
    table.show(table.table(names, rows), out)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["localtls-long  wedged", "  for 4m12s, step 118/1,000, gpus 0-7"]
    assert lines[-3:] == ["b  finished", "  for 2m ago", "  [exit] code 0"]
    assert "no step for 251 s (usually 3.6 s)" in " ".join(each.strip() for each in lines)
    assert max(map(len, lines)) <= int(columns)


def test_a_table_that_fits_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = io.StringIO()
    table.show(table.table(["TAG", "STATE", ">STEP", "EVIDENCE"], [["demo", "running", 7, "fine"]]), out)
    assert out.getvalue() == "TAG   STATE    STEP  EVIDENCE\ndemo  running     7  fine\n"
    out = io.StringIO()
    table.show(table.table(["TAG", "STATE"], []), out)
    assert out.getvalue() == "TAG  STATE\n"


def test_json_names_its_schema_first_and_holds_no_raw_control() -> None:
    out = io.StringIO()
    render_json.emit("dflashctl.status/1", {"runs": [{"tag": "x\x1b[2J\u202e"}]}, out)
    assert out.getvalue().startswith('{\n  "schema": "dflashctl.status/1"')
    assert all(32 <= ord(char) < 127 or char == "\n" for char in out.getvalue())
    assert json.loads(out.getvalue())["runs"][0]["tag"] == "x\x1b[2J\u202e"


@pytest.mark.parametrize("schema", ["status/1", "dflashctl.status", "dflashctl.status/x"])
def test_json_refuses_a_schema_without_name_or_version(schema: str) -> None:
    with pytest.raises(ValueError):
        render_json.document(schema, {})


def test_json_has_null_for_a_loss_that_is_not_a_number() -> None:
    text_ = render_json.document(
        "dflashctl.status/1", {"runs": [{"loss": float("nan"), "x": (float("inf"), 1.5)}]}
    )
    assert json.loads(text_)["runs"] == [{"loss": None, "x": [None, 1.5]}]
