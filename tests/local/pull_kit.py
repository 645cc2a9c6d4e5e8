"""What tests of `dflashctl pull` stand on: a run with checkpoints, and engines that something happens to."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from run_box import local_host

from dflashctl.config.hosts import Host
from dflashctl.errors import Unreachable
from dflashctl.history.pull import Result, What, pull
from dflashctl.remote.engine import Completed
from dflashctl.remote.local import LocalEngine

OLD = 1.7e9


def envelope(stdin: bytes) -> bytes:
    """What is asked, after the agent's zip."""
    return stdin[stdin.rfind(b'{"op": ') :]


@pytest.fixture
def folder(box: Any) -> Path:
    """The run folder of an ended run `t`, with two checkpoints."""
    answer = box.python("print('step 1')", "t")
    box.wait(answer)
    made = Path(box.run(answer).path)
    for name, data in {"step_1/w.bin": b"a" * 1000, "step_2/w.bin": b"b" * 70_000, "empty": b""}.items():
        path = made / "checkpoints" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (OLD, OLD))
    return made


@pytest.fixture
def host(box: Any) -> Host:
    return local_host(box)


class Cut(LocalEngine):
    """The connection breaks after some bytes of an answer, as often as `cuts` has numbers."""

    def __init__(self, host: Host, cuts: list[int]) -> None:
        super().__init__(host)
        self.cuts = cuts

    def run(
        self, argv: Sequence[str], *, on_stdout: Any = None, stdin: bytes = b"", **rest: Any
    ) -> Completed:
        if not self.cuts or b"pull_file" not in envelope(stdin):
            return super().run(argv, on_stdout=on_stdout, stdin=stdin, **rest)
        left, taken = self.cuts.pop(), 0

        def feed(data: bytes) -> None:
            nonlocal taken
            on_stdout(data[: max(left - taken, 0)])
            taken += len(data)

        super().run(argv, on_stdout=feed, stdin=stdin, **rest)
        raise Unreachable("the connection broke")


def fetch(host: Host, into: Path, what: What = "checkpoints", cuts: list[int] | None = None) -> Result:
    return pull(
        host,
        tag="t",
        what=what,
        into=into,
        connect=lambda target: Cut(target, cuts if cuts is not None else []),
        sleep=lambda seconds: None,
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Listening(LocalEngine):
    """Counts what comes over the line, and may do something to it on the way."""

    def __init__(self, host: Host, harm: Callable[[bytes, int], bytes] = lambda data, at: data) -> None:
        super().__init__(host)
        self.harm = harm
        self.raw = 0
        self.base64 = 0

    def run(
        self, argv: Sequence[str], *, on_stdout: Any = None, stdin: bytes = b"", **rest: Any
    ) -> Completed:
        asked, at = envelope(stdin), 0
        if b"pull_file" not in asked:
            return super().run(argv, on_stdout=on_stdout, stdin=stdin, **rest)

        def feed(data: bytes) -> None:
            nonlocal at
            harmed = self.harm(data, at) if b'"raw": true' in asked else self.harm(data, -1)
            at += len(data)
            on_stdout(harmed)

        done = super().run(argv, on_stdout=feed, stdin=stdin, **rest)
        self.raw += at if b'"raw": true' in asked else 0
        self.base64 += 0 if b'"raw": true' in asked else at
        return done


def listened(host: Host, into: Path, engine: LocalEngine) -> Result:
    return pull(
        host,
        tag="t",
        what="checkpoints",
        into=into,
        connect=lambda target: engine,
        sleep=lambda seconds: None,
    )


class Meanwhile(LocalEngine):
    """Something happens over there as soon as some bytes of the files have come; then the line may break."""

    def __init__(self, host: Host, act: Callable[[], object], *, breaks: bool = False) -> None:
        super().__init__(host)
        self.act: Callable[[], object] | None = act
        self.breaks = breaks
        self.raw: list[bool] = []

    def run(
        self, argv: Sequence[str], *, on_stdout: Any = None, stdin: bytes = b"", **rest: Any
    ) -> Completed:
        if b"pull_file" not in envelope(stdin):
            return super().run(argv, on_stdout=on_stdout, stdin=stdin, **rest)
        self.raw.append(b'"raw": true' in envelope(stdin))

        def feed(data: bytes) -> None:
            on_stdout(data)
            if len(data) > 10_000 and self.act is not None:
                act, self.act = self.act, None
                act()
                if self.breaks:
                    raise Unreachable("the connection broke")

        return super().run(argv, on_stdout=feed, stdin=stdin, **rest)
