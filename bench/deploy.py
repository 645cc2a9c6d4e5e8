"""How fast deploys are, beside the ways that they replace, in one run on the bed (root; docs/performance.md).

    python bench/deploy.py [--files 200] [--paste-files 200] [--ansible PROGRAM] [--ansible-files 10]
                           [--big-mb 1000]

Prints the ratios and, as its last line, one JSON object. The bed's `pct` takes 0.7 s to start, as the real
one does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "bed")]

import paramiko  # noqa: E402
import yaml  # noqa: E402
from bedkit.bed import Bed  # noqa: E402
from bedkit.project import Project  # noqa: E402

from dflashctl.config.hosts import HostEntry, complete  # noqa: E402
from dflashctl.config.resolve import read_recipe  # noqa: E402
from dflashctl.releases import deploy as runs  # noqa: E402
from dflashctl.remote.factory import open_engine  # noqa: E402

PCT_START_S = 0.7
FILE_BYTES = 10_000
BIG_ROUNDS = 3
"""Put and deploy take turns, so that both meet the same machine; medians count."""

Result = dict[str, Any]


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def slow_pct(bed: Bed) -> None:
    """Let the stand-in's start take as long as that of the real one."""
    path = bed.layout.pct / "pct.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "startup_delay_s": PCT_START_S}))


def openssl_inside(bed: Bed) -> None:
    """Give the smallest of all Debians the libcrypto that every real container has: without it Python hashes
    at a sixth of the speed."""
    import _hashlib

    linked = subprocess.run(["ldd", _hashlib.__file__], capture_output=True, text=True, check=True).stdout
    for line in linked.splitlines():
        words = line.split()
        if len(words) > 2 and words[0].startswith(("libcrypto", "libssl")):
            put = ["sh", "-c", f"mkdir -p {Path(words[2]).parent} && cat > {words[2]}"]
            bed.inside("main", put, input=Path(words[2]).read_bytes())


