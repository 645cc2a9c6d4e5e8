"""Freezing a container from outside: pct itself has no such command (docs/pct.md#frozen).

`python -m dflashctl.lab.pct.outside STATE VMID freeze|thaw`, for either backend.
"""

from __future__ import annotations

import sys

from dflashctl.lab.pct.backends import backend
from dflashctl.lab.pct.state import State


def main(state: str, vmid: str, verb: str) -> None:
    container = backend(State(state), int(vmid))
    {"freeze": container.freeze, "thaw": container.thaw}[verb]()


if __name__ == "__main__":
    main(*sys.argv[1:])
