"""Run a program that came with the request, in this Python and in the environment of a run, and bring back
what it found. Its files lie in a folder of their own for that time; nothing stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, Optional, Tuple

from .. import AgentError
from ..processes import child
from ..records.pick import one_run
from ..records.sentfiles import write_files
from ..runs.environment import environment

STDERR_TAIL_BYTES = 4000


def inspect(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """request: files {path: text}, module, argv, env, cwd, deadline_s, state_dir, run (tag or id)|null.

    With a run, its recorded environment is laid over `env`, and what it wrote down of its machine is
    answered. Events: {"progress": text}. Answers {"facts": what the program answered, "machine":
    environment.environment() of now, "run": {"id", "tag", "env", "environment": its
    environment.json|null}|null}. Raises AgentError: not_found (run), usage (the program did not answer, with
    its last words), unreachable (not within the deadline).
    """
    run = _run_of(request)
    env = {str(name): str(value) for name, value in dict(request["env"]).items()}
    if run is not None:
        env.update(run["env"])
    folder = ""
    try:
        folder = tempfile.mkdtemp(prefix="dflash-inspect-")
        write_files(folder, dict(request["files"]))
        env["PYTHONPATH"] = ":".join(part for part in (folder, env.get("PYTHONPATH")) if part)
        argv = [sys.executable, "-m", str(request["module"])] + [str(word) for word in request["argv"]]
        facts = run_program(argv, env, "/", float(request["deadline_s"]), emit)
    except OSError as error:
        raise AgentError("usage", "cannot write the program: %s" % error, tempfile.gettempdir()) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"facts": facts, "machine": environment(), "run": run}


def _run_of(request: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    name = request.get("run")
    if not name:
        return None
    run = one_run({"state_dir": request["state_dir"], "tag": name})
    record = run.record()
    if record.value is None:
        raise AgentError("not_found", record.problem or "run %s has no record" % run.id, run.path)
    env = record.value.get("env") or {}
    return {
        "id": run.id,
        "tag": record.value.get("tag"),
        "env": {str(key): str(value) for key, value in env.items()},
        "environment": run.read("environment.json").value,
    }


def run_program(argv: List[str], env: Dict[str, str], cwd: str, deadline_s: float, emit: Any) -> Any:
    """Start it, hear its lines on a pipe of their own, and return its answer; what it prints is kept
    aside."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=dict(env, DFLASH_ANSWER_FD=str(writer)),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=(writer,),
                start_new_session=True,
            )
        except OSError as error:
            os.close(reader)
            raise AgentError("usage", "cannot start %s: %s" % (argv[0], error)) from None
        finally:
            os.close(writer)
        try:
            answer, late = _listen(reader, time.monotonic() + deadline_s, emit)
        finally:
            os.close(reader)
            child.end(process)
        if late:
            raise AgentError(
                "unreachable",
                "torch was not read within %.0f s" % deadline_s,
                next="look again: a cold disk or a busy machine needs longer the first time",
            )
        if answer is None:
            said.seek(0)
            tail = said.read()[-STDERR_TAIL_BYTES:].decode("utf-8", "replace").strip()
            raise AgentError(
                "usage",
                "%s cannot be asked: %s" % (sys.executable, tail.splitlines()[-1] if tail else "no answer"),
                next="`python:` of this host in hosts.yaml must be the interpreter that has torch",
            )
    return answer


def _listen(reader: int, until: float, emit: Any) -> Tuple[Any, bool]:
    """(the answer or None, whether the time is over)."""
    pending, answers = [b""], []

    def heard(descriptor: int, data: bytes) -> bool:
        lines = (pending[0] + data).split(b"\n")
        pending[0] = lines.pop()
        for line in lines:
            word = json.loads(line.decode("utf-8"))
            if "answer" in word:
                answers.append(word["answer"])
                return True
            emit(word)
        return False

    in_time = child.listen([reader], until, heard)
    return answers[0] if answers else None, not in_time
