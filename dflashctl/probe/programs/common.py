"""What every program of a probe does: run the case that its argument names, and write down what it came
to."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ERROR_CHARS = 4000

Figures = dict[str, Any]


class Failed(Exception):
    """Several errors at once, each with who met it."""

    def __init__(self, errors: Sequence[tuple[str, BaseException]], of: int) -> None:
        super().__init__(f"{len(errors)} of {of} failed")
        self.errors = errors


def run(cases: Mapping[str, Callable[[], Figures]]) -> None:
    """`python -m PROGRAM CASE`. Writes {"ok": true, "figures"} or {"ok": false, "said", "errors": [{"who",
    "text"}]} to the file of DFLASH_PROBE_ANSWER; exit code 0 or 1."""
    try:
        answer: dict[str, Any] = {"ok": True, "figures": cases[sys.argv[1]]()}
    except Failed as failed:
        told = [{"who": who, "text": text_of(error)} for who, error in failed.errors]
        answer = {"ok": False, "said": str(failed), "errors": told}
    except BaseException as error:
        answer = {"ok": False, "said": "", "errors": [{"who": "main", "text": text_of(error)}]}
    for each in answer.get("errors", ()):
        print(f"--- {each['who']}\n{each['text']}", flush=True)
    write(answer)
    sys.stdout.flush()
    # Ended at once: after a fault a driver's or collective's tidying up may hang.
    os._exit(0 if answer["ok"] else 1)


def write(answer: Mapping[str, Any]) -> None:
    path = Path(os.environ["DFLASH_PROBE_ANSWER"])
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(answer), encoding="utf-8")
    aside.replace(path)


def text_of(error: BaseException) -> str:
    """The traceback with its causes; the end of one that is long."""
    return "".join(traceback.format_exception(error))[-ERROR_CHARS:]


def in_threads(work: Sequence[Callable[[], object]]) -> None:
    """All at the same moment, each in a thread of its own that torch has not made. Raises Failed."""
    barrier = threading.Barrier(len(work))
    errors: list[tuple[str, BaseException]] = []

    def one(job: Callable[[], object]) -> None:
        try:
            barrier.wait()
            job()
        except BaseException as error:
            errors.append((threading.current_thread().name, error))

    threads = [
        threading.Thread(target=one, args=(job,), name=f"worker-{number}") for number, job in enumerate(work)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise Failed(sorted(errors, key=lambda error: error[0]), len(work))
