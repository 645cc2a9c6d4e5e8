"""What a container of the lab is: its own processes, its own disk, and of the machine only what it needs."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_client import REPOSITORY, enter, enter_command, on_host, ssh

from dflashctl.agent.processes import kin, proc
from dflashctl.lab import lifecycle, python_view
from dflashctl.lab.state import LabPaths, Record

pytestmark = pytest.mark.lab


def lines(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().splitlines()


@pytest.fixture
def outsider() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the person's, outside the lab."""
    process = subprocess.Popen(["sleep", "300.125"])
    yield process
    process.kill()
    process.wait()


# --- isolation ----------------------------------------------------------------------------------------


def test_the_persons_processes_are_not_seen(lab: Record, outsider: subprocess.Popen[bytes]) -> None:
    processes = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; echo; ls /proc | grep -c '^[0-9]'"
    script = f"{processes}; readlink /proc/self/ns/pid"
    for where in (enter(lab.endpoint, script), ssh(lab.endpoint, script)):
        shown, count, namespace = lines(where)
        assert "300.125" not in shown
        assert int(count) < 20
        assert namespace != str(Path("/proc/self/ns/pid").readlink())
        assert outsider.poll() is None


def test_a_container_does_not_see_the_hosts_processes(lab: Record) -> None:
    ssh(lab.endpoint, "sleep 20.375 </dev/null >/dev/null 2>&1 &")
    assert "20.375" in ssh(lab.endpoint, "cat /proc/[0-9]*/cmdline").stdout.decode()
    assert "20.375" not in enter(lab.endpoint, "cat /proc/[0-9]*/cmdline").stdout.decode()


def test_every_namespace_but_the_network_is_its_own(lab: Record) -> None:
    kinds = ("user", "mnt", "pid", "uts", "ipc")
    script = "for k in user mnt pid uts ipc net; do readlink /proc/self/ns/$k; done"
    container, host = lines(enter(lab.endpoint, script)), lines(ssh(lab.endpoint, script))
    mine = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in (*kinds, "net")]
    for n in range(len(kinds)):
        assert len({container[n], host[n], mine[n]}) == 3, kinds[n]
    assert container[-1] == host[-1] == mine[-1]


def test_nothing_of_a_home_is_seen_but_python(lab: Record) -> None:
    """Every folder above and beside the machine's Python is empty but for it."""
    shown = python_view.folders_to_show(python_view.gather())
    home = pwd.getpwuid(os.geteuid()).pw_dir
    for where in (enter, ssh):
        for folder in {str(Path(f).parent) for f in shown}:
            names = set(lines(where(lab.endpoint, f"ls -A '{folder}'")))
            allowed = {
                Path(f).relative_to(folder).parts[0]
                for f in shown
                if python_view.is_below(f, folder) and f != folder
            }
            if where is ssh:
                allowed |= {"main", "dflashctl", *Path(python_view.__file__).parts}
            if folder not in ("/opt", "/srv", "/home", "/tmp"):
                assert names <= allowed, (folder, names)
        for name in (".ssh", ".bash_history", ".gitconfig", ".local", ".cache", ".config"):
            assert where(lab.endpoint, f"test -e '{home}/{name}'").returncode != 0


def test_a_link_left_inside_leads_nowhere_outside(lab: Record, lab_paths: LabPaths) -> None:
    """The root is entered before it is filled: a container may have replaced a mount point by a link."""
    code = (
        "container.start(S, 201); container.stop(S, 201, 5)\n"
        "import os, shutil\n"
        "root = '/var/lib/lab/disk/201'\n"
        "shutil.rmtree(root + '/srv'); os.symlink('/../../../../../../var/lib/lab', root + '/srv')\n"
        "os.rmdir(root + '/opt/lab/python'); os.symlink('/workspace', root + '/opt/lab/python')\n"
        "container.start(S, 201); print(os.listdir(root + '/workspace')); container.stop(S, 201, 5)\n"
    )
    assert lines(on_host(lab.endpoint, code)) == ["[]"]
    assert not (lab_paths.node / "sitecustomize.py").exists()
    assert (lab_paths.pct / "conf").is_dir()


# --- what it shows ------------------------------------------------------------------------------------


