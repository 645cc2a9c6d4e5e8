"""Containers of plain namespaces, as the embedded lab has them. No root: this place is a "host" in namespaces
of its own, whose pid 1 runs what it is asked to; when it goes, the kernel ends everything in it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dflashctl.lab.rootfs import Step, to_json
from pctkit import skeleton
from pctkit.place import REPOSITORY, StandIn
from pctkit.table import Done

_SERVER = Path(__file__).with_name("hostns.py")


def reason_against() -> str:
    """Why user namespaces cannot be used here; "" when they can."""
    probe = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from dflashctl.lab import ns; ns.enter()"
    done = subprocess.run([sys.executable, "-I", "-c", probe], capture_output=True, text=True, timeout=30)
    return "" if done.returncode == 0 else f"user namespaces are refused: {done.stderr.splitlines()[-1:]}"


class Userns(StandIn):
    name = "userns"

    def __init__(self) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="dflashctl-pct-")))
        for verb in ("freeze", "thaw"):
            self.names[verb] = self._freezer(200, verb)
        try:
            for vmid in (200, 202):
                self._describe(vmid)
            settings = {"backend": "userns", "hostname": "stopped"}
            (self.state / "ns" / "201.json").write_text(json.dumps(settings))
            self._host = subprocess.Popen(
                [sys.executable, "-I", str(_SERVER), str(REPOSITORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
            )
        except BaseException:
            shutil.rmtree(self.root, ignore_errors=True)
            raise

    def _describe(self, vmid: int) -> None:
        root = self.root / "rootfs" / str(vmid)
        root.mkdir(parents=True)
        bound = skeleton.build(root, f"ct{vmid}")
        python = Path(sys.executable).resolve()
        # Python's own folder, at its own path: the container's first process is written in it.
        prefix = str(Path(sys.base_prefix).resolve())
        if not prefix.startswith("/usr"):
            bound.append(prefix)
        steps = [Step("dir", str(self.home))]
        steps += [Step("bind", path, path, read_only=True) for path in bound if path != "/sbin"]
        steps += _sbin_steps(root / "sbin", "/sbin" in bound)
        steps += [Step("tmpfs", "/dev")]
        steps += [
            Step("bind", f"/dev/{name}", f"/dev/{name}") for name in ("null", "zero", "full", "urandom")
        ]
        steps += [Step("link", "/dev/fd", "/proc/self/fd"), Step("proc", "/proc")]
        steps += [Step("bind", "/sys", "/sys", read_only=True, optional=True)]
        spec: dict[str, Any] = {
            "backend": "userns",
            "hostname": f"ct{vmid}",
            "rootfs": str(root),
            "steps": to_json(steps),
            "init_python": str(python),
        }
        (self.state / "ns" / f"{vmid}.json").write_text(json.dumps(spec))

    def _freezer(self, vmid: int, verb: str) -> str:
        module = f"{sys.executable} -m dflashctl.lab.pct.outside {self.state} {vmid} {verb}"
        return f"(cd {REPOSITORY} && {module})"

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._host.stdin is not None and self._host.stdout is not None
        self._host.stdin.write(json.dumps(request).encode() + b"\n")
        self._host.stdin.flush()
        line = self._host.stdout.readline()
        if not line:
            raise RuntimeError(f"the host in namespaces ended with exit code {self._host.wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, script: str, stdin: str = "", seconds: float = 60.0) -> Done:
        answer = self._ask(
            {
                "script": script,
                "stdin": base64.b64encode(stdin.encode()).decode(),
                "seconds": seconds,
                "env": self.environment(),
                "folder": str(self.scratch),
            }
        )
        out, err = (base64.b64decode(answer[name]).decode("utf-8", "replace") for name in ("out", "err"))
        return Done(out, err, answer["code"], answer["code"] == -1)

    def revive(self, vmid: int) -> None:
        clean = "cd /root && rm -rf -- * && rm -f /rel_name"
        script = (
            f"if [ -e {self.state}/ns/{vmid}.frozen ]; then {self._freezer(vmid, 'thaw')} || exit 1; fi\n"
            f"pct status {vmid} | grep -q running || pct start {vmid} || exit 1\n"
            f"pct exec {vmid} -- /bin/sh -c '{clean}'"
        )
        done = self.run(script)
        if done.exit != 0:
            raise RuntimeError(f"container {vmid} is not ready: {done.stdout}{done.stderr}")

    def close(self) -> None:
        assert self._host.stdin is not None
        self._host.stdin.close()
        try:
            self._host.wait(20)
        finally:
            self._host.kill()
            self._host.wait()
            shutil.rmtree(self.root, ignore_errors=True)


def _sbin_steps(sbin: Path, folder: bool) -> list[Step]:
    """/sbin as a folder of links, so that the lab's own first program can be in it: /sbin/init."""
    steps = []
    if folder:
        programs = "/opt/sbin"
        steps.append(Step("bind", programs, "/sbin", read_only=True))
    else:
        programs = os.path.normpath(f"/{sbin.readlink()}")
        sbin.unlink()
    init = str(REPOSITORY / "dflashctl" / "lab" / "init.py")
    return [
        *steps,
        Step("tmpfs", "/sbin"),
        Step("links", "/sbin", programs),
        Step("bind", "/sbin/init", init, read_only=True),
    ]
