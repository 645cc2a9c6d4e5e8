"""Families of every kind that a kill may meet: programs by name, and how many processes each becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflashctl.agent.processes import proc

READY = "open('ready', 'a').write('x')\n"
SLEEP = "import os, signal, subprocess, sys, time\n"
PROGRAMS = {
    "plain": (SLEEP + READY + "time.sleep(60)", 1),
    "deaf to TERM": (SLEEP + "signal.signal(15, signal.SIG_IGN)\n" + READY + "time.sleep(60)", 1),
    "ranks in sessions of their own, deaf": (
        SLEEP
        + "me = 'import signal, time; signal.signal(15, signal.SIG_IGN)\\n' + %r\n"
        % (READY + "time.sleep(60)")
        + "ranks = [subprocess.Popen([sys.executable, '-c', me], start_new_session=True) for _ in range(3)]\n"
        + "time.sleep(60)",
        4,
    ),
    "forked twice": (
        SLEEP
        + "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        + "        open('ready', 'a').write('x')\n        time.sleep(60)\n    os._exit(0)\n"
        + "os.wait()\ntime.sleep(60)",
        2,
    ),
    "renamed, environment gone": (
        SLEEP
        + "import ctypes\n"
        + "argv = ['bash', '-c', 'exec -a VLLM::Worker_TP0 sleep 60']\n"
        + "subprocess.Popen(argv, env={}, start_new_session=True)\n"
        + "ctypes.CDLL(None).prctl(15, b'VLLM::Engine', 0, 0, 0)\n"
        + "time.sleep(0.2)\n"
        + READY
        + "time.sleep(60)",
        2,
    ),
    "stopped": (SLEEP + READY + "os.kill(os.getpid(), signal.SIGSTOP)", 1),
    "threads": (
        SLEEP
        + "import threading\n"
        + "[threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(8)]\n"
        + READY
        + "time.sleep(60)",
        1,
    ),
    "a parent that replaces the dead": (
        SLEEP
        + "signal.signal(15, signal.SIG_IGN)\n"
        + "def born(): return subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        + "children = [born() for _ in range(4)]\n"
        + READY
        + "while True:\n"
        + "    children = [c if c.poll() is None else born() for c in children]\n"
        + "    time.sleep(0.005)\n",
        5,
    ),
    "deep": (
        SLEEP
        + "depth = int(os.environ.get('DEPTH', '0'))\n"
        + "signal.signal(15, signal.SIG_IGN)\n"
        + "if depth < 5:\n"
        + "    deeper = {**os.environ, 'DEPTH': str(depth + 1)}\n"
        + "    subprocess.Popen([sys.executable] + sys.orig_argv[1:], env=deeper)\n"
        + "else:\n    open('ready', 'a').write('x')\n"
        + "time.sleep(60)",
        6,
    ),
}


def start(
    box: Any, until: Callable[..., Any], name: str, **changes: Any
) -> tuple[dict[str, Any], list[proc.Process]]:
    program, members = PROGRAMS[name]
    answer = box.python(program, **{"grace_s": 0.5, **changes})
    until(lambda: (box.root / "ready").exists())
    family = until(lambda: len(found := box.family(answer)) >= members and found)
    return answer, family


def gone(processes: list[proc.Process]) -> bool:
    return all(proc.living(one.identity) is None for one in processes)
