"""The command line in a process of its own, without the start of an interpreter and a third of a second of
imports each time: a server that has imported everything forks for each command.

What a test learns is the same: the child has its own folder, environment and streams, ends by itself, and
leaves nothing behind in the next one. Where the start itself matters (Ctrl-C, LD_PRELOAD), start a real one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("cli", "config", "remote", "runs", "gpus", "render", "doctor", "probe")
ALSO = ("fabric", "paramiko", "rich.console", "rich.table", "rich.live", "dflashctl.lab.lifecycle")


class Server:
    """One for a test process; commands one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__))],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def run(
        self, words: tuple[str, ...], *, cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """`dflashctl WORDS`, as subprocess.run would: both outputs as text, stdin empty.

        Raises subprocess.TimeoutExpired; the command is killed then."""
        asked, told = self._process.stdin, self._process.stdout
        assert asked is not None and told is not None
        with self._lock, tempfile.TemporaryDirectory() as place:
            out, err = f"{place}/out", f"{place}/err"
            request = {"words": words, "cwd": str(cwd), "env": dict(env), "out": out, "err": err}
            asked.write(json.dumps(request) + "\n")
            asked.flush()
            pid = int(told.readline())
            late = not select.select([told], [], [], timeout)[0]
            if late:
                os.kill(pid, signal.SIGKILL)
            code = int(told.readline())
            texts = [Path(name).read_bytes().decode() for name in (out, err)]
        if late:
            raise subprocess.TimeoutExpired(words, timeout, *texts)
        return subprocess.CompletedProcess(words, code, *texts)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


_server: Server | None = None


def run(*words: str, cwd: Path, env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """`dflashctl WORDS` by this test process's server."""
    global _server
    _server = _server or Server()
    return _server.run(words, cwd=cwd, env=env, timeout=timeout)


# --- the server -------------------------------------------------------------------------------------------


def load() -> None:
    for name in ALSO:
        importlib.import_module(name)
    for package in PACKAGES:
        parent = importlib.import_module(f"dflashctl.{package}")
        for found in pkgutil.iter_modules(parent.__path__, f"dflashctl.{package}."):
            if not found.ispkg:
                importlib.import_module(found.name)


def serve() -> None:
    """Read requests from stdin; answer each with the child's pid, then its exit code as subprocess has it."""
    answers = os.fdopen(os.dup(1), "w")  # close-on-exec
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 1)
    load()
    gc.collect()
    gc.freeze()
    while line := sys.stdin.readline():
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become(request, null)
        answers.write(f"{pid}\n")
        answers.flush()
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        answers.flush()


def become(request: dict[str, Any], null: int) -> None:
    """In the child: the command line, to its end."""
    os.dup2(null, 0)
    for number, name in ((1, request["out"]), (2, request["err"])):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.dup2(file, number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    from dflashctl.cli.main import main

    try:
        main(request["words"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # main() ends the process itself, with its code


if __name__ == "__main__":
    serve()
