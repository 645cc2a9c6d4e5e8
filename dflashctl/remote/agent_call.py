"""Call an operation of `dflashctl.agent` on the other machine. The protocol: docs/architecture.md, "An
agent call".

argv holds one fixed loader and no data. On stdin travel, each after its length (8 bytes, big-endian), the
agent's zip and a JSON envelope {"op", "nonce", "timeout_s", "request"}. The answer is found by the nonce,
whatever a login shell or a library prints around it.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import struct
from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain
from typing import Any, Literal

from dflashctl.agent.payload import build_payload
from dflashctl.errors import DflashError, ExitCode, Unreachable, UsageError
from dflashctl.remote.engine import Completed, Engine

HOST_PYTHON = "python3"
"""On the machine around the container there is no venv of ours; a Proxmox host has Debian's Python."""

AGENT_GRACE_S = 5.0
"""The agent stops itself this long after the laptop gave up."""

STDERR_TAIL_BYTES = 2000

# No quote but the double one, no `!`, one line: every login shell passes it unchanged inside single quotes.
LOADER = (
    "import os,struct,sys,tempfile;"
    "i=sys.stdin.buffer;"
    'n=struct.unpack(">Q",i.read(8))[0];'
    'f=os.fdopen(os.memfd_create("dflash"),"w+b") if hasattr(os,"memfd_create") else'
    " tempfile.TemporaryFile();"
    "f.write(i.read(n));f.flush();"
    'sys.path.insert(0,"/proc/self/fd/%d"%f.fileno());'
    "from dflash_agent.main import serve;"
    "sys.exit(serve(i))"
)

Event = dict[str, Any]

log = logging.getLogger("dflashctl.remote")


class AgentBug(Exception):
    """The agent itself failed in a way that nobody foresaw; carries its traceback. Exit code 1."""


def call(
    engine: Engine,
    op: str,
    request: dict[str, Any],
    *,
    where: Literal["inside", "host"] = "inside",
    timeout_s: float,
    on_event: Callable[[Event], None] | None = None,
    on_data: Callable[[bytes], None] | None = None,
    more: Iterable[bytes] | None = None,
) -> dict[str, Any]:
    """Run operation `op` inside the container or on the host around it and return its result.

    `on_event` is called in this thread with each progress event, `on_data` with the bytes of data frames, cut
    anywhere; `more` follows the request on stdin, for an operation that reads on. Raises the DflashError that
    the operation named; Unreachable when the transport failed or the deadline passed (the operation may still
    be running); AgentBug.
    """
    nonce = secrets.token_hex(16)
    answer = AnswerReader(nonce, on_event, on_data)
    python = engine.host.python if where == "inside" else HOST_PYTHON
    log.debug("%s: %s", place(engine, where), op)
    argv, first = [python, "-I", "-c", LOADER], pack(op, request, nonce, timeout_s)
    run = engine.run if where == "inside" else engine.run_on_host
    stdin = first if more is None else chain([first], more)
    completed = run(argv, stdin=stdin, timeout_s=timeout_s, on_stdout=answer.feed)
    body = answer.body()
    if body is None:
        raise engine.explain(completed, where) or no_answer(
            completed,
            op=op,
            python=python,
            where=place(engine, where),
            began=answer.began,
            by_ssh=engine.host.ssh is not None,
        )
    if body.get("ok") is True:
        result = body.get("result")
        if not isinstance(result, dict):
            raise AgentBug(f"{op} answered {type(result).__name__}, not an object")
        return result
    raise to_error(body.get("error"), default_where=place(engine, where))


def pack(op: str, request: dict[str, Any], nonce: str, timeout_s: float) -> bytes:
    """The bytes of a call: zip and envelope, each after its length."""
    zipped = payload()
    envelope = {"op": op, "nonce": nonce, "timeout_s": timeout_s + AGENT_GRACE_S, "request": request}
    data = json.dumps(envelope, ensure_ascii=True).encode("ascii")
    return struct.pack(">Q", len(zipped)) + zipped + struct.pack(">Q", len(data)) + data


@cache
def payload() -> bytes:
    """The agent's zip, built once a process."""
    return build_payload()


def place(engine: Engine, where: Literal["inside", "host"]) -> str:
    """How messages name the machine."""
    host = engine.host
    if where == "host" and engine.has_separate_host:
        return f"{host.name} (the host)"
    return f"{host.name} (container {host.container})" if host.container is not None else host.name


