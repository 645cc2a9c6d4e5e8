"""A training run as a person starts it, watched from outside by its own records, and ended whole."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.machine import process_start

REPOSITORY = Path(__file__).resolve().parents[2]
LOOK_S = 0.25
END_S = 30.0
LEAST_WINDOWS = 3


@dataclass
class Seen:
    """What a run's records told."""

    steps: list[tuple[int, float]] = field(default_factory=list)  # number, and wall clock at its end
    first: dict[str, Any] = field(default_factory=dict)  # heartbeats by rank after warm-up
    last: dict[str, Any] = field(default_factory=dict)  # and at the end
    died: str | None = None  # why it ended by itself


def read_steps(run: Path) -> list[tuple[int, float]]:
    """(steps done, wall clock) of each line of metrics.jsonl that has a loss."""
    found = []
    try:
        for text in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if "loss" in line:
                found.append((int(line["step"]), float(line["wall"])))
    except (OSError, ValueError):  # not there yet, or a line that is being written
        pass
    return found


def read_beats(run: Path) -> dict[str, Any]:
    """The heartbeat of each rank, by its number; of a run of one process, its own under "0"."""
    folders = {path.parent.name: path for path in run.glob("ranks/*/heartbeat.json")}
    found = {}
    for rank, path in (folders or {"0": run / "heartbeat.json"}).items():
        try:
            found[rank] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return found


def rate(steps: Sequence[tuple[int, float]], warm_up: int, window: int, tokens: int) -> float | None:
    """Median tokens a second over windows of some steps, those of warm-up left out.

    Several targets deliver together, so single steps are long and short in turn: a window holds `window`.

    Args:
        tokens: of one step.
    """
    after = [each for each in steps if each[0] >= warm_up]
    pairs = zip(after[::window], after[window::window], strict=False)
    rates = [tokens * (b[0] - a[0]) / max(1e-9, b[1] - a[1]) for a, b in pairs]
    return statistics.median(rates) if rates else None


def idle(seen: Seen, what: str) -> float | None:
    """Share of time that ranks or threads waited for `what` ("room", "hidden states"), on average."""
    shares = []
    for rank, last in seen.last.items():
        first = seen.first.get(rank)
        if first is None or last["mono"] <= first["mono"]:
            continue
        for name, seconds in last.get("waited_s", {}).items():
            if name.startswith(what):
                before = first.get("waited_s", {}).get(name, 0.0)
                shares.append((seconds - before) / (last["mono"] - first["mono"]))
    return sum(shares) / len(shares) if shares else None


def peaks(seen: Seen) -> dict[str, float]:
    """GiB of memory at most, by rank and device."""
    return {
        f"rank {rank} {device}": size
        for rank, beat in sorted(seen.last.items())
        for device, size in beat.get("peak_gib", {}).items()
    }


def watch(
    recipe: Path,
    run: Path,
    seconds: float,
    warm_up: int,
    window: int,
    deadline_s: float,
    env: Mapping[str, str],
) -> tuple[Seen, float]:
    """Run `python -m trainer train RECIPE` until it has been measured for `seconds` after warm-up.

    Args:
        window: steps of which a rate is made; some of them are waited for however long they take.
        deadline_s: for all of it.
    Returns:
        what was seen, and seconds to the end of the first step.
    """
    run.mkdir(parents=True)
    began, seen = time.time(), Seen()
    log = run.with_suffix(".log")
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer", "train", str(recipe)],
            cwd=REPOSITORY,
            env={**os.environ, **env, "DFLASH_RUN_DIR": str(run)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                time.sleep(LOOK_S)
                seen.steps = read_steps(run)
                after = [wall for step, wall in seen.steps if step >= warm_up]
                if after:
                    seen.last = read_beats(run)
                    seen.first = seen.first or seen.last
                enough = len(after) > LEAST_WINDOWS * window and after[-1] - after[0] >= seconds
                if enough or time.time() - began > deadline_s:
                    break
            if process.poll() is not None:
                seen.died = _cause(run, log, process.returncode)
            elif len(seen.steps) <= warm_up + window:
                seen.died = f"{len(seen.steps)} steps within {deadline_s:.0f} s; {_last_line(log)}"
        finally:
            end_whole(process)
    return seen, (seen.steps[0][1] - began if seen.steps else float("nan"))


def _cause(run: Path, log: Path, code: int) -> str:
    try:
        cause = json.loads((run / "root_cause.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"exit status {code}: {_last_line(log)}"
    names = ", ".join(row["name"] for row in cause.get("known") or [])
    return (str(cause["error"]).splitlines() or ["it said nothing"])[0] + (f" [{names}]" if names else "")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["it said nothing"])[-1][:300]


def end_whole(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it started, whatever sessions they made, and wait until none is left."""
    family = {pid: start for pid in [process.pid, *_below(process.pid)] if (start := process_start(pid))}
    for pid, start in family.items():
        if process_start(pid) == start:
            os.kill(pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + END_S
    while any(process_start(pid) == start for pid, start in family.items()) and time.monotonic() < end:
        time.sleep(0.05)


def _below(pid: int) -> list[int]:
    """Descendants of a process, from /proc."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found
