"""A file of any size travels piece by piece: no process of a deploy grows with it.

Run: python -m pytest tests/local/test_deploy_large.py   (2 GiB: -m soak)
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from deploy_place import RECIPE, Place

MEASURE = (
    "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode;"
    " print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
)
"""Runs a command and prints the largest resident size, in KiB, of any process of it."""

MOST_MIB = 150.0


@pytest.mark.parametrize("mib", [200, pytest.param(2048, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_memory_does_not_grow_with_a_file(tmp_path: Path, mib: int) -> None:
    place = Place(tmp_path)
    place.write("recipes/warm.yaml", RECIPE.replace("[prog/**]", "[prog/**, weights.bin]"))
    place.write_hosts("code")
    weights = place.project / "weights.bin"
    with weights.open("wb") as file:
        file.write(os.urandom(1 << 20))
        file.truncate(mib << 20)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *place.argv("deploy")],
        env=place.env(),
        cwd=place.project,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    peak_mib = int(done.stdout.split()[-1]) / 1024
    assert peak_mib < MOST_MIB, f"{peak_mib:.0f} MiB"
    there = place.root / "code" / "current" / "weights.bin"
    assert there.stat().st_size == mib << 20
    with weights.open("rb") as here, there.open("rb") as copy:
        assert here.read(1 << 21) == copy.read(1 << 21)
    assert place.litter() == []
