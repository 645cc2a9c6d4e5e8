"""How long the commands take beside the bare way of asking the container something, in one run on the bed.

    python bench/cli.py [--rounds 7]          (root; docs/performance.md)

Each round runs, one after the other: `ssh HOST pct exec ID -- nvidia-smi` by OpenSSH's own client, `dflashctl
status`, `dflashctl launch` and `dflashctl kill`. Prints medians and ratios and, last, one line of JSON.
The bed's `pct` takes 0.7 s to start, as the real one does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "bed")]

from bedkit.bed import Bed  # noqa: E402
from bedkit.project import Project  # noqa: E402

PCT_START_S = 0.7
LIMITS = {"status": 2.0, "launch": 3.0}
"""The most that a command may take, in times of the bare one."""


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def slow_pct(bed: Bed) -> None:
    """Let the stand-in's start take as long as that of the real one."""
    path = bed.layout.pct / "pct.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "startup_delay_s": PCT_START_S}))


def bare(bed: Bed) -> None:
    """What people type today."""
    argv = ["ssh", "-q", "-F", "none", "-p", str(bed.port), "-i", str(bed.key), "-o", "IdentitiesOnly=yes"]
    argv += ["-o", f"UserKnownHostsFile={bed.known_hosts}", "-o", "BatchMode=yes", "root@127.0.0.1"]
    argv += [f"pct exec {bed.ids['main']} -- nvidia-smi"]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)


def measure(bed: Bed, project: Project, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ("bare", "status", "launch", "kill")}
    for number in range(rounds):
        tag = f"round{number}"
        found["bare"].append(timed(lambda: bare(bed)))
        found["launch"].append(timed(lambda tag=tag: project.ok("launch", "--tag", tag)))  # type: ignore[misc]
        found["status"].append(timed(lambda: project.ok("status")))
        found["kill"].append(timed(lambda tag=tag: project.ok("kill", tag)))  # type: ignore[misc]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="How long the commands take")
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as folder:
        bed = Bed()
        try:
            slow_pct(bed)
            project = Project(Path(folder) / "project", {"bed": bed.host_entry()})
            project.write_recipe("steady", gpus={"count": 2})
            project.ok("deploy")
            measure(bed, project, 1)  # the first of each warms the page cache for all alike
            times = measure(bed, project, rounds)
        finally:
            bed.close()
    medians = {name: statistics.median(each) for name, each in times.items()}
    result: dict[str, Any] = {"bench": "cli", "pct_start_s": PCT_START_S, "rounds": rounds}
    print(f"medians of {rounds} rounds, pct start-up {PCT_START_S} s:")
    good = True
    for name, seconds in medians.items():
        ratio = seconds / medians["bare"]
        result |= {f"{name}_s": round(seconds, 3), f"{name}_ratio": round(ratio, 2)}
        limit = LIMITS.get(name)
        good = good and (limit is None or ratio <= limit)
        words = "" if limit is None else f" (at most {limit:g})"
        spread = f"{min(times[name]):.2f}-{max(times[name]):.2f}"
        label = "ssh HOST pct exec ID -- nvidia-smi" if name == "bare" else f"dflashctl {name}"
        print(f"  {label:36}{seconds:6.2f} s ({spread})  {ratio:4.1f} times{words}")
    print(json.dumps(result))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
