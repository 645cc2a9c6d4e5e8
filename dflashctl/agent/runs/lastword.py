"""How a run's end gets to disk: exit.json, also while the disk is full."""

from __future__ import annotations

import os
import time
from typing import Any, Dict

from ..records.runfolder import RunFolder
from .ending import exit_body

EXIT_RETRY_S = 5.0
EXIT_RETRIES = 720  # an hour of a full disk


def write_exit(run: RunFolder, body: Dict[str, Any]) -> None:
    """The last word, also when the disk is full for a while."""
    for attempt in range(EXIT_RETRIES):
        try:
            run.write("exit.json", body)
            return
        except OSError:
            if attempt + 1 == EXIT_RETRIES or not os.path.isdir(run.path):
                raise
            time.sleep(EXIT_RETRY_S)


def failed_to_start(run: RunFolder, why: str) -> None:
    now = time.time()
    body = exit_body(
        code=None,
        signal=None,
        oom=False,
        started_at=now,
        ended_at=now,
        wall_s=0.0,
        peak_rss_bytes=0,
        killed_by=None,
        why=why,
    )
    try:
        run.append_event("exited", why=why)
        run.write("exit.json", body)
    except OSError:  # launch hears of it all the same
        pass


def remove_if_empty(path: str) -> None:
    try:
        if os.path.getsize(path) == 0:
            os.unlink(path)
    except OSError:
        pass
