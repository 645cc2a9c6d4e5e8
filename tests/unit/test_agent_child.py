"""Run with: pytest tests/unit/test_agent_child.py. A child is heard to its end or deadline; none is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from dflashctl.agent.processes import child, proc

FORKS = """
import os, sys, time
inner = os.fork()
if inner == 0:
    time.sleep(60)
print(inner, flush=True)
time.sleep(float(sys.argv[1]))
"""


def started(seconds: float) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", FORKS, str(seconds)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)


def test_the_deadline_comes_and_the_whole_session_goes() -> None:
    process, said, ticks = started(60), bytearray(), []
    assert process.stdout is not None
    in_time = child.listen(
        [process.stdout.fileno()],
        time.monotonic() + 1.0,
        lambda _, data: said.extend(data) or False,  # type: ignore[func-returns-value]
        lambda: ticks.append(1),
    )
    assert not in_time and len(ticks) >= 2
    inner = int(said)
    child.end(process)
    assert process.returncode == -9
    until = time.monotonic() + 10
    while (found := proc.read_process(inner)) is not None and not found.dead:
        assert time.monotonic() < until, "what it had started lives on"
        time.sleep(0.01)
    child.end(process)  # its number may be somebody else's by now: nobody is signalled
    process.stdout.close()


def test_enough_is_enough_and_an_end_is_an_end() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"one")
    assert child.listen([reader], time.monotonic() + 10, lambda _, data: data == b"one")
    os.close(writer)
    assert child.listen([reader], time.monotonic() + 10, lambda _, data: False)
    os.close(reader)
