"""One request in on stdin, one framed answer out on stdout: the far end of `remote/agent_call.py`.

    DFLASH-START <nonce>                   (nothing is done for a caller that cannot hear this any more)
    DFLASH-EVENT <nonce> {json}            (none or many: progress)
    DFLASH-DATA <nonce> <length>           (none or many, of `pull_files`: so many bytes follow as they are)
    DFLASH-ANSWER <nonce> <length>
    {"ok": true, "result": {...}}  |  {"ok": false, "error": {"kind", "what", "where", "next"}}
    DFLASH-END <nonce>

An operation is a function `op(request: dict, emit) -> dict`. It raises AgentError for what it foresees;
anything else is answered as a bug with its traceback. Its own prints and those of its children go to
stderr, never into the answer.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import struct
import sys
import traceback
from typing import Any, BinaryIO, Callable, Dict, List

from . import AgentError

PROTOCOL = 1

OPS: Dict[str, str] = {
    "ping": "main:ping",
    "release_facts": "releases.install:release_facts",
    "install_release": "releases.install:install_release",
    "release_drift": "releases.drift:release_drift",
    "roll_back": "releases.switching:roll_back",
    "host_desk": "releases.hostdesk:host_desk",
    "lock_show": "releases.hostlock:lock_show",
    "lock_break": "releases.hostlock:lock_break",
    "launch": "runs.launch:launch",
    "launch_desk": "runs.launchdesk:launch_desk",
    "gpu_desk": "gpus.gpudesk:gpu_desk",
    "wait_end": "runs.waiting:wait_end",
    "stop": "runs.stop:stop",
    "look_process": "runs.onepid:look_process",
    "stop_process": "runs.onepid:stop_process",
    "observe": "runs.observe:observe",
    "stacks": "runs.stacks:stacks",
    "host_stacks": "runs.stacks:host_stacks",
    "read_log": "logs.logread:read_log",
    "search_log": "logs.logsearch:search_log",
    "pull_list": "history.pull:pull_list",
    "pull_files": "history.pull:pull_files",
    "list_runs": "history.listing:list_runs",
    "note_run": "history.curate:note_run",
    "prune_runs": "history.curate:prune_runs",
    "repair_runs": "history.repair:repair_runs",
    "host_facts": "gpus.hostfacts:host_facts",
    "inside_facts": "gpus.insidefacts:inside_facts",
    "learn_idle": "gpus.insidefacts:learn_idle",
    "inspect": "doctor.inspecting:inspect",
    "probe_follow": "doctor.probing:probe_follow",
    "doctor_host": "doctor.doctor_host:doctor_host",
    "doctor_inside": "doctor.doctor_inside:doctor_inside",
}
"""Operation -> "module:function" below this package, imported only when asked for."""

READ_ON = frozenset(["host_desk", "launch_desk", "gpu_desk"])
"""Operations to which the caller goes on talking: their stdin stays what it is."""

MAX_REQUEST_BYTES = 64 * 2**20


class DeadlinePassed(BaseException):
    """The call's own time is over; not an Exception, so that no operation swallows it by accident."""


class Emit:
    """Progress for the person who waits: `emit({...})`.

    Best effort: when nobody reads any more, `gone` becomes true and later events are dropped, so an
    operation with effects still runs to its end; one that only feeds a reader (a followed log) looks at
    `gone` and returns.
    """

    def __init__(self, out: BinaryIO, nonce: str) -> None:
        self._out = out
        self._nonce = nonce
        self.gone = False

    def start(self) -> None:
        """Say that the operation begins; afterwards `gone` tells whether anybody heard it."""
        self._write(b"\nDFLASH-START %s\n" % self._nonce.encode())

    def __call__(self, event: Dict[str, Any]) -> None:
        self._write(b"DFLASH-EVENT %s %s\n" % (self._nonce.encode(), _json(event)))

    def data(self, piece: bytes) -> None:
        """Bytes as they are."""
        self._write(b"DFLASH-DATA %s %d\n" % (self._nonce.encode(), len(piece)), piece, b"\n")

    def answer(self, body: Dict[str, Any]) -> None:
        """The last words. Leads with a newline, in case something printed a line without its end."""
        try:
            data = _json(body)
        except (TypeError, ValueError) as error:
            data = _json(_failure("bug", f"an answer that is no JSON: {error}", repr(body)[:2000]))
        nonce = self._nonce.encode()
        self._write(b"\nDFLASH-ANSWER %s %d\n%s\nDFLASH-END %s\n" % (nonce, len(data), data, nonce))

    def _write(self, *pieces: bytes) -> None:
        if self.gone:
            return
        try:
            for piece in pieces:
                self._out.write(piece)
            self._out.flush()
        except OSError:
            self.gone = True


