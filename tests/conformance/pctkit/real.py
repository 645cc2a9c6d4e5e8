"""A real Proxmox VE node, reached by ssh: DFLASHCTL_REAL_PVE=root@host:ctid.

Only rows that touch nothing but scratch folders are run. A throw-away node, with containers 200
(unprivileged, running), 201 (never started) and 202 (privileged, running) and no others, can be given whole:
DFLASHCTL_REAL_PVE_THROWAWAY=1 runs every row, which rewrites /etc/pve/nodes/<node>/lxc and stops containers.
DFLASHCTL_REAL_PVE_SSH holds further ssh options, DFLASHCTL_REAL_PVE_VERSION the release where `pveversion`
does not say it.
"""

from __future__ import annotations

import os
import shlex
import subprocess

from pctkit.place import DEFAULT_CONFIG, Place
from pctkit.table import Done, Row


class Real(Place):
    name = "real"

    def __init__(self, target: str) -> None:
        self.address, _, container = target.rpartition(":")
        if not self.address or not container.isdigit():
            raise ValueError(f"DFLASHCTL_REAL_PVE is {target!r}; expected user@host:containerid")
        options = shlex.split(os.environ.get("DFLASHCTL_REAL_PVE_SSH", ""))
        self._ssh = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *options, self.address]
        self.throwaway = os.environ.get("DFLASHCTL_REAL_PVE_THROWAWAY") == "1"
        self.names = {"ct": container, "home": "/root"}
        self.has = frozenset({"unmapped owner", "second uid"})
        self._look_around(container)
        if self.throwaway:
            self.has |= {"own node", "stopped", "privileged", "freezer"}
            self.names |= {"stopped": "201", "priv": "202"}

    def _look_around(self, container: str) -> None:
        script = (
            "hostname -s; pveversion 2>/dev/null | sed 's,.*pve-manager/,,; s/[.].*//'; echo ==; mktemp -d;"
            " pct list;"
            f" pct exec {container} -- sh -c 'hostname; mktemp -d /root/dflashctl-pct-XXXXXX'"
        )
        done = self.run(script)
        if done.exit != 0:
            raise RuntimeError(f"cannot use {self.address}: {done.stderr or done.stdout}")
        head, _, tail = done.stdout.partition("==\n")
        node, *release = head.split()
        above, _, *table, hostname, inside = tail.splitlines()
        self.version = int(os.environ.get("DFLASHCTL_REAL_PVE_VERSION") or (release[0] if release else 9))
        containers = [row.split() for row in table]
        self.names |= {
            "node": node,
            "hostname": hostname,
            "inside": inside,
            "above": above,
            "host": f"{above}/bat",
            "missing": next(
                str(n) for n in range(999, 99, -1) if str(n) not in {row[0] for row in containers}
            ),
            "lock": f"/run/lock/lxc/pve-config-{container}.lock",
            "conf": f"/etc/pve/nodes/{node}/lxc",
            "freeze": f"lxc-freeze -n {container}",
            "thaw": f"lxc-unfreeze -n {container}",
        }
        # A line with a lock has four words: leave such a container alone.
        if stopped := [row[0] for row in containers if row[1] == "stopped" and len(row) == 3]:
            self.names["stopped"] = stopped[0]
            self.has |= {"stopped"}

    def why_not(self, row: Row) -> str:
        if row.pve != self.version:
            return f"about Proxmox VE {row.pve}"
        if not self.throwaway:
            if row.destructive:
                return "destructive"
            if row.config or row.containers != (200, 201):
                return "needs a configuration of its own"
            if "{stopped}" in row.command and "stopped" not in self.has:
                return "this node has no stopped container"
        return super().why_not(row)

    def prepare(self, row: Row) -> None:
        n = self.names
        script = f"rm -rf {n['host']}; mkdir {n['host']}; cd /"
        if self.throwaway:
            script += self._configure(DEFAULT_CONFIG)
            for vmid in (200, 202):
                script += f"; lxc-unfreeze -n {vmid} 2>/dev/null"
                script += f"; pct status {vmid} | grep -q running || pct start {vmid}"
                script += f"; pct exec {vmid} -- sh -c 'mkdir -p {n['inside']}; rm -f /root/x'"
            wanted = {vmid: DEFAULT_CONFIG[vmid] for vmid in row.containers} | row.config
            script += self._configure(wanted)
        script += f"; pct exec {n['ct']} -- sh -c 'cd {n['inside']} && rm -rf *'"
        self.run(script)

    def _configure(self, texts: dict[int, str]) -> str:
        conf = self.names["conf"]
        writes = [f"printf %s {shlex.quote(text)} > {conf}/{vmid}.conf" for vmid, text in texts.items()]
        return "; " + "; ".join([f"rm -f {conf}/*.conf", *writes])

    def run(self, script: str, stdin: str = "", seconds: float = 60.0) -> Done:
        command = f"cd {self.names['host']} 2>/dev/null; {script}" if "host" in self.names else script
        try:
            done = subprocess.run(
                [*self._ssh, shlex.join(["bash", "-c", command])],
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds + 30,
            )
        except subprocess.TimeoutExpired:
            return Done("", "", -1, True)
        return Done(done.stdout, done.stderr, done.returncode)

    def close(self) -> None:
        n = self.names
        self.run(f"rm -rf {n['above']}; pct exec {n['ct']} -- rm -rf {n['inside']}")
