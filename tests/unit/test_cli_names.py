"""Names on the command line: an empty one, as `"$TAG"` of a script without TAG is, names nothing.

Run: python -m pytest tests/unit/test_cli_names.py
"""

from __future__ import annotations

import pytest

from dflashctl.cli import main as frame
from dflashctl.errors import ExitCode

pytestmark = pytest.mark.usefixtures("log")


@pytest.mark.parametrize(
    "words",
    [
        ["status", ""],
        ["logs", ""],
        ["kill", ""],
        ["stacks", ""],
        ["explain", ""],
        ["report", ""],
        ["pull", ""],
        ["notify", ""],
        ["runs", "show", ""],
        ["runs", "diff", "first", ""],
        ["runs", "diff", "", "second"],
        ["runs", "note", "", "what was learnt"],
        ["runs", "repair", ""],
        ["runs", "--tag", ""],
        ["inspect", ""],
        ["inspect", "env", "--run", ""],
        ["inspect", "env", "--against", ""],
    ],
    ids=" ".join,
)
def test_an_empty_name_is_refused_before_any_host_is_asked(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dflashctl.remote.factory.open_engine", lambda *_: pytest.fail("a host was asked"))
    assert frame.run(words) == int(ExitCode.USAGE)
    assert "the name is empty" in capsys.readouterr().err
