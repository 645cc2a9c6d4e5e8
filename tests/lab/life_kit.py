"""A project of its own for tests of launch, kill and gpu: recipes, the CLI, strangers in the lab."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from lab_client import DEADLINE_S, cli, cli_argv, cli_environment, enter_command, inside, on_host

from dflashctl.config import load_hosts
from dflashctl.gpus.facts import ask_inside, read_facts
from dflashctl.lab.gpu import state as gpu_state
from dflashctl.lab.state import LabPaths, Record
from dflashctl.remote.factory import open_engine
from dflashctl.runs.stopping import stop

READY = "open('/workspace/ready', 'a').write('x')\n"
SLEEP = "import os, signal, subprocess, sys, time\n"

PROGRAMS = {
    "a": SLEEP + "print('hello of a', flush=True)\n" + READY + "time.sleep(600)",
    "b": SLEEP + READY + "time.sleep(600)",
    "count": SLEEP + "open('/workspace/starts', 'a').write('x')\n" + READY + "time.sleep(600)",
    "fails": "import time; time.sleep(1.5); raise KeyError('of the program')",
    "short": "import time; time.sleep(1.5); print('bye')",
    "dies": "import nothing_of_that_name",
    "cause": (
        "import json, os, time; time.sleep(1.5)\n"
        "cause = {'version': 1, 'error': 'ValueError: of the program', 'where': 'a.py:1'}\n"
        "json.dump(cause, open(os.environ['DFLASH_RUN_DIR'] + '/root_cause.json', 'w'))"
    ),
    "deaf": (
        SLEEP
        + "me = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'\n"
        + "for _ in range(3): subprocess.Popen([sys.executable, '-c', me], start_new_session=True)\n"
        + "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)\n"
        + "os.wait()\n"
        + "signal.signal(15, signal.SIG_IGN)\n"
        + "time.sleep(0.5)\n"
        + READY
        + "time.sleep(600)"
    ),
    "chatty": (
        "import os, time\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    try: os.write(1, b'x' * 4096)\n"
        "    except OSError as error: open('/workspace/refused', 'w').write(str(error))\n"
        "    time.sleep(0.001)\n"
    ),
}


class Project:
    """Recipes beside a hosts.yaml, and what tests do with them on the lab."""

    def __init__(self, root: Path, lab: Record, paths: LabPaths) -> None:
        self.root, self.lab, self.paths = root, lab, paths
        self.endpoint = lab.endpoint
        hosts = {
            "version": 1,
            "defaults": {"host": "lab", "recipe": "x"},
            "hosts": {"lab": {"engine": "lab"}},
        }
        (root / "recipes").mkdir()
        (root / "hosts.yaml").write_text(yaml.safe_dump(hosts))
        self.recipe("x", gpus={"count": 2})
        self.engine = open_engine(load_hosts(root).host("lab"))
        """For looking and for tidying up: one connection, while the CLI under test makes its own."""

    def recipe(self, name: str, **launch: Any) -> None:
        """A recipe with a variant for each of PROGRAMS."""
        body = {
            "version": 1,
            "name": name,
            "launch": {"command": ["python", "-c", PROGRAMS["a"]], "grace_s": 1.5, **launch},
            "variants": {
                tag: {"launch": {"command": ["python", "-c", text]}} for tag, text in PROGRAMS.items()
            },
        }
        (self.root / "recipes" / f"{name}.yaml").write_text(yaml.safe_dump(body))

    def run(self, *words: str, code: int | None = 0, **how: Any) -> subprocess.CompletedProcess[str]:
        done = cli(*words, lab_dir=self.paths.root, cwd=self.root, **how)
        # A traceback of the program's log may be shown; one of dflashctl's own may not.
        assert "dflashctl/" not in done.stderr.partition("Traceback (most recent call last)")[2], done
        assert code is None or done.returncode == code, done
        return done

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        document = json.loads(self.run(*words, "--json", code=code).stdout)
        assert document["schema"] == f"dflashctl.{words[0]}/1"
        return document

    def launch(self, tag: str, *words: str) -> dict[str, Any]:
        """Launch and wait until the program has written that it is ready."""
        self.inside("rm -f /workspace/ready")
        launched = self.json("launch", "--tag", tag, *words)
        self.until(lambda: self.inside("cat /workspace/ready", check=False).stdout)
        return launched

    def popen(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            cli_argv(*words),
            cwd=self.root,
            env=cli_environment(self.paths.root),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def inside(self, script: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """A shell script in container 200, by its namespaces alone (and no pct)."""
        command = ["sh", "-c", enter_command(script)]
        told = self.engine.run_on_host(command, timeout_s=DEADLINE_S)
        done = subprocess.CompletedProcess(command, told.exit_code, told.stdout, told.stderr)
        assert not check or done.returncode == 0, done
        return done

    def environ(self, pid: int) -> list[str]:
        """NAME=value of a process inside."""
        data = self.inside(f"cat /proc/{pid}/environ").stdout
        return [entry.decode() for entry in data.split(b"\0") if entry]

    def stranger(self, gpu: int) -> int:
        """A process in the container that holds a GPU and belongs to no run. Its pid inside."""
        python = self.endpoint.python
        code = f"import os,time; f = os.open('/dev/nvidia{gpu}', os.O_RDWR); time.sleep(600)"
        script = f'setsid {python} -I -c "{code}" stranger-{gpu} </dev/null >/dev/null 2>&1 & echo $!'
        done = inside(self.endpoint, ["sh", "-c", script])
        assert done.returncode == 0, done
        self.until(lambda: self.held(gpu))
        return int(done.stdout)

    def held(self, index: int) -> list[str]:
        """Who holds a GPU, in words."""
        gpus = read_facts(self.engine).box.gpus
        return [holder.label for gpu in gpus if gpu.index == index for holder in gpu.holders]

    def live(self) -> dict[str, dict[str, Any]]:
        """Tag -> run, of those that are not over."""
        return {str(run["tag"]): run for run in ask_inside(self.engine)["runs"]}

    def events(self, run_id: str) -> list[dict[str, Any]]:
        text = self.inside(f"cat /workspace/.dflashctl/runs/{run_id}/events.jsonl", check=False).stdout
        return [json.loads(line) for line in text.splitlines()]

    def end(self, pid: int) -> None:
        """End a process inside that a test started."""
        self.inside(f"kill -9 {pid}", check=False)

    def gpus(self, how: Callable[[gpu_state.Box], None]) -> None:
        """Change the simulated box."""
        gpu_state.change(self.paths.gpu, how)

    def until(self, look: Callable[[], Any], within_s: float = 90.0) -> Any:
        end = time.monotonic() + within_s
        while True:
            found = look()
            if found:
                return found
            assert time.monotonic() < end, "it did not come to that"
            time.sleep(0.1)

    def host_code(self, code: str) -> str:
        """Python on the lab's host; its stdout."""
        done = on_host(self.endpoint, code)
        assert done.returncode == 0, done
        return done.stdout.decode()

    def clean(self) -> None:
        """No run left, not even in the history, and no marks in the workspace. Only who has no exit.json is
        asked after: a look at the folder from outside is a tenth of the price of a call inside."""
        runs = self.paths.workspace / ".dflashctl" / "runs"
        ended = (record.with_name("exit.json").exists() for record in runs.glob("*/record.json"))
        for run in () if all(ended) else self.live().values():
            stop(self.engine, run["id"], who="test", reason="", grace_s=0.0, on_event=lambda event: None)
        shutil.rmtree(runs, ignore_errors=True)
        self.inside("rm -f /workspace/ready /workspace/starts /workspace/refused", check=False)
