"""Real LXC containers: 200 unprivileged, 202 privileged, 201 never started. Root and Debian's lxc are needed;
nothing is downloaded."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from pctkit import skeleton
from pctkit.place import StandIn, execute
from pctkit.table import Done

SHIFT = 100000
_INIT = "#!/bin/sh\ntrap 'exit 0' TERM INT PWR\nwhile :; do sleep 3600 & wait $!; done\n"


def reason_against() -> str:
    """Why real LXC cannot be used here; "" when it can."""
    if os.geteuid() != 0:
        return "real LXC containers need root"
    if missing := [name for name in ("lxc-start", "lxc-attach", "lxc-freeze") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed (apt-get install -y --no-install-recommends lxc)"
    return ""


class Lxc(StandIn):
    name = "lxc"
    has = StandIn.has | {"unmapped owner", "second uid"}

    def __init__(self) -> None:
        # Not below pytest's folder: uid 100000 has to be able to search every folder on the way.
        super().__init__(Path(tempfile.mkdtemp(prefix="dflashctl-pct-", dir="/tmp")))
        self.root.chmod(0o755)
        self.lxcpath = self.root / "lxc"
        self.grants = self.root / "subuid"
        self.grants.write_text(f"root:{SHIFT}:65536\n")
        for verb, program in (("freeze", "lxc-freeze"), ("thaw", "lxc-unfreeze")):
            self.names[verb] = f"{program} -P {self.lxcpath} -n 200"
        try:
            for vmid in (200, 202):
                self._make(vmid, shift=SHIFT if vmid == 200 else 0)
            self._settle(201)
        except BaseException:
            self.close()
            raise

    def _settle(self, vmid: int) -> None:
        settings = {"backend": "lxc", "lxcpath": str(self.lxcpath)}
        (self.state / "ns" / f"{vmid}.json").write_text(json.dumps(settings))

    def _make(self, vmid: int, shift: int) -> None:
        folder = self.lxcpath / str(vmid)
        root = folder / "rootfs"
        root.mkdir(parents=True)
        bound = skeleton.build(root, f"ct{vmid}")
        (root / "ctinit").write_text(_INIT)
        (root / "ctinit").chmod(0o755)
        (root / str(self.home).lstrip("/")).mkdir(parents=True)
        for path in [root, *root.rglob("*")]:
            if path.name != "shared":  # as a folder of the host that is bound in: its owner is not mapped
                os.lchown(path, shift, shift)
        for parent in (self.lxcpath, folder):
            parent.chmod(0o711)
        lines = [
            f"lxc.uts.name = ct{vmid}",
            f"lxc.rootfs.path = dir:{root}",
            "lxc.net.0.type = empty",
            "lxc.apparmor.profile = unconfined",
            "lxc.tty.max = 0",
            "lxc.pty.max = 64",
            "lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed",
            "lxc.init.cmd = /ctinit",
            "lxc.environment = TERM=linux",
            *(f"lxc.mount.entry = {path} {path[1:]} none rbind,ro 0 0" for path in bound),
        ]
        if shift:
            lines += [f"lxc.idmap = u 0 {shift} 65536", f"lxc.idmap = g 0 {shift} 65536"]
        (folder / "config").write_text("\n".join(lines) + "\n")
        self._settle(vmid)
        self._lxc("start", vmid)

    def _granted(self, *command: str) -> list[str]:
        """Where `newuidmap` is installed LXC asks it, and it refuses what /etc/subuid does not grant root. As
        the command sees that file, root may have the containers' ids, whoever else is on this machine."""
        mounts = " && ".join(f'mount --bind "$0" /etc/{name}' for name in ("subuid", "subgid"))
        exist = "[ -e /etc/subuid ] && [ -e /etc/subgid ]"
        line = f'if {exist}; then {mounts}; fi && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", line, str(self.grants), *command]

    def _lxc(self, verb: str, vmid: int, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = self._granted(f"lxc-{verb}", "-P", str(self.lxcpath), "-n", str(vmid), *args)
        return subprocess.run(
            command, check=check, timeout=60, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )

    def revive(self, vmid: int) -> None:
        state = self._lxc("info", vmid, "-s", "-H").stdout.strip()
        if state == "FROZEN":
            self._lxc("unfreeze", vmid)
        elif state != "RUNNING":
            self._lxc("stop", vmid, "-k", check=False)
            self._lxc("start", vmid)
        clean = "cd /root && rm -rf -- * && rm -f /rel_name"
        self._lxc("attach", vmid, "--clear-env", "--", "/bin/sh", "-c", clean)

    def run(self, script: str, stdin: str = "", seconds: float = 60.0) -> Done:
        granted = f"exec {shlex.join(self._granted('bash', '-c', script))}"
        out, err, code = execute(granted, stdin.encode(), seconds, self.environment(), str(self.scratch))
        return Done(out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), code, code == -1)

    def close(self) -> None:
        for vmid in (200, 202):
            if (self.lxcpath / str(vmid) / "config").exists():
                self._lxc("stop", vmid, "-k", check=False)
        shutil.rmtree(self.root, ignore_errors=True)
