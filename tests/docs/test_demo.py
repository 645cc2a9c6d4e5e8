"""`make demo`, once, as the README says, and what it must have taught."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 120  # what the README promises on two cores


@pytest.mark.alone
@pytest.mark.timeout(900)
def test_the_demo_trains_a_drafter_that_is_accepted_more(tmp_path: Path) -> None:
    venv = Path(sys.prefix)
    keep = {
        key: value for key, value in os.environ.items() if not key.startswith(("DFLASH", "MAKE", "MFLAGS"))
    }
    began = time.monotonic()
    done = subprocess.run(
        # The environment that this test runs in is the installed one: the demo's own install step is skipped.
        ["make", "demo", f"VENV={venv}", "-o", str(venv / ".installed")],
        cwd=REPOSITORY,
        env={**keep, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    seconds = time.monotonic() - began
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    for verb in ("lab up", "deploy", "launch --tag demo", "status demo --watch", "logs demo", "runs"):
        assert f"$ dflashctl {verb}" in done.stdout
    greedy = re.search(r"acceptance length (\d+\.\d+) -> (\d+\.\d+)", done.stdout)
    assert greedy is not None, done.stdout
    assert float(greedy[2]) - float(greedy[1]) >= 1.0
    assert "lossless: yes" in done.stdout
    sampled = re.search(r"T=0\.7\D*(\d+\.\d+)\D+(\d+\.\d+)", done.stdout)
    assert sampled is not None, done.stdout
    assert float(sampled[2]) - float(sampled[1]) >= 0.5
    assert list(tmp_path.iterdir()) == [], "the demo leaves nothing behind"
    # A slow machine takes what the recipe's budget leaves it; this only catches a runaway.
    assert seconds < 3 * LIMIT_S
