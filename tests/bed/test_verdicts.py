"""What `status` calls the bed's programs, in a real container over ssh and pct: each its state, read
in the JSON of the real command line. Without a bed, longer, and within two heartbeats by the clock:
tests/local/test_verdict_real.py."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from bedkit.bed import Bed
from bedkit.project import Project

pytestmark = pytest.mark.bed

BEAT_S = 10.0
"""The deadline of the jobs' heartbeats; of those that write none, the deadline of their log."""
SLACK_S = 30.0
"""Where other tests run beside this one, commands take their time. tests/local measures it alone."""

RIGHT = {
    "steady": "running",
    "heartbeat": "running",
    "stalls": "wedged",
    "spins": "wedged",
    "stops": "wedged",
    "wedges": "wedged",
    "crashes": "failed",
    "stalls-log": "wedged",
    "spins-log": "wedged",
    "wedges-log": "wedged",
}
"""Tag -> state. The tag is a kind of job; `-log` writes no heartbeat, and the recipe knows its log."""
BEATING = ("stalls", "spins", "wedges")
BEFORE = {"starting", "running", "slow"}


def test_each_program_gets_the_right_state(bed: Bed, tmp_path: Path) -> None:
    project = Project(tmp_path / "project", {"bed": bed.host_entry()})
    for kind in dict.fromkeys(tag.partition("-")[0] for tag in RIGHT):
        # A log alone is a variant of the recipe: it leaves the beats out.
        command = ["python", "-m", "jobs.job", kind, "--seconds", "120"]
        beats = ["--beat", str(BEAT_S)] if kind in BEATING else []
        observe = {"rules": {"log_deadline_s": BEAT_S}}
        log_alone = {f"{kind}-log": {"launch": {"command": command}, "observe": observe}}
        project.write_recipe(kind, command=[*command, *beats], gpus={"count": 0}, variants=log_alone)
    project.ok("deploy")
    launched = {}
    for tag in RIGHT:
        project.ok("launch", "-r", tag.partition("-")[0], "--tag", tag)
        launched[tag] = time.monotonic()
    seen: dict[str, list[str]] = {tag: [] for tag in RIGHT}
    evidence: dict[str, str] = {}
    while any(
        seen[tag][-1:] != [right] and time.monotonic() < launched[tag] + 2 * BEAT_S + SLACK_S
        for tag, right in RIGHT.items()
    ):
        for run in project.json("status")["runs"]:
            seen[run["tag"]].append(run["state"])
            evidence[run["tag"]] = "; ".join(run["evidence"])
        time.sleep(0.5)
    for tag, right in RIGHT.items():
        told = f"{tag}: {seen[tag]}; {evidence[tag]}"
        at = seen[tag].index(right) if right in seen[tag] else -1
        assert at >= 0 and set(seen[tag][at:]) == {right}, told
        assert set(seen[tag][:at]) <= BEFORE, told
    assert "SIGSTOP" in evidence["stops"]
    assert "3 drafter threads gone" in evidence["wedges"] and "queue hidden full" in evidence["wedges"]
    assert "_is_key_in_tls" in evidence["wedges"]
    for tag in ("stalls-log", "spins-log"):
        assert "the recipe allows 10 s" in evidence[tag] and "no heartbeat: judged" in evidence[tag]
    assert project.run("status", "--check").returncode == 7
