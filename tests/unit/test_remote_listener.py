"""Who listens to a command's output: their own trouble is theirs, and what they were told is not kept.

Run: python -m pytest tests/unit/test_remote_listener.py
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from agent_kit import local_host

from dflashctl.remote.channel import Finished
from dflashctl.remote.connection import SshConnection
from dflashctl.remote.engine import Completed
from dflashctl.remote.local import LocalEngine

sys.path.insert(0, str(Path(__file__).parent))

from remote_box import Box

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
GONE = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Way(Protocol):
    """How a command is run over there."""

    def run(self, argv: list[str], **options: Any) -> Completed | Finished: ...


@pytest.fixture(params=["ssh", "local"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Way]:
    if request.param == "local":
        yield LocalEngine(local_host(tmp_path))
        return
    box = Box(tmp_path)
    connection = SshConnection(box.target)
    yield connection
    connection.close()
    box.close()


@pytest.mark.parametrize("error", [FULL, GONE, EOFError("listener")], ids=["full", "gone", "eof"])
def test_a_listeners_own_error_is_no_lost_connection(way: Way, error: Exception) -> None:
    """`logs -f | head` and `pull` onto a full disk went on connecting anew: the connection was "lost"."""

    def fail(data: bytes) -> None:
        raise error

    with pytest.raises(type(error)) as seen:
        way.run(["echo", "text"], timeout_s=20, on_stdout=fail)
    assert seen.value is error
    assert way.run(["echo", "again"], timeout_s=20).stdout == b"again\n"


def test_what_a_listener_was_told_is_not_kept(way: Way, peak: Callable[[], int]) -> None:
    """A checkpoint of gigabytes is pulled by a laptop with less memory than that."""
    size = 64_000_000
    program = f"import sys\nfor _ in range({size} // 100000): sys.stdout.buffer.write(b'x' * 100000)"
    told = 0

    def count(data: bytes) -> None:
        nonlocal told
        told += len(data)

    before = peak()
    done = way.run([sys.executable, "-c", program], timeout_s=60, on_stdout=count)
    assert told == size
    assert done.stdout and len(done.stdout) < 1_000_000
    assert peak() - before < size // 2


@pytest.fixture
def peak() -> Iterator[Callable[[], int]]:
    """Bytes that Python's own objects have taken at most since the last question."""
    import tracemalloc

    def most() -> int:
        value = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        return value

    tracemalloc.start()
    yield most
    tracemalloc.stop()
