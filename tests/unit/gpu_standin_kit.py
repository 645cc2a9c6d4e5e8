"""A box of simulated GPUs with its driver, for one test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflashctl.lab.gpu import HOOK_DIR, setup
from dflashctl.lab.gpu.driver import Driver

ROOT = Path(__file__).resolve().parents[2]


class Lab:
    """A box with its driver process, and processes that this test started."""

    def __init__(self, folder: Path) -> None:
        self.dir = folder
        setup(folder)
        self.env = {
            "PATH": os.environ["PATH"],
            "NVIDIA_LAB_RPC": str(folder / "rpc"),
            "NVIDIA_LAB_DEV": str(folder / "dev"),
        }
        self.processes: list[subprocess.Popen[str]] = []
        self.driver = Driver(folder)
        self.thread = threading.Thread(target=self.driver.serve)
        self.thread.start()

    def start(self, argv: list[str], **env: str) -> subprocess.Popen[str]:
        p = subprocess.Popen(argv, env={**self.env, **env}, stdout=subprocess.PIPE, text=True)
        self.processes.append(p)
        return p

    def smi(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        argv = [str(self.dir / "bin" / "nvidia-smi"), *args]
        return subprocess.run(argv, env={**self.env, **env}, capture_output=True, text=True, timeout=40)

    def memory(self) -> list[int]:
        out = self.smi("--query-gpu=memory.used", "--format=csv,noheader,nounits").stdout
        return [int(line) for line in out.split()]

    def holder(self, gpus: str, code: str = "", **env: str) -> subprocess.Popen[str]:
        """A Python that takes GPUs through the hook, runs `code`, then waits for the end of its life."""
        body = f"import os, time\n{code}\nprint('ready', flush=True)\ntime.sleep(60)\n"
        p = self.start(
            [sys.executable, "-c", body], CUDA_VISIBLE_DEVICES=gpus, PYTHONPATH=str(HOOK_DIR), **env
        )
        assert p.stdout is not None and p.stdout.readline() == "ready\n"
        return p

    def stop_driver(self) -> None:
        self.driver.stopping.set()
        self.thread.join(10)

    def stop(self) -> None:
        self.stop_driver()
        for p in reversed(self.processes):
            if p.poll() is None:
                p.kill()
            p.wait(10)
            if p.stdout is not None:
                p.stdout.close()


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "did not become true in time"
        time.sleep(0.05)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path / "gpu")
    try:
        yield lab
    finally:
        lab.stop()
