"""Start a run's supervisor, hear its word, and recognise one that has not yet written its record."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

from ..processes import proc
from ..records.runfolder import RunFolder

STARTED_S = 20.0  # a supervisor needs 0.1 s; a loaded machine or a cold network file system longer


def find_supervisor(run: RunFolder) -> Optional[proc.Process]:
    """A supervisor of this run that has not yet written its record, by its exact command line."""
    wanted = supervisor_argv(run)[1:]
    for process in proc.table().values():
        if proc.cmdline(process.pid)[1:] == wanted and not process.dead:
            return process
    return None


def supervisor_argv(run: RunFolder) -> List[str]:
    return [sys.executable, "-I", run.file("supervisor.pyz"), "supervise", run.path]


def spawn_supervisor(run: RunFolder, secrets: Dict[str, str]) -> Dict[str, Any]:
    """Start it and wait for its one line: {"started": ...} or {"failed": why}; {} when it takes too long."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    with open(run.file("supervisor.err"), "ab") as errors:
        process = subprocess.Popen(
            supervisor_argv(run),
            cwd="/",
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            close_fds=True,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(secrets).encode())
        process.stdin.close()
    except OSError:  # it died; its stdout says so
        pass
    line = _read_line(process.stdout.fileno(), STARTED_S)
    if line is None:
        return {}
    try:
        word = json.loads(line)
    except ValueError:
        word = None
    if isinstance(word, dict):
        return word
    with open(run.file("supervisor.err"), "rb") as errors_again:
        said = errors_again.read()[-2000:].decode("utf-8", "replace").strip()
    return {"failed": "the supervisor died: %s" % (said or "without a word")}


def _read_line(descriptor: int, timeout_s: float) -> Optional[bytes]:
    """Up to the first newline or the end; None after the deadline."""
    until = time.monotonic() + timeout_s
    data = b""
    while b"\n" not in data:
        left = until - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return None
        chunk = os.read(descriptor, 65536)
        if not chunk:
            break
        data += chunk
    return data.partition(b"\n")[0]
