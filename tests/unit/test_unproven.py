"""Run with: pytest tests/unit/test_unproven.py. What a machine cannot show fails in CI, else it is said."""

from __future__ import annotations

import pytest
from unproven import did_not_run


@pytest.mark.parametrize("value", ["true", "1", "yes", "True"])
def test_in_ci_a_gap_is_a_failure(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", value)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RUN: it needs root"):
        did_not_run("it needs root")


@pytest.mark.parametrize("value", [None, "", "0", "false"])
def test_elsewhere_it_is_a_skip_that_says_so(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    if value is not None:
        monkeypatch.setenv("CI", value)
    with pytest.raises(pytest.skip.Exception, match="DID NOT RUN: it needs root"):
        did_not_run("it needs root")
