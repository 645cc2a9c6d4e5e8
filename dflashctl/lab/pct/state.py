"""The stand-in's host: one folder, named by DFLASHCTL_PCT_STATE, that takes the place of /etc/pve.

```
pct.json        {"version": 1, "node": "pve1", "pve": 9, "startup_delay_s": 0.0, "lock_dir": "<folder>"}
conf/200.conf   Proxmox configuration of container 200: "key: value" lines, raw lxc.* lines, sections
ns/200.json     {"backend": "userns", ...} or {"backend": "lxc", "lxcpath": "..."}
ns/200.init     "pid start_ticks" of a running userns container
```
"""

from __future__ import annotations

import json
import os

from dflashctl.lab.pct.errors import Die

VARIABLE = b"DFLASHCTL_PCT_STATE"

# The newest pve-container of each Proxmox VE release that was looked at (docs/pct.md#versions).
PVE_CONTAINER = {7: (4, 4, 7), 8: (5, 3, 5), 9: (6, 1, 10)}

# Line numbers of src/PVE/CLI/pct.pm that those packages print in messages: nobody should match on them.
_LINES = {
    7: {"missing command": 189, "exec": 191, "pull": 561, "pull copy": 579, "push copy": 683},
    8: {"missing command": 239, "exec": 246, "pull": 657, "pull copy": 675, "push copy": 784},
    9: {"missing command": 246, "exec": 253, "pull": 664, "pull copy": 682, "push copy": 791},
}


class State:
    """What the folder says. `version` is that of the pve-container package to imitate."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            with open(os.path.join(folder, "pct.json"), encoding="utf-8") as file:
                settings = json.load(file)
        except (OSError, ValueError) as error:
            raise Die(f"pct stand-in: cannot read {folder}/pct.json: {error}\n") from None
        if settings.get("version") != 1:
            raise Die(
                f"pct stand-in: {folder}/pct.json has version {settings.get('version')!r}, known is 1\n"
            )
        self.node: str = settings.get("node", "pve1")
        self.pve: int = settings.get("pve", 9)
        if self.pve not in PVE_CONTAINER:
            raise Die(f"pct stand-in: {folder}/pct.json: pve is {self.pve!r}, known are 7, 8 and 9\n")
        exact = settings.get("pve_container")
        self.version: tuple[int, ...] = (
            tuple(int(part) for part in exact.split(".")) if exact else PVE_CONTAINER[self.pve]
        )
        self.startup_delay_s: float = settings.get("startup_delay_s", 0.0)
        self.lock_dir: str = settings.get("lock_dir") or os.path.join(folder, "lock")

    def at(self, place: str) -> str:
        """The ` at FILE line N` that Perl puts behind a message without a newline."""
        return f"at /usr/share/perl5/PVE/CLI/pct.pm line {_LINES[self.pve][place]}"

    def config_name(self, vmid: int) -> str:
        """How messages name the configuration file."""
        return f"nodes/{self.node}/lxc/{vmid}.conf"

    def config_path(self, vmid: int) -> str:
        return os.path.join(self.folder, "conf", f"{vmid}.conf")

    def vmids(self) -> list[int]:
        """The containers of this node, in order of their numbers."""
        try:
            names = os.listdir(os.path.join(self.folder, "conf"))
        except FileNotFoundError:
            return []
        return sorted(int(name[:-5]) for name in names if name.endswith(".conf") and name[:-5].isdigit())

    def backend_settings(self, vmid: int) -> dict[str, object]:
        """ns/<vmid>.json. A container without one cannot run: Die says so."""
        path = os.path.join(self.folder, "ns", f"{vmid}.json")
        try:
            with open(path, encoding="utf-8") as file:
                settings: dict[str, object] = json.load(file)
        except (OSError, ValueError) as error:
            raise Die(f"pct stand-in: cannot read {path}: {error}\n") from None
        return settings
