"""`pveversion`: one line that names the Proxmox VE that the stand-in imitates (pct.json)."""

from __future__ import annotations

import os
import sys

from dflashctl.lab.pct.errors import Die
from dflashctl.lab.pct.state import VARIABLE, State


def main() -> None:
    """Print `pve-manager/9.0.0/stand-in (running kernel: 6.8.12)` and end the process."""
    try:
        state = State(os.fsdecode(os.environb.get(VARIABLE, b"")))
    except Die as error:
        sys.stderr.write(str(error))
        sys.exit(255)
    print(f"pve-manager/{state.pve}.0.0/stand-in (running kernel: {os.uname().release})")
