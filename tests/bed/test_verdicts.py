"""What `status` calls the bed's programs, in a real container over ssh and pct: each its state within two
heartbeats, read in the JSON of the real command line. The same table without a bed, and longer:
tests/unit/test_verdict_real.py."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from bedkit.bed import Bed
from bedkit.project import Project

pytestmark = pytest.mark.bed

BEAT_S = 10.0
"""The deadline of the jobs' heartbeats."""

RIGHT = {
    "steady": "running",
    "heartbeat": "running",
    "stalls": "wedged",
    "spins": "wedged",
    "stops": "wedged",
    "wedges": "wedged",
    "crashes": "failed",
}
BEATING = ("stalls", "spins", "wedges")
BEFORE = {"starting", "running", "slow"}


def test_each_program_gets_the_right_state_within_two_heartbeats(bed: Bed, tmp_path: Path) -> None:
    project = Project(tmp_path / "project", {"bed": bed.host_entry()})
    for kind in RIGHT:
        args = ("--beat", str(BEAT_S)) if kind in BEATING else ()
        project.write_recipe(kind, *args, "--seconds", "120")
    project.ok("deploy")
    launched = {}
    for kind in RIGHT:
        project.ok("launch", "-r", kind, "--tag", kind)
        launched[kind] = time.monotonic()
    seen: dict[str, list[str]] = {kind: [] for kind in RIGHT}
    evidence: dict[str, str] = {}
    while any(
        seen[kind][-1:] != [right] and time.monotonic() < launched[kind] + 2 * BEAT_S
        for kind, right in RIGHT.items()
    ):
        for run in project.json("status")["runs"]:
            seen[run["tag"]].append(run["state"])
            evidence[run["tag"]] = "; ".join(run["evidence"])
    for kind, right in RIGHT.items():
        told = f"{kind}: {seen[kind]}; {evidence[kind]}"
        at = seen[kind].index(right) if right in seen[kind] else -1
        assert at >= 0 and set(seen[kind][at:]) == {right}, told
        assert set(seen[kind][:at]) <= BEFORE, told
    assert "SIGSTOP" in evidence["stops"]
    assert "3 drafter threads gone" in evidence["wedges"] and "queue hidden full" in evidence["wedges"]
    assert "_is_key_in_tls" in evidence["wedges"]
    assert project.run("status", "--check").returncode == 7
    stacks = project.run("stacks", "stalls", "--again", "0.5")
    assert "rest (" in stacks.stdout or "py-spy is not installed" in stacks.stderr, stacks
