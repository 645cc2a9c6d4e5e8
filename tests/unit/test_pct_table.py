"""The conformance table itself: true to the recording, citing what exists, with its gaps named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

CONFORMANCE = Path(__file__).resolve().parents[1] / "conformance"
sys.path.insert(0, str(CONFORMANCE))

from pctkit import lxc, table, userns  # noqa: E402
from pctkit.place import unfit  # noqa: E402

ROWS = table.load()
RECORDED_AT = {
    "ct": "200",
    "stopped": "201",
    "missing": "999",
    "node": "pve1",
    "hostname": "ct200",
    "host": "/tmp/pctlab/bat",
    "above": "/tmp/pctlab",
    "inside": "/root",
    "home": "/root",
}


def recording() -> list[tuple[str, table.Done]]:
    """observed.txt: `$ command`, `o` and `e` lines of stdout and stderr (three at most), `rc N`."""
    cases: list[tuple[str, table.Done]] = []
    command, out, err = "", "", ""
    for line in (CONFORMANCE / "pct" / "observed.txt").read_text().splitlines():
        kind, _, text = line.partition(" ")
        if kind == "$":
            command, out, err = text, "", ""
        elif kind == "o":
            out += text + "\n"
        elif kind == "e":
            err += text + "\n"
        elif kind == "rc":
            cases.append((command, table.Done(out, err, int(text))))
    return cases


RECORDING = recording()


@pytest.mark.parametrize("number", range(1, len(RECORDING) + 1))
def test_every_recorded_case_is_a_row(number: int) -> None:
    command, answer = RECORDING[number - 1]
    row = next(row for row in ROWS if row.observed == number)
    # The recording used a path that some machines have; the row uses one that none has.
    names = RECORDED_AT | ({"host": "/tmp/pctlab/bat"})
    filled = table.fill(row.command, names).replace("/tmp/pctlab/bat/nonexistent", "/nonexistent")
    assert filled == command
    said = table.Done(
        answer.stdout, answer.stderr.replace("/nonexistent", "/tmp/pctlab/bat/nonexistent"), answer.exit
    )
    assert table.differences(row.expected, said, names) == []
    assert row.seen == "recorded battery"


def test_the_table_is_large_enough() -> None:
    assert len(RECORDING) == 46
    assert len([row for row in ROWS if row.observed is None]) >= 60


def test_every_row_cites_a_place_that_exists() -> None:
    page = (CONFORMANCE.parents[1] / "docs" / "pct.md").read_text()
    anchors = {f"docs/pct.md#{name}" for name in re.findall(r'<a id="([a-z0-9-]+)"></a>', page)}
    assert {row.cites for row in ROWS} <= anchors
    assert anchors <= {row.cites for row in ROWS}, "a section that no row holds the stand-in to"


def test_rows_that_a_place_cannot_run_are_these() -> None:
    def missing(place: type[lxc.Lxc] | type[userns.Userns]) -> set[str]:
        return {row.id for row in ROWS if unfit(row, place.name, place.has)}

    assert missing(lxc.Lxc) == {"exec-environment-of-the-configuration"}
    assert missing(userns.Userns) == {
        "push-setuid-stays-in-a-privileged-container",
        "push-group-only-keeps-the-user",
        "push-owner-not-mapped",
    }


def test_differences_are_found() -> None:
    expected = table.Expected(exit=2, stdout="{ct}\n", stderr_match="lock [0-9]+\n")
    names = {"ct": "200"}
    assert table.differences(expected, table.Done("200\n", "lock 7\n", 2), names) == []
    assert len(table.differences(expected, table.Done("201\n", "lock x\n", 1), names)) == 3
    assert table.differences(table.Expected(), table.Done("", "", 0, timed_out=True), {}) != []


def test_a_row_with_a_wrong_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("- {id: a, cites: b, command: pct, stdot: x}\n")
    with pytest.raises(ValueError, match=r"x\.yaml: row a: unknown keys \['stdot'\]"):
        table.load(tmp_path)
