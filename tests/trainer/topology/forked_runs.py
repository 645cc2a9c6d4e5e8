"""`python -m trainer train` without its start: the launcher is forked from a process that has imported torch
once, and its ranks from the launcher. From the command line on, all is the program's own.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from killed_runs import CONTEXT


class Forked:
    """What the launcher and torch's agent ask of a Popen, for a fork of this process."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], own_session: bool) -> None:
        self.args, self.returncode = command, None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if own_session:
                os.setsid()
            become(command[command.index("trainer") + 1 :], env)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int | None:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        return self.returncode


def become(words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Be `python -m trainer WORDS` from now on, to its end."""
    code: Any = 1
    try:
        signal.set_wakeup_fd(-1)  # the parent's
        threading.current_thread().name = "MainThread"  # whichever forked, it is that now
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # an exec, too, leaves what is ignored
                signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["trainer", *words]
        sys.orig_argv = [sys.executable, "-m", *sys.argv]
        if "DFLASH_TEST_FAULT" in env:
            runpy.run_path(str(Path(__file__).parent / "faults" / "sitecustomize.py"))
        runpy.run_module("trainer", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def launcher(words: Sequence[str], env: Mapping[str, str], log: str) -> NoReturn:
    """What runs in the child: the launcher, whose ranks are forked where it would start a Python for each."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from trainer.topology import spawn

    def call(command: Sequence[str]) -> int | None:
        return Forked(command, dict(os.environ), own_session=False).wait()

    def popen(self: Any, command: Sequence[str], env: Mapping[str, str]) -> Forked:
        return Forked(command, env, own_session=True)

    spawn.subprocess = SimpleNamespace(call=call)  # type: ignore[assignment]
    SubprocessHandler._popen = popen  # type: ignore[assignment,method-assign]
    become(words, env)


class Run:
    """Such a run, as a Popen of its launcher whose output is read as text."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log, self.words = log, words
        self.process: ForkServerProcess = CONTEXT.Process(target=launcher, args=(words, env, str(log)))
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.words, timeout or 0.0, self.log.read_text())
        return self.log.read_text(), None
