"""bench/peers.py at toy size on a CPU.

Run: python -m pytest tests/trainer/bench
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unproven import did_not_run

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def program() -> Any:
    path = REPOSITORY / "bench" / "peers.py"
    spec = importlib.util.spec_from_file_location("bench_peers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.mark.soak  # docs/performance.md shows the same command, and its block runs in tests/docs
def test_both_run_beside_each_other_and_who_does_not_is_named() -> None:
    if importlib.util.find_spec("speculators") is None:
        did_not_run("speculators is not installed: pip install --no-deps speculators==0.9.0")
    sizes = ["--context-tokens", "128", "--row-tokens", "32", "--anchors", "24"]
    words = ["--shape", "toy", *sizes, "--device", "cpu", "--repeats", "1"]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "bench" / "peers.py"), *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    for name in ("ours", "speculators"):
        found = figures["found"][name]
        assert found["context_tok_s"] == pytest.approx(128 / found["ms"] * 1e3)
    ratio = figures["found"]["speculators"]["ms"] / figures["found"]["ours"]["ms"]
    assert figures["ours_over"]["speculators"]["context_tok_s"] == pytest.approx(ratio)
    assert "specforge    DID NOT RUN" in done.stdout


def test_ratios_are_ours_over_theirs_and_leave_out_what_did_not_run(program: Any) -> None:
    mine = {"ms": 1.0, "context_tok_s": 300.0, "peak_gib": 40.0}
    theirs = {"ms": 2.0, "context_tok_s": 200.0, "peak_gib": 100.0}
    found = {"ours": mine, "a": theirs, "b": "out of memory", "c": {**theirs, "peak_gib": None}}
    assert program.ratios(found) == {
        "a": {"context_tok_s": 1.5, "peak_gib": 0.4},
        "c": {"context_tok_s": 1.5},
    }
    assert program.ratios({**found, "ours": "out of memory"}) == {}
