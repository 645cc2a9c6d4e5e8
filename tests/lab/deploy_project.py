"""A project on the laptop and a code root of its own in the lab's container, for the tests of deploys."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fast_cli
from lab_client import REPOSITORY, enter

from dflashctl.config.hosts import Host, HostEntry, complete
from dflashctl.config.resolve import read_recipe
from dflashctl.lab.state import LabEndpoint, LabPaths
from dflashctl.releases import deploy as runs
from dflashctl.releases.deploy import Deployed, Source, read_source
from dflashctl.remote.factory import open_engine

RECIPE = """
version: 1
name: warm
deploy:
  include: [prog/**]
  entry: prog
  expect:
    - {file: prog/policy.py, text: "cudagraph_trees = False"}
    - {file: prog/policy.py, regex: 'cudagraph_trees\\s*=\\s*True', present: false}
launch: {command: [python, -m, prog]}
"""


class Project:
    """A project on the laptop and a code root of its own in the lab's container."""

    def __init__(self, root: Path, endpoint: LabEndpoint, paths: LabPaths) -> None:
        self.root = root
        self.endpoint = endpoint
        place = f"deploy-{secrets.token_hex(4)}"
        self.inside = f"/workspace/{place}"
        self.seen = paths.workspace / place  # the same folder, seen from the laptop
        self.write("recipes/warm.yaml", RECIPE)
        self.write("prog/__init__.py", "")
        self.write("prog/policy.py", "import os\ncudagraph_trees = False\n")
        entry = (
            f"engine: lab, code_root: {self.inside}/code, state_dir: {self.inside}/state, keep_releases: 3"
        )
        self.write("hosts.yaml", f"version: 1\ndefaults: {{recipe: warm}}\nhosts:\n  lab: {{{entry}}}\n")
        self.host: Host = complete(
            "lab",
            HostEntry(
                engine="lab",
                code_root=f"{self.inside}/code",
                state_dir=f"{self.inside}/state",
                keep_releases=3,
            ),
        )

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def source(self) -> Source:
        return read_source(read_recipe(self.root / "recipes" / "warm.yaml"))

    def deploy(self, **options: Any) -> Deployed:
        with open_engine(self.host) as engine:
            return runs.deploy(engine, self.source(), **options)

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.dflashctl("deploy", *words)

    def dflashctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return fast_cli.run(*words, cwd=self.root, env=self.env(), timeout=120)

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "dflashctl", "deploy", *words]

    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(REPOSITORY)}

    def shell(self, script: str) -> str:
        """Run a script in the container."""
        done = enter(self.endpoint, script)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def current(self) -> str:
        return self.shell(f"readlink {self.inside}/code/current").strip().removeprefix("releases/")

    def litter(self) -> list[str]:
        """What a deploy left beside the lasting names, in the container and in the host's staging."""
        code = shlex.quote(f"{self.inside}/code")
        script = f"ls -A {code} | grep -v -x -e releases -e current -e .lock -e history.jsonl || true"
        return self.shell(f"{script}; ls -A {code}/releases | grep '^[.]' || true").split()


def until(look: Callable[[], object], within_s: float = 90.0) -> None:
    end = time.monotonic() + within_s
    while not look():
        assert time.monotonic() < end, f"not within {within_s} s"
        time.sleep(0.02)
