"""Which files of the standard library are looked at.

Run: python -m pytest tests/trainer/data/test_stdlib.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.data import stdlib


def test_folders_that_are_no_data_are_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """site-packages holds a hundred times as many files as the library."""
    for name in ("site-packages/torch", "json/tests", "json/nested"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "calendar.py").touch()
    entered, real = [], os.scandir
    monkeypatch.setattr("os.scandir", lambda top: (entered.append(Path(top).name), real(top))[1])
    found = stdlib.files(False, tmp_path) + stdlib.files(True, tmp_path)
    assert found == [tmp_path / "json/nested/calendar.py"]
    assert set(entered) == {tmp_path.name, "json", "nested"}