class AnswerReader:
    """Finds events and the answer in a stream that may hold anything else. Pure: feed it bytes."""

    def __init__(
        self,
        nonce: str,
        on_event: Callable[[Event], None] | None = None,
        on_data: Callable[[bytes], None] | None = None,
    ) -> None:
        self.began = False
        """The operation has said that it begins."""
        self._start = f"DFLASH-START {nonce}".encode()
        self._event = f"DFLASH-EVENT {nonce} ".encode()
        self._answer = re.compile(rb"DFLASH-ANSWER %s (\d{1,12})\r?\n" % nonce.encode())
        self._data = re.compile(rb"DFLASH-DATA %s (\d{1,12})\r?\n" % nonce.encode())
        self._end = re.compile(rb"\r?\nDFLASH-END %s" % nonce.encode())
        self._on_event = on_event
        self._on_data = on_data
        self._data_left = 0
        self._buffer = bytearray()
        self._length: int | None = None
        self._body: dict[str, Any] | None = None

    def feed(self, data: bytes) -> None:
        """More bytes of stdout, cut anywhere."""
        if self._body is not None:
            return
        self._take(data)
        while self._length is None and (newline := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[: newline + 1])
            del self._buffer[: newline + 1]
            self._line(line)
            if self._data_left:
                rest = bytes(self._buffer)
                self._buffer.clear()
                self._take(rest)
        if self._length is not None:
            self._finish()

    def body(self) -> dict[str, Any] | None:
        """The answer, or None while it is not complete."""
        return self._body

    def _take(self, data: bytes) -> None:
        """Bytes of a data frame are passed on as they come, gigabytes of them; others wait for their line."""
        piece = data[: self._data_left]
        if piece and self._on_data is not None:
            self._on_data(piece)
        self._data_left -= len(piece)
        self._buffer += data[len(piece) :]

    def _line(self, line: bytes) -> None:
        if match := self._answer.search(line):
            self._length = int(match[1])
        elif match := self._data.search(line):
            self._data_left = int(match[1])
        elif not self.began and self._start in line:
            self.began = True
        elif (at := line.find(self._event)) >= 0 and self._on_event is not None:
            event = _object(line[at + len(self._event) :])
            if event is not None:
                self._on_event(event)

    def _finish(self) -> None:
        assert self._length is not None
        if self._end.match(self._buffer, self._length):
            self._body = _object(bytes(self._buffer[: self._length]))
            self._buffer.clear()


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


_ERRORS = {kind.exit_code: kind for kind in DflashError.__subclasses__()}


def to_error(error: object, *, default_where: str) -> Exception:
    """The agent's error object as the matching DflashError (by the exit code's name), else AgentBug."""
    fields = error if isinstance(error, dict) else {}
    kind, what = str(fields.get("kind", "bug")), str(fields.get("what", "an error without a text"))
    code = ExitCode.__members__.get(kind.upper())
    found = _ERRORS.get(code) if code is not None else None
    if found is None:
        return AgentBug(f"{default_where}: {what}\n{fields.get('where', '')}".rstrip())
    return found(what, where=str(fields.get("where") or default_where), next=str(fields.get("next") or ""))


def no_answer(
    completed: Completed, *, op: str, python: str, where: str, began: bool, by_ssh: bool
) -> DflashError:
    """Why a command that ended gave no answer, from what it printed; the exit code is only a hint."""
    tail = _tail(completed.stderr)
    if completed.exit_code in (126, 127) and "Traceback" not in tail:
        return UsageError(
            f"cannot run {python} there (exit code {completed.exit_code}): {tail or 'no word about why'}",
            where=where,
            next="Python 3.8 or newer must be there, on the PATH that ssh gives to commands"
            if python == HOST_PYTHON
            else "set `python:` of this host in hosts.yaml to the interpreter's absolute path",
        )
    if began:
        said, hint = tail, "run it again; if it stays, `dflashctl -v` logs every step"
    else:  # a login shell like nologin, and a forced command, speak on stdout
        said = tail or _tail(completed.stdout)
        if said.startswith("Traceback"):  # of the loader, on a request that came maimed
            said = said.splitlines()[-1]
        silent = not tail or tail.startswith("Traceback")
        hint = (
            NOT_BEGUN if by_ssh and silent else "it did not begin; try `python:` of this host there by hand"
        )
    if any(words in tail for words in AT_A_LIMIT):
        hint = (
            "no more processes, or no more memory, are allowed there: look at pids.max and memory.max of the"
            " container, ulimit -u, and what runs"
        )
    return Unreachable(
        f"{op} ended without an answer (exit code {completed.exit_code}): {said or 'not a word'}",
        where=where,
        next=hint,
    )


AT_A_LIMIT = ("Resource temporarily unavailable", "Cannot allocate memory", "can't start new thread")
"""What a shell, lxc-attach and Python say where fork fails."""

NOT_BEGUN = (
    "it did not begin: what stands between ssh and a command took its place, or its input. A start-up file of"
    " the login shell (~/.bashrc) that reads, exits or execs; a forced command; a shell like nologin. To see:"
    " `ssh HOST 'echo ok; cat' </dev/null` must print ok"
)
"""Between sshd and the command stands a login shell, which may do anything."""


def _tail(output: bytes) -> str:
    return output[-STDERR_TAIL_BYTES:].decode("utf-8", "replace").strip()