def test_the_machines_parts_are_read_only_and_its_own_writable(lab: Record) -> None:
    for folder in ("/usr", "/etc", "/sys", "/opt/lab/python", sys.prefix, sys.base_prefix):
        done = enter(lab.endpoint, f"touch '{folder}/x' 2>&1; rm -f '{folder}/x'; touch '{folder}/x'")
        assert done.returncode != 0 and b"Read-only" in done.stderr, folder
    folders = ["/", "/root", "/workspace", "/tmp", "/run", "/var/tmp", "/opt", "/srv", "/home", "/dev/shm"]
    for folder in [*folders, lab.endpoint.home]:
        assert enter(lab.endpoint, f"echo 1 > '{folder}/x' && rm '{folder}/x'").returncode == 0, folder


def test_a_read_only_mount_cannot_be_made_writable(lab: Record) -> None:
    assert enter(lab.endpoint, "mount -o remount,bind,rw /usr && touch /usr/x").returncode != 0
    assert not Path("/usr/x").exists()


def test_names_and_hosts(lab: Record) -> None:
    code = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    script = f"hostname; cat /etc/hostname; '{lab.endpoint.python}' -I -c '{code}'"
    assert lines(enter(lab.endpoint, script)) == ["ct200", "ct200", "127.0.1.1"]


def test_devices(lab: Record) -> None:
    script = (
        "echo x > /dev/null && head -c 3 /dev/zero | wc -c && head -c 4 /dev/urandom | wc -c"
        " && ls -d /dev/nvidia[0-7] /dev/nvidiactl | wc -l && echo out > /dev/stdout"
        f" && '{lab.endpoint.python}' -I -c 'import os; print(os.ttyname(os.openpty()[1]))'"
    )
    assert lines(enter(lab.endpoint, script)) == ["3", "4", "9", "out", "/dev/pts/0"]


def test_eight_gpus_in_the_container_and_on_the_host(lab: Record) -> None:
    for where in (enter, ssh):
        for path in ("", "PATH=/sbin:/bin:/usr/sbin:/usr/bin ", "PATH=/usr/local/bin:/usr/bin:/bin:/sbin "):
            done = where(lab.endpoint, f"{path}nvidia-smi --query-gpu=index --format=csv,noheader")
            assert lines(done) == [str(n) for n in range(8)]


def test_a_holder_in_the_container_has_a_pid_of_the_host(lab: Record) -> None:
    script = "exec 9</dev/nvidia3; echo held; read x"
    argv = [*lifecycle.ssh_argv(lab.endpoint), enter_command(script)]
    holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        query = "nvidia-smi --query-compute-apps=pid,gpu_uuid --format=csv,noheader"
        (row,) = lines(ssh(lab.endpoint, query))
        pid = row.split(",")[0]
        assert "ct200" in lines(
            ssh(lab.endpoint, f"nsenter -t {pid} --user --uts --preserve-credentials hostname")
        )
    finally:
        holder.communicate(b"\n", timeout=30)
    assert lines(ssh(lab.endpoint, query)) == []


def test_the_machines_python_works_inside(lab: Record) -> None:
    code = "import sys, pytest, ctypes, ssl, sqlite3; print(sys.prefix); print(pytest.__file__)"
    done = enter(lab.endpoint, f"'{lab.endpoint.python}' -c '{code}'")
    assert lines(done) == [sys.prefix, pytest.__file__]


def test_the_start_up_hook_is_found(lab: Record) -> None:
    code = "import sitecustomize as s; print(s.__file__)"
    script = f"PYTHONPATH={lab.endpoint.env['PYTHONPATH']} '{lab.endpoint.python}' -c '{code}'"
    assert lines(enter(lab.endpoint, script)) == ["/opt/lab/python/sitecustomize.py"]


def test_the_workspace_is_a_folder_of_the_host(lab: Record, lab_paths: LabPaths) -> None:
    enter(lab.endpoint, "echo from inside > /workspace/shared")
    assert lines(ssh(lab.endpoint, "cat /tank/workspace/shared")) == ["from inside"]
    assert (lab_paths.workspace / "shared").read_text() == "from inside\n"
    (lab_paths.workspace / "shared").unlink()


