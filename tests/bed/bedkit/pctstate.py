"""The state of the strict `pct` stand-in (dflashctl/lab/pct) for a bed, and the program that sshd's PATH
finds."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from .plan import Layout

NODE = "pve1"
REPOSITORY = Path(__file__).resolve().parents[3]


def write(layout: Layout, configs: dict[int, str]) -> None:
    """`configs` maps a container id to its Proxmox configuration."""
    state = layout.pct
    for name in ("conf", "ns", "run"):
        (state / name).mkdir(parents=True)
    settings = {"version": 1, "node": NODE, "pve": 9, "startup_delay_s": 0.0, "lock_dir": "/run/lock/lxc"}
    (state / "pct.json").write_text(json.dumps(settings))
    for vmid, text in configs.items():
        (state / "conf" / f"{vmid}.conf").write_text(text)
        (state / "ns" / f"{vmid}.json").write_text(json.dumps({"backend": "lxc", "lxcpath": str(layout.lxc)}))
    program = layout.bin / "pct"
    python, code = shlex.quote(sys.executable), f"import sys; sys.path.append({str(REPOSITORY)!r})"
    run = f"{code}; from dflashctl.lab.pct.cli import main; main()"
    program.write_text(
        f'#!/bin/sh\nexport DFLASHCTL_PCT_STATE={state}\nexec {python} -I -S -c {shlex.quote(run)} "$@"\n'
    )
    program.chmod(0o755)
