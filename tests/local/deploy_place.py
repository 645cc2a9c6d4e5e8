"""A project and a host of engine `local` below one temporary folder, for tests of deploys and their verbs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fast_cli

from dflashctl.agent.releases import hostlock, release
from dflashctl.config.hosts import HostEntry, complete
from dflashctl.config.resolve import read_recipe
from dflashctl.releases import deploy as runs
from dflashctl.releases.deploy import Deployed, read_source
from dflashctl.remote.engine import Engine
from dflashctl.remote.local import LocalEngine

RECIPE = """
version: 1
name: warm
deploy:
  include: [prog/**]
  entry: prog
  expect: [{file: prog/a.py, text: "graphs = False"}]
launch: {command: [python, -m, prog]}
"""


class Place:
    """A project and a host of engine `local`, all below one temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project = root / "project"
        self.write("recipes/warm.yaml", RECIPE)
        self.write("prog/__init__.py", "")
        self.write("prog/a.py", "graphs = False\n")
        entry = HostEntry(
            engine="local",
            code_root=str(root / "code"),
            workdir=str(root / "work"),
            state_dir=str(root / "state"),
        )
        self.host = complete("here", entry)
        self.engine: Engine = LocalEngine(self.host)

    def write(self, name: str, text: str) -> None:
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def deploy(self, **options: float) -> Deployed:
        source = read_source(read_recipe(self.project / "recipes" / "warm.yaml"))
        return runs.deploy(self.engine, source, **options)

    def current(self) -> str | None:
        return release.current_release(str(self.root / "code"))

    def holder(self) -> Any:
        """Who holds the deploy lock, as the kernel knows it."""
        return hostlock.holder(hostlock.lock_path(None, str(self.root / "code")))

    def litter(self) -> list[str]:
        code = self.root / "code"
        found = [path.name for path in code.iterdir() if path.name.startswith(".") and path.name != ".lock"]
        return found + [p.name for p in (code / "releases").iterdir() if len(p.name) != 64]

    def write_hosts(self, *names: str, **pythons: str) -> None:
        """Hosts of engine local, each with a code root of its own name; the first is the default."""
        rows = "".join(
            f"  {name}: {{engine: local, code_root: {self.root}/{name}, workdir: {self.root}/work,"
            f" state_dir: {self.root}/state, python: {python}}}\n"
            for name, python in {**dict.fromkeys(names, sys.executable), **pythons}.items()
        )
        defaults = f"{{host: {names[0]}, recipe: warm}}"
        self.write("hosts.yaml", f"version: 1\ndefaults: {defaults}\nhosts:\n{rows}")

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "dflashctl", *words]

    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "DFLASHCTL_HOSTS": str(self.project / "hosts.yaml"),
            "XDG_STATE_HOME": str(self.root),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`dflashctl WORDS` in the project."""
        return fast_cli.run(*words, env=self.env(), cwd=self.project, timeout=120)