def serve(stdin: BinaryIO) -> int:
    """Read a length-prefixed request from `stdin`, run its operation, answer. Returns 0 when it answered
    "ok".

    Takes over the process: stdout becomes stderr for everyone but the frames, stdin becomes /dev/null.
    """
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        envelope = _read_request(stdin)
    except (OSError, ValueError) as error:
        print(f"dflashctl agent: no request: {error}", file=sys.stderr)
        return 1
    if envelope["op"] not in READ_ON:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    emit = Emit(out, str(envelope["nonce"]))
    emit.start()
    if emit.gone:
        # A frozen container or a slow start: the caller gave up before we began, and told its person so.
        print("dflashctl agent: the caller is gone; nothing was done", file=sys.stderr)
        return 1
    body = perform(str(envelope["op"]), envelope.get("request") or {}, emit, envelope.get("timeout_s"))
    emit.answer(body)
    return 0 if body["ok"] else 1


def perform(op: str, request: Dict[str, Any], emit: Any, timeout_s: Any = None) -> Dict[str, Any]:
    """Run one operation to its answer; never raises.

    `timeout_s` is this side's own deadline (main thread only): the laptop may be gone, and a call must not
    stay for ever.
    """
    if timeout_s:
        signal.signal(signal.SIGALRM, _on_alarm)
        signal.setitimer(signal.ITIMER_REAL, float(timeout_s))
    try:
        return {"ok": True, "result": find_op(op)(request, emit)}
    except AgentError as error:
        return _failure(error.kind, error.what, error.where, error.next)
    except DeadlinePassed:
        what = f"{op} did not end within {float(timeout_s):.0f} s and was stopped there"
        return _failure("unreachable", what, "".join(traceback.format_exc(limit=-3)))
    except Exception as error:
        around = _around(error) if isinstance(error, OSError) else None
        if around is not None:
            return _failure(around.kind, around.what, around.where, around.next)
        return _failure("bug", f"{op}: {type(error).__name__}: {error}", traceback.format_exc())
    finally:
        if timeout_s:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _around(error: OSError) -> Any:
    from .processes.surroundings import told  # a module that is read only when something failed

    return told(error)


def find_op(op: str) -> Callable[[Dict[str, Any], Any], Dict[str, Any]]:
    """The function of an operation. Raises AgentError for a name that is not in the table."""
    if op not in OPS:
        raise AgentError("bug", f"no such operation: {op}")
    module, function = OPS[op].split(":")
    found = getattr(importlib.import_module("." + module, __package__), function)
    return found


def ping(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """Who answers: the smallest call, for "is it there?" and for tests. Echoes request["echo"]."""
    for number in range(int(request.get("events", 0))):
        emit({"number": number})
    return {
        "protocol": PROTOCOL,
        "python": sys.executable,
        "version": ".".join(str(part) for part in sys.version_info[:3]),
        "pid": os.getpid(),
        "uid": os.getuid(),
        "user": _user_name(),
        "echo": request.get("echo"),
    }


def command_line(argv: "List[str] | None" = None) -> None:
    """`python3 -I supervisor.pyz supervise RUN_DIR` (the zip's `__main__`)."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) == 2 and words[0] == "supervise":
        supervise = importlib.import_module(".runs.supervise", __package__)
        sys.exit(supervise.main(words[1]))
    print("usage: python3 -I supervisor.pyz supervise RUN_DIR", file=sys.stderr)
    sys.exit(2)


def _read_request(stdin: BinaryIO) -> Dict[str, Any]:
    (length,) = struct.unpack(">Q", _exactly(stdin, 8))
    if length > MAX_REQUEST_BYTES:
        raise ValueError(f"{length} bytes announced")
    envelope = json.loads(_exactly(stdin, length).decode("utf-8"))
    if not isinstance(envelope, dict) or "nonce" not in envelope or "op" not in envelope:
        raise ValueError("not an envelope with op and nonce")
    return envelope


def _exactly(stdin: BinaryIO, length: int) -> bytes:
    data = stdin.read(length)
    if len(data) != length:
        raise ValueError(f"{len(data)} of {length} bytes arrived")
    return data


def _failure(kind: str, what: str, where: str = "", next: str = "") -> Dict[str, Any]:
    return {"ok": False, "error": {"kind": kind, "what": what, "where": where, "next": next}}


def _json(value: Any) -> bytes:
    """One line of ASCII: file names that are no UTF-8 (surrogates) survive, and no newline can end an
    event early."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii")


def _on_alarm(number: int, frame: Any) -> None:
    raise DeadlinePassed()


def _user_name() -> str:
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except (ImportError, KeyError):
        return str(os.getuid())
