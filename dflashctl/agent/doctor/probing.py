"""Watch a probe from its start to its end in one call: what it prints, and what each of its programs came
to."""

from __future__ import annotations

import codecs
import time
from typing import Any, Dict, Iterator, List

from .. import AgentError
from ..records.runfolder import folder_of, objects
from ..runs.waiting import wait_end

RESULTS = "probe.jsonl"
POLL_S = 0.1
CHUNK_BYTES = 1 << 16


def probe_follow(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """request: state_dir, id, wait_s, log (bool: send it too).

    Events: {"result": line of probe.jsonl}, {"log": text}. Answers what `wait_end` answers, with "results":
    all lines; "live" is true when wait_s was not enough. Raises AgentError: not_found.
    """
    run = folder_of(str(request["state_dir"]), str(request["id"]))
    if not run.has("record.json"):
        raise AgentError("not_found", "no run %s" % run.id)
    log = Growing(run.log_path(run.record().value or {})) if request.get("log") else None
    results, said = Growing(run.file(RESULTS)), Lines()
    words = codecs.getincrementaldecoder("utf-8")("replace")  # a character may come in two pieces
    until = time.monotonic() + float(request["wait_s"])
    look = {"state_dir": request["state_dir"], "id": run.id, "wait_s": 0.0}
    while True:
        end = wait_end(look, emit)  # first, so that nothing that was written before the end is missed
        for data in results.pieces():
            for line in said.add(data):
                emit({"result": line})
        for data in log.pieces() if log is not None else ():
            emit({"log": words.decode(data)})
        if not end["live"] or time.monotonic() >= until or getattr(emit, "gone", False):
            return dict(end, results=said.all)
        time.sleep(POLL_S)


class Growing:
    """What has been added to a file since the last look."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._read = 0

    def pieces(self) -> Iterator[bytes]:
        """All of it, in pieces that an event can carry."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                while True:
                    data = file.read(CHUNK_BYTES)
                    if not data:
                        return
                    self._read += len(data)
                    yield data
        except OSError:  # not written yet
            return


class Lines:
    """Whole lines of JSON out of pieces."""

    def __init__(self) -> None:
        self.all: List[Dict[str, Any]] = []
        self._rest = b""

    def add(self, data: bytes) -> List[Dict[str, Any]]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        new = list(objects(line.decode("utf-8", "replace") for line in lines))
        self.all += new
        return new
