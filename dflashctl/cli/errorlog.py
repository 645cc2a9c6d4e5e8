"""The full traceback of every error that a person saw as one message, in a file that cannot grow for ever."""

from __future__ import annotations

import os
import shlex
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

KEEP_BYTES = 1 << 20


def log_file() -> Path:
    """`errors.log` in the person's log folder."""
    import platformdirs

    return platformdirs.user_log_path("dflashctl") / "errors.log"


def record(error: BaseException, words: Sequence[str]) -> str:
    """Append the traceback of `error`; returns where, or why not. Never raises: the error itself is the news.

    The command line goes with it: it holds no secret, since none is ever an argument.
    """
    head = f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} dflashctl {shlex.join(words)}\n"
    text = head + "".join(traceback.format_exception(error)) + "\n"
    try:
        path = log_file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > KEEP_BYTES:
            path.replace(path.with_suffix(".log.1"))
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, text.encode("utf-8", "backslashreplace"))
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as problem:  # RuntimeError: no home folder
        return f"its traceback could not be stored: {problem}"
    return f"traceback in {path}"