class Bench:
    """A bed, and a project whose recipe `files` has the many files, `big` the one large one."""

    def __init__(self, bed: Bed, folder: Path, files: int) -> None:
        self.bed = bed
        self.entry = bed.host_entry("main", code_root="/workspace/bench")
        self.project = Project(folder, {"bed": self.entry})
        self.sources = [folder / "many" / f"part{number:03}.py" for number in range(files)]
        (folder / "many").mkdir()
        for number, path in enumerate(self.sources):
            path.write_text(source_text(number))
        self.recipe("files", "many/**")
        self.recipe("big", "weights.bin")

    def recipe(self, name: str, include: str) -> None:
        document = {
            "version": 1,
            "name": name,
            "deploy": {"include": [include]},
            "launch": {"command": ["python", "-V"]},
        }
        (self.project.folder / "recipes" / f"{name}.yaml").write_text(yaml.safe_dump(document))

    def deploy(self, recipe: str) -> float:
        """Seconds of the whole command, its start included."""
        return timed(lambda: self.project.ok("deploy", "-r", recipe, timeout=600))

    def sessions(self, recipe: str) -> int:
        """ssh sessions of one deploy: each is one exec or one sftp."""
        opened = 0
        real = paramiko.Transport.open_session

        def counting(transport: paramiko.Transport, *args: Any, **more: Any) -> Any:
            nonlocal opened
            opened += 1
            return real(transport, *args, **more)

        paramiko.Transport.open_session = counting  # type: ignore[method-assign]
        try:
            source = runs.read_source(read_recipe(self.project.folder / "recipes" / f"{recipe}.yaml"))
            with open_engine(complete("bed", HostEntry.model_validate(self.entry))) as engine:
                runs.deploy(engine, source)
        finally:
            paramiko.Transport.open_session = real  # type: ignore[method-assign]
        return opened

    # -- the ways that it replaces
    # --------------------------------------------------------------------------------

    def openssh(self, program: str) -> list[str]:
        bed = self.bed
        options = ["-F", "none", "-i", str(bed.key), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"]
        options += ["-o", f"UserKnownHostsFile={bed.known_hosts}"]
        return [program, "-q", *options, "-P" if program == "scp" else "-p", str(bed.port)]

    def paste(self, sources: Sequence[Path]) -> float:
        """By hand: scp to the host, pct push into the container, pct exec to compile it there; per file."""
        vmid, python = str(self.bed.ids["main"]), self.entry["python"]
        self.bed.inside("main", ["mkdir", "-p", "/workspace/paste"])

        def one(path: Path) -> None:
            there, inside = f"{self.bed.layout.home}/{path.name}", f"/workspace/paste/{path.name}"
            check(*self.openssh("scp"), str(path), f"root@127.0.0.1:{there}")
            check(*self.openssh("ssh"), "root@127.0.0.1", f"pct push {vmid} {there} {inside}")
            command = f"pct exec {vmid} -- {python} -m py_compile {inside}"
            check(*self.openssh("ssh"), "root@127.0.0.1", command)

        return timed(lambda: [one(path) for path in sources])

    def ansible(self, program: str, sources: Sequence[Path]) -> float | str:
        """community.proxmox's connection plugin and the copy module. A text says why it did not run."""
        folder = self.project.folder / "ansible"
        (folder / "src").mkdir(parents=True)
        for path in sources:
            shutil.copy(path, folder / "src")
        bed = self.bed
        # The plugin calls /usr/sbin/pct: show the bed's stand-in there, in the bed's own namespace.
        over = f"mount -t overlay none -o lowerdir={bed.layout.bin}:/usr/sbin /usr/sbin"
        bed.on_host(["sh", "-c", over])
        (folder / "inventory.yaml").write_text(
            yaml.safe_dump(
                {
                    "all": {
                        "hosts": {
                            "ct": {
                                "ansible_host": "127.0.0.1",
                                "ansible_port": bed.port,
                                "ansible_user": "root",
                                "ansible_connection": "community.proxmox.proxmox_pct_remote",
                                "ansible_private_key_file": str(bed.key),
                                "ansible_paramiko_host_key_checking": False,
                                "ansible_python_interpreter": self.entry["python"],
                                "proxmox_vmid": bed.ids["main"],
                            }
                        }
                    }
                }
            )
        )
        play = [
            {
                "hosts": "ct",
                "gather_facts": False,
                "tasks": [{"ansible.builtin.copy": {"src": f"{folder}/src/", "dest": "/workspace/ansible/"}}],
            }
        ]
        (folder / "play.yaml").write_text(yaml.safe_dump(play))
        env = {**os.environ, "ANSIBLE_HOST_KEY_CHECKING": "False", "HOME": str(self.project.home)}
        env |= {"ANSIBLE_LOCAL_TEMP": str(folder / "tmp"), "LC_ALL": "C.UTF-8"}
        env["ANSIBLE_PARAMIKO_PTY"] = "False"  # the bed's sshd has no terminals to give
        began = time.perf_counter()
        done = subprocess.run(
            [program, "-i", str(folder / "inventory.yaml"), str(folder / "play.yaml")],
            capture_output=True,
            text=True,
            env=env,
            timeout=1200,
        )
        took = time.perf_counter() - began
        if done.returncode != 0:
            return f"failed: {(done.stdout + done.stderr).strip()[-600:]}"
        there = bed.inside("main", ["sh", "-c", "ls /workspace/ansible | wc -l"]).stdout
        return took if int(there) == len(sources) else f"copied {int(there)} of {len(sources)} files"

    def sftp_put(self, path: Path) -> float:
        """A bare paramiko sftp put to the host, and no more."""
        bed = self.bed
        client = paramiko.SSHClient()
        client.load_host_keys(str(bed.known_hosts))
        client.connect("127.0.0.1", bed.port, "root", key_filename=str(bed.key))
        try:
            with client.open_sftp() as sftp:
                target = f"/var/tmp/{bed.dir.name}.put"
                took = timed(lambda: sftp.put(str(path), target))
                sftp.remove(target)
                return took
        finally:
            client.close()


def check(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=60, stdin=subprocess.DEVNULL, capture_output=True)


def source_text(number: int) -> str:
    """A Python file of FILE_BYTES bytes that does not shrink to nothing."""
    rng = random.Random(number)
    lines = [f"# part {number}"]
    while sum(len(line) + 1 for line in lines) < FILE_BYTES - 60:
        lines.append(f"x{len(lines)} = {rng.getrandbits(160):#x}")
    text = "\n".join(lines) + "\n"
    return text + "#" * (FILE_BYTES - len(text) - 1) + "\n"


@contextmanager
def a_bed() -> Iterator[Bed]:
    bed = Bed()
    try:
        slow_pct(bed)
        openssl_inside(bed)
        yield bed
    finally:
        bed.close()


def many_files(bench: Bench, options: argparse.Namespace) -> Result:
    first = bench.deploy("files")
    same = bench.deploy("files")
    same_sessions = bench.sessions("files")
    bench.sources[7].write_text(source_text(7_007))
    one = bench.deploy("files")
    bench.sources[8].write_text(source_text(8_008))
    one_sessions = bench.sessions("files")
    some = bench.sources[: options.paste_files]
    paste = bench.paste(some) / len(some) * len(bench.sources)
    found: Result = {
        "files": len(bench.sources),
        "first_s": first,
        "paste_s": paste,
        "paste_measured_files": len(some),
        "paste_ratio": paste / first,
        "same_s": same,
        "same_remote_commands": same_sessions,
        "one_file_s": one,
        "one_file_remote_commands": one_sessions,
    }
    if options.ansible:
        few = bench.sources[: options.ansible_files]
        took = bench.ansible(options.ansible, few)
        if isinstance(took, str):
            return found | {"ansible": took}
        scaled = took / len(few) * len(bench.sources)
        found |= {"ansible_s": scaled, "ansible_measured_files": len(few), "ansible_ratio": scaled / first}
    else:
        found["ansible"] = "not installed: pip install ansible, then --ansible PATH/ansible-playbook"
    return found


def big_file(bench: Bench, megabytes: int) -> Result:
    path = bench.project.folder / "weights.bin"
    with path.open("wb") as file:
        for number in range(megabytes):
            file.write(random.Random(number).randbytes(1_000_000))
    os.sync()  # its own way to the disk is nobody's to pay
    puts, deploys = [], []
    for _ in range(BIG_ROUNDS):
        puts.append(bench.sftp_put(path))
        bench.bed.inside("main", ["rm", "-rf", str(bench.entry["code_root"])])
        deploys.append(bench.deploy("big"))
    put, took = statistics.median(puts), statistics.median(deploys)
    return {
        "big_mb": megabytes,
        "big_s": took,
        "big_s_all": [round(each, 2) for each in deploys],
        "big_mb_per_s": megabytes / took,
        "sftp_put_s_all": [round(each, 2) for each in puts],
        "sftp_put_mb_per_s": megabytes / put,
        "big_share_of_sftp": put / took,
        # of every program that the benchmark has started
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }


def report(found: Result) -> Iterator[str]:
    files, first = found["files"], found["first_s"]
    yield f"{files} files of {FILE_BYTES // 1000} kB, pct start-up {PCT_START_S} s:"
    yield f"  deploy, everything new      {first:8.1f} s"
    for name, key in (("scp + pct push + pct exec", "paste"), ("Ansible's copy", "ansible")):
        if f"{key}_s" not in found:
            yield f"  {name:<28}did not run: {found[key]}"
            continue
        measured = found[f"{key}_measured_files"]
        note = "" if measured == files else f", from {measured} files"
        yield f"  {name:<28}{found[f'{key}_s']:8.1f} s{note}: {found[f'{key}_ratio']:.0f} times as long"
    for name, key in (("deploy, nothing new", "same"), ("deploy, one file new", "one_file")):
        commands = found[f"{key}_remote_commands"]
        yield f"  {name:<28}{found[f'{key}_s']:8.1f} s, {commands} remote commands"
    if "big_s" in found:
        yield (
            f"{found['big_mb']} MB: deploy {found['big_mb_per_s']:.0f} MB/s, bare sftp put"
            f" {found['sftp_put_mb_per_s']:.0f} MB/s: {found['big_share_of_sftp']:.0%};"
            f" peak memory {found['peak_rss_mib']:.0f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast deploys are")
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--paste-files", type=int, default=200)
    parser.add_argument("--ansible", default=shutil.which("ansible-playbook"))
    parser.add_argument("--ansible-files", type=int, default=10)
    parser.add_argument("--big-mb", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as folder, a_bed() as bed:
        bench = Bench(bed, Path(folder) / "project", options.files)
        found = {"bench": "deploy", "pct_start_s": PCT_START_S, **many_files(bench, options)}
        if options.big_mb:
            found |= big_file(bench, options.big_mb)
    for line in report(found):
        print(line)
    print(json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in found.items()}))


if __name__ == "__main__":
    main()
