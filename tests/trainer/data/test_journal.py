"""What `regenerate` keeps beside its output until that is complete: whose settings it binds.

Run: python -m pytest tests/trainer/data/test_journal.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.data.journal import Journal, Result
from trainer.errors import ConfigError


def test_work_goes_on_only_under_the_same_settings(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.jsonl", {"temperature": 0.0, "seed": 1}, 1) as journal:
        journal.add(Result(1, "success", {"messages": []}))
        with pytest.raises(ConfigError, match="another regenerate is making this file"):
            Journal(tmp_path / "out.jsonl", {"temperature": 0.0, "seed": 1}, 1)
    with pytest.raises(ConfigError, match=r"was begun with other settings \(temperature\)"):
        Journal(tmp_path / "out.jsonl", {"temperature": 0.5, "seed": 1}, 1)
    with Journal(tmp_path / "out.jsonl", {"temperature": 0.0, "seed": 1}, 1) as journal:
        assert journal.counts.rows == journal.counts.success == 1


def test_a_try_that_wrote_no_row_binds_nobody_to_its_settings(tmp_path: Path) -> None:
    """Such as one with the address of a server that is not there."""
    for seed, cut in ((1, b""), (2, b'{"number": 1, "sta'), (3, b"")):
        with Journal(tmp_path / "out.jsonl", {"seed": seed}, 1) as journal:
            assert journal.counts.rows == 0
        with (tmp_path / "out.jsonl.partial").open("ab") as file:
            file.write(cut)
    with Journal(tmp_path / "out.jsonl", {"seed": 4}, 1) as journal:
        journal.add(Result(1, "success", {"messages": []}))
    with pytest.raises(ConfigError, match="was begun with other settings"):
        Journal(tmp_path / "out.jsonl", {"seed": 5}, 1)
