"""Run with: pytest tests/local/test_logs_slow.py. A log that is read slowly, or over a bad line."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from run_box import local_host

from dflashctl.config.hosts import Host
from dflashctl.errors import Unreachable
from dflashctl.logs import reading as logs
from dflashctl.logs.reading import Source, read
from dflashctl.remote.engine import Completed
from dflashctl.remote.local import LocalEngine


@pytest.fixture
def text(box: Any) -> bytes:
    """The log of an ended run `t`."""
    answer = box.python("pass", "t")
    box.wait(answer)
    made = random.Random(5).randbytes(1_500_000)
    Path(answer["log"]).write_bytes(made)
    return made


def test_a_pager_that_was_left_open_loses_nothing(
    text: bytes, box: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`logs -n 0 | less`: the deadline passed while nobody read, and the rest of the log never came."""
    monkeypatch.setattr(logs, "SLACK_S", 2.0)
    got = bytearray()

    def page(data: bytes) -> None:
        if not got:
            time.sleep(3.0)
        got.extend(data)

    notices: list[str] = []
    read(local_host(box), Source(on_data=page, on_notice=notices.append), tag="t")
    assert bytes(got) == text and notices == []


class Breaking(LocalEngine):
    """The line breaks after so many bytes of each answer."""

    after = 0

    def run(self, argv: Sequence[str], *, on_stdout: Any = None, **rest: Any) -> Completed:
        taken = 0

        def feed(data: bytes) -> None:
            nonlocal taken
            on_stdout(data[: max(self.after - taken, 0)])
            taken += len(data)
            if taken > self.after:
                raise Unreachable("the connection broke")

        return super().run(argv, on_stdout=feed, **rest)


def test_a_line_that_breaks_again_and_again_is_gone_on_with(text: bytes, box: Any) -> None:
    engines: list[Breaking] = []

    def connect(host: Host) -> Breaking:
        engines.append(Breaking(host))
        engines[-1].after = 600_000
        return engines[-1]

    got = bytearray()
    read(local_host(box), Source(on_data=got.extend), tag="t", connect=connect)
    assert bytes(got) == text and len(engines) >= 3


def test_a_line_that_brings_nothing_is_an_error(text: bytes, box: Any) -> None:
    with pytest.raises(Unreachable, match="the connection broke"):
        read(local_host(box), Source(), tag="t", connect=Breaking)


def test_one_answer_fits_a_poor_line(text: bytes, box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    plain = logs.call

    def call(engine: Any, op: str, request: dict[str, Any], **rest: Any) -> dict[str, Any]:
        asked.append(request)
        return plain(engine, op, request | {"max_bytes": request["max_bytes"] // 8}, **rest)

    monkeypatch.setattr(logs, "call", call)
    got = bytearray()
    read(local_host(box), Source(on_data=got.extend), tag="t")
    assert bytes(got) == text and len(asked) == 3
    assert all(each["max_bytes"] * 4 / 3 < 256 * 1024 * logs.SLACK_S for each in asked)
