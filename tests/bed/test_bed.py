"""The bed is what it claims to be: real ssh, real containers, GPUs with an independent truth, and back to new
between tests. These hold without dflashctl."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bedkit import need
from bedkit.bed import Bed
from bedkit.ground import cgroup_roots, sweep
from proxy import Proxy

pytestmark = pytest.mark.bed


@pytest.mark.alone
def test_a_warm_start_takes_seconds(bed: Bed) -> None:
    """The caches are warm here: this worker's own bed has just been started."""
    began = time.monotonic()
    other = Bed()
    try:
        took = time.monotonic() - began
        assert set(other.ids.values()).isdisjoint(bed.ids.values()), "two beds share no container id"
        assert other.port != bed.port and other.gpu_memory() == [0, 0, 0, 0, 4, 0, 0, 0]
    finally:
        top, pid = other.dir, other.pid
        other.close()
    assert took < 10, f"a warm bed took {took:.1f} s"
    assert not top.exists() and not Path(f"/proc/{pid}").exists()


def test_a_bed_whose_owner_is_killed_leaves_no_process(bed: Bed) -> None:
    code = (
        "import sys, time; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "from bedkit.bed import Bed; b = Bed(); print(b.pid, b.dir, flush=True); time.sleep(60)"
    )
    here = Path(__file__).parent
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(here), str(here.parents[1])], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, top = owner.stdout.readline().split()
    owner.kill()
    owner.wait(60)
    owner.stdout.close()
    end = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "the bed's first process outlived its owner"
        time.sleep(0.05)
    mounts = Path("/proc/self/mounts").read_text()
    assert top not in mounts, "all mounts were in the bed's own namespace"
    assert Path(top).exists() and bed.dir.exists()
    sweep(Path(top).parent)
    assert not Path(top).exists() and bed.dir.exists(), (
        "the next bed takes its folder away, and nobody else's"
    )


def test_ssh_is_openssh_and_logs_in_root_and_operator(bed: Bed) -> None:
    done = bed.ssh('id -un; hostname; command -v nvidia-smi pct; printf "%s" "$SSH_CONNECTION"')
    assert done.returncode == 0
    name, host, smi, pct, connection = done.stdout.decode().split("\n")
    assert (name, host) == ("root", "pve1") and connection.startswith("127.0.0.1 ")
    assert smi.startswith(str(bed.layout.bin)) and pct.startswith(str(bed.layout.bin))
    assert bed.ssh("id -un", user="operator").stdout == b"operator\n"
    with socket.create_connection(("127.0.0.1", bed.port), 30) as s:
        assert s.recv(64).startswith(b"SSH-2.0-OpenSSH_")


def test_a_wrong_host_key_is_refused_by_openssh_too(bed: Bed) -> None:
    kind, _ = (bed.layout.ssh / "host_key.pub").read_text().split()[:2]
    other = (bed.layout.ssh / "user_key.pub").read_text().split()[1]
    bed.known_hosts.write_text(f"[127.0.0.1]:{bed.port} {kind} {other}\n")
    done = bed.ssh("true")
    assert done.returncode == 255 and b"HOST IDENTIFICATION HAS CHANGED" in done.stderr


@pytest.mark.parametrize(
    ("role", "system", "mapped"),
    [("main", None, True), ("newer", "trixie", False), ("bare", "bookworm", True)],
)
def test_containers_are_real(bed: Bed, role: str, system: str | None, mapped: bool) -> None:
    script = "cat /proc/self/uid_map; echo; cat /etc/os-release; id -u; readlink /proc/self/ns/pid; hostname"
    text = bed.inside(role, ["sh", "-c", script]).stdout.decode()
    base = "100000" if mapped else "0"
    assert text.split()[:2] == ["0", base]
    assert system is None or f"VERSION_CODENAME={system}" in text
    assert text.split("\n")[-2] == f"bed-{role}"
    assert bed.on_host(["readlink", "/proc/self/ns/pid"]).stdout.decode().strip() not in text


def test_each_container_has_the_python_it_should(bed: Bed) -> None:
    laptop = bed.inside("main", [sys.executable, "-c", "import sys, pydantic; print(sys.version)"])
    assert laptop.stdout.decode().strip() == sys.version
    newer = bed.inside("newer", ["/usr/bin/python3", "-c", "import sys; print(sys.version_info[:2])"])
    assert newer.stdout == b"(3, 13)\n"
    assert bed.inside("bare", ["sh", "-c", "command -v python3 python perl6"], check=False).stdout == b""
    write = bed.inside("main", ["touch", f"{sys.prefix}/x"], check=False)
    assert write.returncode != 0 and b"Read-only" in write.stderr


