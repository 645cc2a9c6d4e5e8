"""Run with: pytest tests/unit/test_probe_follow.py. What the follower of a probe hears of its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent.doctor import probing
from dflashctl.agent.records.runfolder import new_id, number, write_json


def test_all_that_was_written_before_the_end_is_heard(tmp_path: Path) -> None:
    """More results and more log than one piece holds, and a probe that was over before anybody looked."""
    run_id = new_id()
    folder = tmp_path / "runs" / run_id
    folder.mkdir(parents=True)
    log = tmp_path / "probe.log"
    log.write_text("é" * probing.CHUNK_BYTES)
    results = [{"case": f"case {n}", "tail": "x" * (probing.CHUNK_BYTES // 2)} for n in range(5)]
    lines = [json.dumps(line) for line in results]
    (folder / "probe.jsonl").write_text("\n".join([*lines, "[]", "not JSON", ""]))
    write_json(str(folder / "record.json"), {"id": run_id, "log": str(log)})
    write_json(str(folder / "exit.json"), {"code": 0})
    told: list[dict[str, Any]] = []
    request = {"state_dir": str(tmp_path), "id": run_id, "wait_s": 30.0, "log": True}
    answer = probing.probe_follow(request, told.append)
    assert answer["results"] == results and answer["exit"]["code"] == 0
    assert [event["result"] for event in told if "result" in event] == results
    assert "".join(event.get("log", "") for event in told) == log.read_text()


@pytest.mark.parametrize(
    ("value", "read"), [(3, 3.0), (2.5, 2.5), (True, None), ("3", None), (None, None), (10**400, None)]
)
def test_a_number_of_a_file_that_may_be_damaged(value: Any, read: float | None) -> None:
    assert number(value) == read
