"""`python driver.py PLAN.json`: each program of a plan in a process of its own, with a deadline.

The plan is {"cases": [case], "look": module|null, "answers": folder, "results": file} with a case {"name",
"argv" (after the interpreter), "env", "deadline_s", "needs": {"gpus": count, "compiler": bool}}; with
"alone": true the driver ends as its only case does (124: the deadline).

`results` gets one JSON line for what `look` answered, for each start, and for each end. What the programs
print goes to our own output. One that is over its deadline is asked for its stacks (SIGABRT and
faulthandler), then its whole session is killed. SIGTERM is passed on and ends the plan. Standard library
only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

LOOK_S = 120.0
STACKS_S = 5.0
KILL_S = 10.0
LOOK_EVERY_S = 0.02
TAIL_BYTES = 6000
DEADLINE_CODE = 124
ABORTED = b"Fatal Python error: Aborted\n"


class Driver:
    """One plan, from its first case to its last."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.child: subprocess.Popen[bytes] | None = None
        self.ended_by: int | None = None
        self.seen: dict[str, Any] = {}
        self.unseen = ""  # why the look answered nothing

    def run(self) -> int:
        """Returns the exit code."""
        signal.signal(signal.SIGTERM, self.pass_on)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a program with 100 GB of memory leaves no core
        if self.plan.get("look"):
            look = {"name": "look", "argv": ["-m", self.plan["look"]], "env": {}, "deadline_s": LOOK_S}
            ended = self.one(look)
            self.seen = ended["answer"] or {}
            self.unseen = "" if self.seen else why_unseen(ended)
            self.note({"look": self.seen, **({} if self.seen else {"tail": ended["tail"]})})
        code = 0
        for number, case in enumerate(self.plan["cases"]):
            if self.ended_by is not None:
                break
            missing, why = lacks(case.get("needs") or {}, self.seen, self.unseen)
            if missing:
                self.note({"case": case["name"], "state": "skipped", "lacks": missing, "why": why})
                continue
            self.note({"case": case["name"], "state": "began"})
            ended = self.one(case)
            self.note({"case": case["name"], "state": "ended", **ended})
            code = exit_code(ended)
            if ended["unkillable"]:
                for rest in self.plan["cases"][number + 1 :]:
                    why = f"{case['name']} cannot be ended and may hold the GPU"
                    self.note({"case": rest["name"], "state": "skipped", "why": why})
                break
        if self.ended_by is not None:
            return 128 + self.ended_by
        return code if self.plan.get("alone") else 0

    def one(self, case: dict[str, Any]) -> dict[str, Any]:
        """{"exit"|null, "signal"|null, "timed_out", "unkillable", "seconds", "answer"|null, "tail"}."""
        answer = Path(self.plan["answers"]) / f"{case['name']}.json"
        env = {**os.environ, **case.get("env", {}), "DFLASH_PROBE_ANSWER": str(answer)}
        if self.plan.get("pythonpath"):
            paths = (self.plan["pythonpath"], env.get("PYTHONPATH"))
            env["PYTHONPATH"] = ":".join(path for path in paths if path)
        began = time.monotonic()
        self.child = subprocess.Popen(
            [sys.executable, "-u", "-X", "faulthandler", *case["argv"]],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        tail = Tail(self.child)
        timed_out = self.wait(self.child, case["deadline_s"], tail)
        seconds = time.monotonic() - began
        unkillable = not over(self.child, 0)
        self.kill_session(
            signal.SIGKILL
        )  # what it has started; before it is reaped, for its number is its own
        code = None if unkillable else self.child.wait()
        return {
            "exit": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 and not timed_out else None,
            "timed_out": timed_out,
            "unkillable": unkillable,
            "seconds": round(seconds, 3),
            "answer": None if timed_out else read_answer(answer),
            "tail": tail.text(),
        }

    def wait(self, child: subprocess.Popen[bytes], deadline_s: float, tail: Tail) -> bool:
        """True when the deadline was over. Reaps nobody."""
        if over(child, deadline_s):
            return False
        print(f"\nprobe: not done within {deadline_s:g} s; its stacks:", flush=True)
        tail.asked = True
        os.kill(child.pid, signal.SIGABRT)
        if not over(child, STACKS_S):
            self.kill_session(signal.SIGKILL)
            over(child, KILL_S)
        return True

    def kill_session(self, number: int) -> None:
        """Of a child that is not reaped: another process may have its number afterwards."""
        assert self.child is not None
        with contextlib.suppress(OSError):
            os.killpg(self.child.pid, number)

    def pass_on(self, number: int, frame: object) -> None:
        self.ended_by = number
        if self.child is not None and self.child.returncode is None:
            self.kill_session(number)

    def note(self, line: dict[str, Any]) -> None:
        with open(self.plan["results"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"version": 1, **line}) + "\n")


def over(child: subprocess.Popen[bytes], within_s: float) -> bool:
    """Whether it ends in that time. Does not reap it; one that even SIGKILL does not end is not over."""
    end = time.monotonic() + within_s
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() >= end:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


class Tail:
    """Passes a child's output on to ours, and keeps its end. Once it was `asked` for its stacks, without the
    line that calls our SIGABRT a fatal error: whoever reads the log would take it for a crash."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        self._pipe = child.stdout
        self._kept = b""
        self.asked = False
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        rest = b""
        while data := os.read(self._pipe.fileno(), 65536):
            data, rest = rest + data, b""
            if self.asked:  # the line comes in pieces
                whole, end, rest = data.rpartition(b"\n")
                data = (whole + end).replace(ABORTED, b"")
            self._pass_on(data)
        self._pass_on(rest)

    def _pass_on(self, data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        self._kept = (self._kept + data)[-TAIL_BYTES:]

    def text(self) -> str:
        """Once the child has ended; somebody who still holds the pipe is not waited for."""
        self._thread.join(2.0)
        return self._kept.decode("utf-8", "replace")


def why_unseen(ended: dict[str, Any]) -> str:
    """The last words of a look that did not answer: mostly what `import torch` raised."""
    lines = [line.strip() for line in ended["tail"].splitlines() if line.strip()]
    if ended["timed_out"] or not lines:
        return f"no answer after {ended['seconds']:.0f} s"
    return lines[-1]


def lacks(needs: dict[str, Any], seen: dict[str, Any], unseen: str) -> tuple[str, str]:
    """What a case lacks on what `look` has seen, "torch", "gpus" or "compiler", and in words; "" when it can
    run. Where torch cannot be imported nobody knows of GPUs, and every program would end of that alone."""
    if unseen:
        return "torch", f"torch: {unseen}"
    wanted, there = int(needs.get("gpus", 0)), int(seen.get("gpus", 0))
    if wanted > there:
        gpus = "a GPU" if wanted == 1 else f"{wanted} GPUs"
        return "gpus", f"{gpus}: torch sees {there or 'none'}"
    if needs.get("compiler") and not seen.get("compiler"):
        return "compiler", "a compiler: none is on PATH (Debian: g++)"
    return "", ""


def read_answer(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def exit_code(ended: dict[str, Any]) -> int:
    """What a shell would say."""
    if ended["timed_out"]:
        return DEADLINE_CODE
    return 128 + int(ended["signal"]) if ended["signal"] else int(ended["exit"] or 0)


if __name__ == "__main__":
    sys.exit(Driver(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))).run())
