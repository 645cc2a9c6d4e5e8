"""The program behind userns.Userns: a host in its own namespaces that runs scripts on request.

A request is a line of JSON on stdin, the answer a line on stdout. pid 1 of the namespaces only takes in
orphans and leaves when its worker does; the worker leaves at the end of stdin.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [sys.argv[1], str(Path(__file__).resolve().parents[1])]

from dflashctl.lab import ns  # noqa: E402
from pctkit.place import execute  # noqa: E402


def main() -> int:
    """Enter the namespaces; wait for their pid 1."""
    ns.enter()
    first = os.fork()
    if first == 0:
        _first_process()
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 255


def _first_process() -> None:
    code = 1
    try:
        ns.mount("proc", "/proc", "proc", ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC)
        ns.set_hostname("pve1")
        os.umask(0o022)
        worker = os.fork()
        if worker == 0:
            _serve()
            os._exit(0)
        os.close(0)
        ended = 0
        while ended != worker:
            ended, status = os.wait()
            code = os.waitstatus_to_exitcode(status) & 255
    finally:
        os._exit(code)


def _serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        out, err, code = execute(
            request["script"],
            base64.b64decode(request["stdin"]),
            request["seconds"],
            request["env"],
            request["folder"],
        )
        answer = {"out": base64.b64encode(out).decode(), "err": base64.b64encode(err).decode(), "code": code}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