def test_the_package_is_not_in_the_container(lab: Record) -> None:
    package = Path(python_view.__file__).parents[1]
    if python_view.is_below(str(package), sys.prefix):
        pytest.fail(
            "run these tests from a checkout: an installed package is in the container as it is anywhere"
        )
    assert enter(lab.endpoint, f"test -e '{package}'").returncode != 0
    assert ssh(lab.endpoint, f"test -d '{package}'").returncode == 0


# --- its life -----------------------------------------------------------------------------------------


def test_the_first_process_takes_in_orphans(lab: Record) -> None:
    script = "for i in 1 2 3; do (setsid sleep 0.1 </dev/null >/dev/null 2>&1 & echo $!); done"
    pids = lines(enter(lab.endpoint, script))
    assert len(pids) == 3
    left = "; ".join(f"test ! -e /proc/{pid} || echo {pid}" for pid in pids)
    end = time.monotonic() + 60
    while lines(enter(lab.endpoint, f"{left}; true")):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert lines(enter(lab.endpoint, "tr '\\0' ' ' < /proc/1/cmdline"))[0].endswith("-I -S /sbin/init ")


def test_start_and_stop(lab: Record, lab_paths: LabPaths) -> None:
    start = "print(container.init_pid(S, 201), container.start(S, 201), container.init_pid(S, 201))"
    stop = "print(container.stop(S, 201, 5), container.init_pid(S, 201))"
    (said,) = lines(on_host(lab.endpoint, start))
    recorded = (lab_paths.pct / "ns/201.init").read_text().split()[0]
    assert said == f"None {recorded} {recorded}"
    assert lines(enter(lab.endpoint, "hostname; echo kept > /root/file", 201)) == ["ct201"]
    done = on_host(lab.endpoint, "container.start(S, 201)")
    assert done.returncode != 0 and b"CT 201 already running" in done.stderr
    assert lines(on_host(lab.endpoint, stop)) == ["True None"]
    assert not (lab_paths.pct / "ns/201.init").exists()
    assert lines(on_host(lab.endpoint, stop)) == ["True None"]
    lines(on_host(lab.endpoint, start))
    assert lines(enter(lab.endpoint, "cat /root/file", 201)) == ["kept"]
    lines(on_host(lab.endpoint, "container.stop(S, 201, 0)"))


def test_stopping_asks_before_it_kills(lab: Record) -> None:
    code = (
        "import os, subprocess, time\n"
        "def stop(grace_s=1.0, **how):\n"
        "    t = time.monotonic(); gone = container.stop(S, 201, grace_s, **how)\n"
        "    return gone, time.monotonic() - t\n"
        "def run(script):\n"
        "    pid = container.init_pid(S, 201)\n"
        "    how = '--user --preserve-credentials --mount --pid --root --wd'.split()\n"
        "    argv = ['nsenter', '-t', str(pid), *how]\n"
        "    return subprocess.Popen([*argv, 'sh', '-c', script], stdout=subprocess.PIPE)\n"
        "container.start(S, 201)\n"
        "p = run('trap \"echo asked; exit 3\" TERM; echo on; while :; do sleep 0.05; done')\n"
        "p.stdout.readline()\n"
        "gone, took = stop(60.0); print(gone, took < 50, p.communicate()[0], p.returncode)\n"
        "container.start(S, 201)\n"
        "p = run('trap \"\" TERM; echo on; while :; do sleep 0.05; done'); p.stdout.readline()\n"
        "gone, took = stop(force=False); print(gone, took >= 1.0, p.poll())\n"
        "gone, took = stop(); print(gone, took >= 1.0, p.wait())\n"
    )
    assert lines(on_host(lab.endpoint, code)) == [
        "True True b'asked\\n' 3",
        "False True None",
        "True True -9",
    ]


def test_everything_in_a_container_ends_with_it(lab: Record) -> None:
    lines(on_host(lab.endpoint, "container.start(S, 201)"))
    enter(lab.endpoint, "for i in 1 2 3; do setsid sleep 300.625 </dev/null >/dev/null 2>&1 & done", 201)
    assert ssh(lab.endpoint, "cat /proc/[0-9]*/cmdline").stdout.count(b"300.625") == 3
    lines(on_host(lab.endpoint, "container.stop(S, 201, 0)"))
    assert ssh(lab.endpoint, "cat /proc/[0-9]*/cmdline").stdout.count(b"300.625") == 0


