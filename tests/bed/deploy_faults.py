"""A deploy on the bed and what must hold after it went wrong: shared by the tests of deploy's faults."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bedkit.bed import Bed
from bedkit.project import Project

from dflashctl.config.hosts import HostEntry, complete
from dflashctl.config.resolve import read_recipe
from dflashctl.releases import deploy as runs
from dflashctl.releases.deploy import read_source
from dflashctl.remote.factory import open_engine

CODE = "/workspace/code"

# exit codes
UNREACHABLE, VERIFICATION, NOT_FOUND, LOCKED, CONTAINER_DOWN = 3, 4, 6, 8, 12


class Case:
    """A project with a deployed release, a change on the way, and the look afterwards.

    Staging lies in a folder of this case, so that beds beside this one do not matter.
    """

    def __init__(self, bed: Bed, folder: Path, **entry: Any) -> None:
        self.bed = bed
        self.staging = bed.layout.home / "staging"
        bed.on_host(["mkdir", "-p", "-m", "755", str(self.staging)])
        self.entry = bed.host_entry("main", **{"staging_dir": str(self.staging), **entry})
        self.code = str(self.entry["code_root"])
        self.project = Project(folder, {"bed": self.entry})
        self.project.write_recipe("steady")
        self.number = 0
        self.deploy()
        self.before = self.current()

    def deploy(self) -> None:
        """One that is meant to go well, straight to the bed, without a command line's start-up."""
        recipe = read_recipe(self.project.folder / "recipes" / "steady.yaml")
        host = complete("bed", HostEntry.model_validate(self.entry))
        with open_engine(host) as engine:
            runs.deploy(engine, read_source(recipe), wait_s=60)

    def change(self, noise: int = 200_000) -> None:
        """A changed line, and some content that gzip does not shrink."""
        self.number += 1
        (self.project.folder / "jobs" / "job.sh").write_text(f"# change {self.number}\n")
        data = random.Random(self.number).randbytes(noise)
        (self.project.folder / "jobs" / "noise.bin").write_bytes(data)

    def through(self, port: int) -> None:
        """Go through a proxy from now on."""
        entry = {**self.entry, "ssh": {**self.entry["ssh"], "port": port}}
        self.project.write_hosts({"bed": entry})

    def directly(self) -> None:
        self.project.write_hosts({"bed": self.entry})

    def current(self) -> str:
        done = self.bed.inside("main", ["readlink", f"{self.code}/current"], check=False)
        return done.stdout.decode().strip().rpartition("/")[2]

    def litter(self) -> list[str]:
        """What a deploy left behind: on the host (staging, a lock), inside (beside the lasting names)."""
        found = self.bed.on_host(["ls", "-A", str(self.staging)]).stdout.decode().split()
        locks = f"ls -A /run/dflashctl 2>/dev/null | grep '^ct{self.bed.ids['main']}-' || true"
        found += self.bed.on_host(["sh", "-c", locks]).stdout.decode().split()
        lasting = "-e releases -e current -e .lock -e history.jsonl"
        script = (
            f"cd {self.code} && ls -A | grep -v -x {lasting}; ls -A releases | grep -v -x '[0-9a-f]*'; true"
        )
        return found + self.bed.inside("main", ["sh", "-c", script]).stdout.decode().split()

    def wrong(self) -> list[str]:
        """Releases whose name is not the hash of what they hold."""
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); from dflashctl.agent.releases import release as r\n"
            "root = sys.argv[2]\n"
            "for n in r.list_releases(root):\n"
            "    m = r.read_manifest(root, n).value\n"
            "    bad = m is None or r.release_hash(m['files']) != n\n"
            "    bad = bad or r.differences(r.release_path(root, n), m['files'])\n"
            "    print(n) if bad else None\n"
        )
        repository = str(Path(__file__).parents[2])
        root = self.bed.layout.rootfs(self.bed.ids["main"])
        script = ["python3", "-I", "-c", code, repository, f"{root}{self.code}"]
        return self.bed.on_host(script).stdout.decode().split()

    def unharmed(self, *, within_s: float = 90.0, switched: bool | None = False) -> None:
        """The old release is current (or, where `switched` may be either, a whole one), nothing is left over,
        and the next deploy goes through."""
        end = time.monotonic() + within_s
        while left := self.litter():
            assert time.monotonic() < end, f"left behind: {left}"
            time.sleep(0.1)
        if switched is False:
            assert self.current() == self.before
        assert self.wrong() == []
        self.directly()
        self.deploy()
        assert self.current() not in ("", self.before)
        assert self.litter() == []
        self.before = self.current()

    def refused(self, code: int | tuple[int, ...], *words: str, timeout: float = 90, **env: str) -> str:
        """Deploy; it must end with this code and one message that says what to do. Returns it."""
        done = self.project.run("deploy", *words, timeout=timeout, **env)
        codes = code if isinstance(code, tuple) else (code,)
        assert done.returncode in codes, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stdout + done.stderr
        assert done.stderr.count("error:") == 1 and "next:" in done.stderr, done.stderr
        return done.stderr

    def interrupted_at(self, look: Callable[[], object], within_s: float = 90.0) -> tuple[int, str]:
        """Deploy, and press Ctrl-C as soon as `look` is true. Returns (exit code, stderr)."""
        process = subprocess.Popen(
            self.project.argv("deploy"),
            cwd=self.project.folder,
            env=self.project.env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            end = time.monotonic() + within_s
            while not look() and process.poll() is None:
                assert time.monotonic() < end, "the moment never came"
                time.sleep(0.005)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        return process.returncode, said


@contextmanager
def host_script(bed: Bed, name: str, text: str) -> Iterator[None]:
    """Another program `name` in front on the host's PATH; `$REAL` is the one that it replaces."""
    path = bed.layout.bin / name
    real = path.with_name(f"{name}.real")
    path.rename(real)
    try:
        path.write_text(f"#!/bin/sh\nREAL={real}\n{text}\n")
        path.chmod(0o755)
        yield
    finally:
        real.replace(path)


@contextmanager
def config_lock(bed: Bed, seconds: float) -> Iterator[None]:
    """Somebody (a backup, say) holds the container's configuration lock for so long."""
    path = f"/run/lock/lxc/pve-config-{bed.ids['main']}.lock"
    enter = ["nsenter", "-t", str(bed.pid), "--mount", "--pid", "--"]
    holder = subprocess.Popen(
        [*enter, "flock", path, "sh", "-c", f"echo held; sleep {seconds}"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        yield
    finally:
        os.killpg(holder.pid, signal.SIGKILL)  # flock's child holds the lock, too
        holder.wait(10)
        holder.stdout.close()


def staged(case: Case) -> list[Path]:
    """The staging folders, looked at without a command of their own."""
    return list((Path(f"/proc/{case.bed.pid}/root") / str(case.staging).lstrip("/")).glob("*/archive"))