def test_gpus_are_one_truth_on_host_and_inside_with_host_pids(bed: Bed) -> None:
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    on_host = bed.on_host(query).stdout
    assert on_host.count(b"\n") == 8
    for role in ("main", "newer", "bare"):
        assert bed.inside(role, query).stdout == on_host
    hold = "exec 9<>/dev/nvidia3; echo $$; exec sleep 60"
    attach = ["nsenter", "-t", str(bed.pid), "--mount", "--pid", "--uts", "--", "lxc-attach"]
    attach += ["-P", str(bed.layout.lxc), "-n", str(bed.ids["bare"]), "--", "sh", "-c", hold]
    holder = subprocess.Popen(attach, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        inner = int(holder.stdout.readline())
        [(pid, uuid)] = bed.gpu_holders()
        assert f"3, {uuid}\n".encode() in on_host
        status = bed.on_host(["cat", f"/proc/{pid}/status"]).stdout.decode()
        [pids] = [line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")]
        assert pids == [str(pid), str(inner)]
        assert f"/lxc/{bed.ids['bare']}" in bed.on_host(["cat", f"/proc/{pid}/cgroup"]).stdout.decode()
        apps = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        assert bed.inside("bare", apps).stdout == f"{pid}\n".encode()
        assert bed.gpu_memory()[3] == 518
    finally:
        holder.kill()
        holder.wait(10)
        if holder.stdout is not None:
            holder.stdout.close()
    bed.reset()
    assert bed.gpu_memory() == [0, 0, 0, 0, 4, 0, 0, 0]


def test_a_container_can_lose_its_gpus_while_the_host_is_fine(bed: Bed) -> None:
    def lose(box: object) -> None:
        box.mode, box.mode_at = "unknown", "container"  # type: ignore[attr-defined]

    bed.gpus(lose)
    inside = bed.inside("main", ["nvidia-smi", "-L"], check=False)
    assert (inside.returncode, inside.stdout) == (255, b"Failed to initialize NVML: Unknown Error\n")
    assert bed.on_host(["nvidia-smi", "-L"]).stdout.count(b"\n") == 8


def test_frozen_stopped_and_back(bed: Bed) -> None:
    assert {role: bed.state(role) for role in bed.ids} == {
        "main": "RUNNING",
        "newer": "RUNNING",
        "bare": "RUNNING",
        "stopped": "STOPPED",
    }
    bed.freeze("bare")
    assert bed.state("bare") == "FROZEN"
    with pytest.raises(subprocess.TimeoutExpired):
        bed.inside("bare", ["true"], timeout=0.7)
    bed.stop("newer")
    bed.reset()
    assert bed.state("bare") == bed.state("newer") == "RUNNING" and bed.state("stopped") == "STOPPED"


def test_a_small_disk_and_a_shared_inode(bed: Bed) -> None:
    full = bed.inside("main", ["sh", "-c", "head -c 9000000 /dev/zero > /srv/small/x"], check=False)
    assert full.returncode != 0 and b"No space left" in full.stderr
    (bed.layout.shared / "f").write_text("one")
    assert bed.inside("main", ["cat", "/srv/host/f"]).stdout == b"one"
    inner = bed.inside("main", ["stat", "-c", "%i", "/srv/host/f"]).stdout
    assert int(inner) == (bed.layout.shared / "f").stat().st_ino


def test_reset_leaves_nothing(bed: Bed) -> None:
    start = "touch /workspace/left /workspace/.hidden; setsid sleep 300 >/dev/null 2>&1 </dev/null &"
    bed.inside("main", ["sh", "-c", start])
    bed.gpus(lambda box: setattr(box, "mode", "hang"))
    bed.reset()
    assert bed.inside("main", ["ls", "-A", "/workspace"]).stdout == b""
    names = bed.inside("main", ["sh", "-c", "cat /proc/[0-9]*/comm"]).stdout.split()
    assert names.count(b"sleep") == 1, "only the first process's own"
    assert bed.on_host(["nvidia-smi", "-L"]).returncode == 0


def test_the_proxied_line_reaches_the_same_sshd(bed: Bed, proxied: Proxy) -> None:
    argv = ["ssh", "-F", "none", "-p", str(proxied.port), "-i", str(bed.key), "-o", "IdentitiesOnly=yes"]
    argv += [
        "-o",
        f"UserKnownHostsFile={bed.known_hosts}",
        "-o",
        "BatchMode=yes",
        "root@127.0.0.1",
        "hostname",
    ]
    done = subprocess.run(argv, capture_output=True, timeout=90, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (0, b"pve1\n")
    proxied.cut_after(proxied.moved("down") // 2, "down")
    assert subprocess.run(argv, capture_output=True, timeout=90, stdin=subprocess.DEVNULL).returncode == 255


def test_pct_can_be_slow_and_old(bed: Bed) -> None:
    assert bed.ssh(f"pct status {bed.ids['main']}").stdout == b"status: running\n"
    bed.pct(startup_delay_s=0.7, pve=7)
    began = time.monotonic()
    old = bed.ssh(f"pct exec {bed.ids['main']} --keep-env=0 -- true")
    assert time.monotonic() - began >= 0.7
    assert old.returncode != 0 and b"keep-env" in old.stderr, "an option that Proxmox 7 did not know"
    bed.reset()
    assert bed.ssh(f"pct exec {bed.ids['main']} --keep-env=0 -- true").returncode == 0


def test_what_a_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in (need.reason_against() or "")
    monkeypatch.undo()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    reason = need.reason_against() or ""
    assert reason.startswith("missing packages: lxc ") and "lxc" in need.HOW


@pytest.mark.usefixtures("bed_session")  # says it loudly where there can be no bed
def test_a_bed_with_a_frozen_container_leaves_nothing() -> None:
    """What is frozen does not take the signal that ends it, and its control groups stay with it."""
    other = Bed()
    try:
        other.freeze("main")
        left = [root / "lxc" / str(other.ids["main"]) for root in cgroup_roots()]
        left = [folder for folder in left if folder.is_dir()]
        assert left
    finally:
        other.close()
    assert not [folder for folder in left if folder.exists()]
