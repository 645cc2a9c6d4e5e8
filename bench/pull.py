"""How fast a checkpoint comes home, beside the ways that pull could take, in one run on the bed (root).

    python bench/pull.py [--mb 400] [--rounds 3]

The ways take turns, so that all meet the same machine; medians count. `bare` is `pct exec ... cat` by
OpenSSH's client into a file, without any proof. Prints the ratios and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "bed")]

from bedkit.bed import Bed  # noqa: E402
from deploy import PCT_START_S, openssl_inside  # noqa: E402

from dflashctl.agent.records import runfolder  # noqa: E402
from dflashctl.config.hosts import Host, HostEntry, complete  # noqa: E402
from dflashctl.history import pull as pulling  # noqa: E402
from dflashctl.history.arrival import Line  # noqa: E402


class Base64Line(Line):
    """As where bytes do not arrive as they are sent."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.raw = False


def make_run(bed: Bed, mb: int) -> str:
    """A run's folder with one checkpoint of random bytes; the path of its file inside."""
    folder = f"/workspace/.dflashctl/runs/{runfolder.new_id()}"
    file = f"{folder}/checkpoints/step/model.safetensors"
    script = f"mkdir -p {folder}/checkpoints/step && head -c {mb}000000 /dev/urandom > {file}"
    bed.inside("main", ["sh", "-c", script], timeout=600)
    record = json.dumps({"version": 1, "tag": "t"}).encode()
    bed.inside("main", ["sh", "-c", f"cat > {folder}/record.json"], input=record)
    return file


@contextmanager
def empty_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def pull_by(line: type[Line], host: Host) -> None:
    pulling.Line = line  # type: ignore[misc]
    with empty_folder() as into:
        pulling.pull(host, tag="t", what="checkpoints", into=into)


def bare(bed: Bed, file: str) -> None:
    options = ["-p", str(bed.port), "-i", str(bed.key), "-o", f"UserKnownHostsFile={bed.known_hosts}"]
    command = f"pct exec {bed.ids['main']} -- cat {file}"
    with tempfile.TemporaryFile(dir="/var/tmp") as out:
        subprocess.run(
            ["ssh", "-F", "none", *options, "root@127.0.0.1", command], stdout=out, check=True, timeout=600
        )


def measure(bed: Bed, mb: int, rounds: int) -> dict[str, Any]:
    host = complete("bed", HostEntry.model_validate(bed.host_entry()))
    file = make_run(bed, mb)
    ways: dict[str, Callable[[], None]] = {
        "pull": lambda: pull_by(Line, host),
        "as base64": lambda: pull_by(Base64Line, host),
        "bare": lambda: bare(bed, file),
    }
    walls: dict[str, list[float]] = {name: [] for name in ways}
    busy: dict[str, list[float]] = {name: [] for name in ways}
    ways["pull"]()  # imports, and what this machine caches
    for _ in range(rounds):
        for name, act in ways.items():
            began, used = time.perf_counter(), time.process_time()
            act()
            busy[name].append(time.process_time() - used)
            walls[name].append(time.perf_counter() - began)
    took = {name: statistics.median(each) for name, each in walls.items()}
    cpu = {name: statistics.median(each) for name, each in busy.items()}
    return {
        "mb": mb,
        "mb_per_s": {name: round(mb / each, 1) for name, each in took.items()},
        "base64_over_pull": round(took["as base64"] / took["pull"], 2),
        "pull_over_bare": round(took["pull"] / took["bare"], 2),
        "laptop_cpu_ms_per_mb": {name: round(1000 * cpu[name] / mb, 2) for name in ("pull", "as base64")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    bed = Bed()
    try:
        bed.pct(startup_delay_s=PCT_START_S)
        openssl_inside(bed)
        found = measure(bed, options.mb, options.rounds)
    finally:
        bed.close()
    rates = ", ".join(f"{name} {rate:.0f} MB/s" for name, rate in found["mb_per_s"].items())
    print(f"{options.mb} MB: {rates}; base64 takes {found['base64_over_pull']} times as long as pull")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
