"""The state of the strict `pct` stand-in (dflashctl/lab/pct) for a bed, and the program that sshd's PATH
finds."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .plan import Layout

NODE = "pve1"
REPOSITORY = Path(__file__).resolve().parents[3]


def write_settings(layout: Layout, **more: Any) -> None:
    """Which Proxmox this is; replaced at once, since calls may be under way."""
    settings = {"version": 1, "node": NODE, "pve": 9, "startup_delay_s": 0.0, "lock_dir": "/run/lock/lxc"}
    aside = layout.pct / "pct.json.new"
    aside.write_text(json.dumps(settings | more))
    aside.replace(layout.pct / "pct.json")


def write(layout: Layout, configs: dict[int, str]) -> None:
    """`configs` maps a container id to its Proxmox configuration."""
    state = layout.pct
    for name in ("conf", "ns", "run"):
        (state / name).mkdir(parents=True)
    write_settings(layout)
    for vmid, text in configs.items():
        (state / "conf" / f"{vmid}.conf").write_text(text)
        (state / "ns" / f"{vmid}.json").write_text(json.dumps({"backend": "lxc", "lxcpath": str(layout.lxc)}))
    # A copy, so that also a user who cannot look into the checkout gets pct's own refusal.
    library = layout.top / "lib"
    shutil.copytree(
        REPOSITORY / "dflashctl", library / "dflashctl", ignore=shutil.ignore_patterns("__pycache__", "*.md")
    )
    for folder in (library, *(p for p in library.rglob("*") if p.is_dir())):
        folder.chmod(0o755)
    for name, module in (("pct", "cli"), ("pveversion", "pveversion")):
        program = layout.bin / name
        load = f"from dflashctl.lab.pct.{module} import main"
        code = f"import sys; sys.path.append({str(library)!r}); {load}; main()"
        program.write_text(
            f"#!/bin/sh\nexport DFLASHCTL_PCT_STATE={state}\n"
            f'exec {shlex.quote(_python())} -I -S -c {shlex.quote(code)} "$@"\n'
        )
        program.chmod(0o755)
    layout.bin.chmod(0o755)


def _python() -> str:
    """The machine's own Python where it is new enough, since everybody may run it; else this one."""
    system = "/usr/bin/python3"
    if Path(system).exists():
        check = [system, "-I", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        if subprocess.run(check, timeout=30, capture_output=True).returncode == 0:
            return system
    return sys.executable
