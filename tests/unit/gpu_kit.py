"""Answers of nvidia-smi and of the two facts operations, for the GPU tests."""

from __future__ import annotations

import sys
from typing import Any

from dflashctl.config.hosts import Host, IdleRule
from dflashctl.gpus import smi
from dflashctl.gpus.holders import holders
from dflashctl.gpus.idle import Box, judge_box

HOST = Host(
    name="ct200",
    engine="local",
    python=sys.executable,
    code_root="/c",
    workdir="/w",
    log_dir="/w",
    state_dir="/s",
)


def row(index: int, used: str = "0", busy: str = "0", temperature: str = "30", power: str = "70.12") -> str:
    return f"{index}, GPU-{index}, {used}, 143771, {busy}, {temperature}, {power}, NVIDIA H200"


MIG_COLUMNS = (*smi.GPU_COLUMNS[:-1], "mig.mode.current", "name")


def mig_row(index: int, mode: str, busy: str = "0") -> str:
    """As drivers that know MIG answer MIG_COLUMNS."""
    head, name = row(index, busy=busy).rsplit(", ", 1)
    return f"{head}, {mode}, {name}"


def reading(
    *lines: str, exit: int | None = 0, problem: str | None = None, stderr: str = ""
) -> dict[str, Any]:
    return {
        "exit": exit,
        "stdout": "".join(f"{line}\n" for line in lines),
        "stderr": stderr,
        "problem": problem,
    }


def answer(*samples: dict[str, Any], apps: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"samples": list(samples), "apps": apps or reading(), "processes": {}, "pidns": 1, **more}


EIGHT = reading(*(row(index) for index in range(8)))


CONTAINER_NS, HOST_NS, OTHER_NS, NESTED_NS = 4026532200, 4026531836, 4026532300, 4026532400


def process(
    pid: int, inner: int, pidns: int | None, *, start: int = 50, cgroup: str = "0::/\n"
) -> dict[str, Any]:
    return {
        "pid": pid,
        "start": start,
        "started_at": 1000.0,
        "state": "S",
        "nspid": [pid, inner] if inner != pid else [pid],
        "pidns": pidns,
        "cgroup": cgroup,
        "uid": 100000,
        "user": "100000",
        "comm": "python",
        "cmdline": ["python", "train.py"],
    }


INSIDE: dict[str, Any] = {
    "pidns": CONTAINER_NS,
    "baselines": {},
    "runs": [
        {
            "id": "R1",
            "tag": "localtls",
            "family": [
                {"pid": 312, "start": 50, "nspid": 312, "pidns": CONTAINER_NS, "state": "S"},
                {"pid": 400, "start": 50, "nspid": 7, "pidns": NESTED_NS, "state": "S"},
            ],
        }
    ],
}


def judge(facts: dict[str, Any], inside: dict[str, Any] = INSIDE, **rule: Any) -> Box:
    read = smi.read(facts)
    named = holders(read.apps, facts, inside, container=200)
    return judge_box(read, named, rule=IdleRule(**rule), baselines=inside.get("baselines") or {}, expect=8)