def test_a_recycled_pid_is_no_container(lab: Record, lab_paths: LabPaths) -> None:
    file = lab_paths.pct / "ns/201.init"
    for text in ("1 1\n", "99999999 5\n", "x\n", "", "1\n"):
        file.write_text(text)
        assert lines(
            on_host(lab.endpoint, "print(container.init_pid(S, 201), container.stop(S, 201, 0))")
        ) == ["None True"]
    assert ssh(lab.endpoint, "echo well").stdout == b"well\n"


def test_a_container_that_cannot_start_leaves_nothing(lab: Record, lab_paths: LabPaths) -> None:
    spec = lab_paths.pct / "ns/201.json"
    good = spec.read_text()
    try:
        spec.write_text(good.replace('"/usr"', '"/no/such/folder"'))
        done = on_host(lab.endpoint, "container.start(S, 201)")
        assert done.returncode != 0 and b"CT 201 cannot start: mount bind" in done.stderr, done.stderr
        spec.write_text("{")
        assert b"cannot read" in on_host(lab.endpoint, "container.start(S, 201)").stderr
        spec.write_text('{"backend": "lxc"}')
        assert b"backend 'lxc'" in on_host(lab.endpoint, "container.start(S, 201)").stderr
    finally:
        spec.write_text(good)
    assert not (lab_paths.pct / "ns/201.init").exists()
    processes = proc.table()
    below = kin.descendants([lab.pid], processes)
    assert [processes[p].comm for p in below if "201" in " ".join(proc.cmdline(p))] == []


# --- other machines ---------------------------------------------------------------------------------------

OTHER_MACHINE = """
mkdir etc layers && mount -t tmpfs none layers && mkdir layers/up layers/work
cp -r --no-dereference /etc/. etc/ 2>/dev/null || true
rm -f etc/resolv.conf
mount -t tmpfs none /run && mkdir -p /run/resolve && echo 'nameserver 192.0.2.7' > /run/resolve/stub.conf
ln -s /run/resolve/stub.conf etc/resolv.conf && mount --bind etc /etc
for folder in bin sbin; do
  up=$PWD/layers/up/$folder work=$PWD/layers/work/$folder
  mkdir $up $work
  mount -t overlay none -o "lowerdir=/usr/$folder,upperdir=$up,workdir=$work" /usr/$folder
done
echo 'echo real' > real && chmod 755 real
cp real /usr/bin/nvidia-smi && cp real /usr/sbin/pct && ln -s nvidia-smi /usr/bin/other
"""


def test_a_machine_with_gpus_with_proxmox_and_with_a_linked_resolver(tmp_path: Path) -> None:
    """The stand-ins cover the real programs wherever PATH looks, and names are looked up as there."""
    code = """
import shlex, subprocess, sys
from lab_client import enter, ssh
from dflashctl.lab import lifecycle
endpoint = lifecycle.up().record.endpoint
try:
    for path in ("/sbin:/bin:/usr/sbin:/usr/bin", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"):
        count = "nvidia-smi -L | wc -l; /usr/bin/nvidia-smi -L | wc -l"
        script = f"PATH={path}; {count}; cat /etc/resolv.conf"
        print(enter(endpoint, script).stdout, ssh(endpoint, script + "; pct status 200").stdout)
finally:
    lifecycle.down()
"""
    lab_tests = f"{Path(__file__).parent}:{Path(__file__).parents[1]}/kit"
    machine = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-ec",
        OTHER_MACHINE + 'exec "$@"',
        "sh",
    ]
    done = subprocess.run(
        [*machine, sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ
        | {"DFLASHCTL_LAB_DIR": str(tmp_path / "lab"), "PYTHONPATH": f"{REPOSITORY}:{lab_tests}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    inside = b"8\n8\nnameserver 192.0.2.7\n"
    assert done.stdout.splitlines() == [f"{inside!r} {inside + b'status: running' + bytes([10])!r}"] * 2
