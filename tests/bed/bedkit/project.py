"""A person's project folder on the laptop: hosts.yaml, recipes, code; and the real command line run in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import yaml

REPOSITORY = Path(__file__).resolve().parents[3]
JOBS = Path(__file__).resolve().parents[1] / "jobs"

_RUN = "import sys; sys.argv[0] = 'dflashctl'; from dflashctl.cli import main; sys.exit(main.main())"


class Project:
    """`folder` is made. dflashctl is imported from `package`: this repository, or a changed copy of it."""

    forked: ClassVar[bool] = False
    """Tests save the start of an interpreter for each command (tests/kit/fast_cli.py); benchmarks do not."""

    def __init__(self, folder: Path, hosts: dict[str, Any], package: Path = REPOSITORY) -> None:
        self.folder = folder
        self.package = package
        self.home = folder / "home"
        (folder / "recipes").mkdir(parents=True)
        self.home.mkdir()
        code = folder / "jobs"
        code.mkdir()
        (code / "__init__.py").touch()
        for source in JOBS.iterdir():
            if source.is_file():
                shutil.copy(source, code / source.name)
        self.write_hosts(hosts)

    def write_hosts(self, hosts: dict[str, Any], default: str = "bed", recipe: str = "steady") -> None:
        document = {"version": 1, "defaults": {"host": default, "recipe": recipe}, "hosts": hosts}
        (self.folder / "hosts.yaml").write_text(yaml.safe_dump(document))

    def write_recipe(
        self,
        kind: str,
        *args: str,
        gpus: Any = None,
        command: list[str] | None = None,
        variants: dict[str, Any] | None = None,
        **launch: Any,
    ) -> str:
        """A recipe that launches a job of jobs/job.py; its name is the job's kind."""
        document = {
            "version": 1,
            "name": kind,
            "deploy": {
                "include": ["jobs/**"],
                "entry": "jobs.job",
                "expect": [{"file": "jobs/job.py", "text": "def steady(args):"}],
            },
            "launch": {
                "command": command or ["python", "-m", "jobs.job", kind, *args],
                "gpus": {"count": 1} if gpus is None else gpus,
                "env": {"PYTHONUNBUFFERED": "1"},
                "grace_s": 2,
                "started_within_s": 20,
                **launch,
            },
            "observe": {"step_regex": r"step (?P<step>\d+)"},
            "variants": variants or {},
        }
        (self.folder / "recipes" / f"{kind}.yaml").write_text(yaml.safe_dump(document))
        return kind

    def argv(self, *args: str) -> list[str]:
        return [sys.executable, "-c", _RUN, *args]

    def env(self, **more: str) -> dict[str, str]:
        """A laptop's environment that knows nothing of the machine's own keys, agents and settings."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(self.package),
            "NO_COLOR": "1",
            "COLUMNS": "160",
            **more,
        }

    def run(self, *args: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        """`dflashctl ARGS` in the project's folder."""
        if self.forked and self.package == REPOSITORY and "LD_PRELOAD" not in env:
            import fast_cli

            return fast_cli.run(*args, cwd=self.folder, env=self.env(**env), timeout=timeout)
        return subprocess.run(
            self.argv(*args),
            cwd=self.folder,
            env=self.env(**env),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    def ok(self, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run; the exit code must be 0."""
        done = self.run(*args, **more)
        assert done.returncode == 0, (
            f"dflashctl {' '.join(args)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def json(self, *args: str, **more: Any) -> Any:
        """`dflashctl ARGS --json`, parsed."""
        return json.loads(self.ok(*args, "--json", **more).stdout)
