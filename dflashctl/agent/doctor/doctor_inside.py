"""What `doctor` wants to know of the place where runs live: its Python, torch, limits, folders.

Nothing is changed. torch is imported by one child with a deadline, in the environment that a run has
(agent/doctor/doctor_torch.py); what it said before the deadline counts.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any, Dict, List

from ..gpus.hostfacts import REAP_S, begin, end
from ..processes import child, proc
from ..runs.environment import driver
from . import doctor_torch
from .doctor_place import place, text_of

MARK = "DOCTOR "
LIMITS = ("nofile", "memlock", "nproc", "stack")
TAIL_BYTES = 2000
Facts = Dict[str, Any]


def doctor_inside(request: Facts, emit: Any) -> Facts:
    """request: paths, env (of a run), python (whose torch is asked, or null), torch_timeout_s (90),
    program_timeout_s (20).

    Emits {"clock"} at once, {"torch_s"} while torch is imported. Answers {"boot_id", "uid", "executable",
    "version", "prefix", "base_prefix", "limits": {name: [soft, hard]} (-1: none), "place", "uid_map",
    "driver", "smi": reading of index, uuid, driver, "torch": see `ask_torch`}.
    """
    emit({"clock": time.time()})
    smi = begin(["nvidia-smi", "--query-gpu=index,uuid,driver_version", "--format=csv,noheader"])
    until = time.monotonic() + float(request.get("program_timeout_s") or 20.0)
    python = request.get("python")
    torch = ask_torch(str(python), request, emit) if python else None
    return {
        "boot_id": proc.boot_id(),
        "uid": os.getuid(),
        "executable": sys.executable,
        "version": list(sys.version_info[:3]),
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "limits": {name: limit(name) for name in LIMITS},
        "place": place("", [str(path) for path in request["paths"]]),
        "uid_map": text_of("/proc/self/uid_map"),
        "driver": driver(),
        "smi": end(smi, max(until - time.monotonic(), REAP_S)),
        "torch": torch,
    }


def limit(name: str) -> List[int]:
    """[soft, hard]; -1 for none."""
    return list(resource.getrlimit(getattr(resource, "RLIMIT_" + name.upper())))


def ask_torch(python: str, request: Facts, emit: Any) -> Facts:
    """{"said": {step: facts}, "problem": null | "timeout" | why it ended, "stderr", "took_s"}."""
    loader: Any = doctor_torch.__loader__
    source = loader.get_source(doctor_torch.__name__)
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environment.update({str(key): str(value) for key, value in (request.get("env") or {}).items()})
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            [python, "-c", source],
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return {"said": {}, "problem": "%s: %s" % (python, error.strerror), "stderr": "", "took_s": 0.0}
    out, problem = _listen(process, began + float(request.get("torch_timeout_s") or 90.0), emit, began)
    if problem is None and process.returncode:
        code = process.returncode
        how = "signal %d" % -code if code < 0 else "exit code %d" % code
        problem = "its process ended with %s" % how
    stderr = out[1][-TAIL_BYTES:].decode("utf-8", "replace").strip()
    return {"said": _said(out[0]), "problem": problem, "stderr": stderr, "took_s": time.monotonic() - began}


def _listen(process: "subprocess.Popen[bytes]", until: float, emit: Any, began: float) -> Any:
    """Both streams to their end, or to the deadline. Returns ([stdout, stderr], null | "timeout")."""
    streams = [process.stdout.fileno(), process.stderr.fileno()]  # type: ignore[union-attr]
    out = {stream: b"" for stream in streams}

    def heard(stream: int, data: bytes) -> bool:
        out[stream] += data
        return False

    with process.stdout, process.stderr:  # type: ignore[union-attr]
        in_time = child.listen(streams, until, heard, lambda: emit({"torch_s": time.monotonic() - began}))
        try:
            if in_time:
                process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            child.end(process)
    return list(out.values()), None if in_time else "timeout"


def _said(out: bytes) -> Facts:
    """The lines `DOCTOR {"step": ..., ...}`; anything else that an import prints is passed over."""
    found: Facts = {}
    for line in out.decode("utf-8", "replace").splitlines():
        if line.startswith(MARK):
            try:
                value = json.loads(line[len(MARK) :])
                found[str(value.pop("step"))] = value
            except (ValueError, KeyError, AttributeError):
                continue
    return found
