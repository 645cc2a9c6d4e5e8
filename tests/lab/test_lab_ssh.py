"""The lab's ssh server behaves as a real sshd, seen by OpenSSH's client and by paramiko."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest
from lab_client import connect, ssh

from dflashctl.agent.processes import proc
from dflashctl.lab import lifecycle
from dflashctl.lab.state import Record

pytestmark = pytest.mark.lab

BIG = 64 * 1024 * 1024


@pytest.fixture
def client(lab: Record) -> Iterator[paramiko.SSHClient]:
    opened = connect(lab.endpoint)
    yield opened
    opened.close()


def wait_for(condition: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


# --- commands -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 126, 127, 137, 255])
def test_exit_codes_arrive(lab: Record, code: int) -> None:
    assert ssh(lab.endpoint, f"exit {code}").returncode == code


def test_streams_stay_apart_and_bytes_intact(lab: Record) -> None:
    data = bytes(range(256)) * 400
    done = ssh(lab.endpoint, "tee /dev/stderr", input=data)
    assert (done.returncode, done.stdout, done.stderr) == (0, data, data)


def test_the_login_is_root_on_the_node(lab: Record) -> None:
    done = ssh(lab.endpoint, 'echo "$(id -u) $(hostname) $USER $HOME $PWD $LANG"')
    home = lab.endpoint.home
    assert done.stdout.decode().split() == ["0", "pve1", "root", home, home, "C.UTF-8"]


def test_stand_ins_and_python_are_on_every_path(lab: Record) -> None:
    for path in (
        None,
        "/sbin:/bin:/usr/sbin:/usr/bin",
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ):
        setting = f"PATH={path} " if path else ""
        script = 'command -v pct; command -v nvidia-smi; python3 -I -c "print(1)"'
        done = ssh(lab.endpoint, f"{setting}sh -c {shlex.quote(script)}")
        *found, printed = done.stdout.decode().split()
        assert [Path(p).name for p in found] == ["pct", "nvidia-smi"] and printed == "1"
        assert found[0] == "/sbin/pct"


def test_a_signal_is_reported_as_one(lab: Record, client: paramiko.SSHClient) -> None:
    assert ssh(lab.endpoint, "kill -KILL $$").returncode == 255  # OpenSSH's client has no other way to say it
    channel = client.get_transport().open_session()
    channel.exec_command("kill -KILL $$")
    assert channel.recv_exit_status() == -1


def test_locale_may_be_set_by_the_client_and_nothing_else(lab: Record) -> None:
    environment = os.environ | {"LC_ALL": "C", "LD_PRELOAD_X": "evil"}
    done = ssh(
        lab.endpoint,
        'echo "$LC_ALL/$LD_PRELOAD_X"',
        "-o", "SendEnv=LC_ALL LD_PRELOAD_X",
        env=environment,
    )  # fmt: skip
    assert done.stdout == b"C/\n"


def test_nothing_of_the_persons_environment_is_in_the_lab(
    lab: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set(ssh(lab.endpoint, "env | cut -d= -f1").stdout.decode().split())
    shell = {"PWD", "OLDPWD", "SHLVL", "_"}
    session = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "SSH_CLIENT", "SSH_CONNECTION"}
    assert session <= names <= session | shell
    host = ssh(lab.endpoint, r"tr '\0' '\n' < /proc/1/environ | cut -d= -f1").stdout.decode().split()
    assert set(host) <= {"PATH", "LANG", "PYTHONPATH", "PYTHONUSERBASE", "LD_LIBRARY_PATH"}


def test_an_argument_list_of_100_kb_arrives(lab: Record) -> None:
    word = "x" * 100_000
    assert ssh(lab.endpoint, f"printf %s {word} | wc -c").stdout.split() == [b"100000"]


def test_a_background_process_that_holds_the_output_keeps_the_channel(lab: Record) -> None:
    began = time.monotonic()
    done = ssh(lab.endpoint, "sleep 1.5 & echo now")
    assert done.stdout == b"now\n" and time.monotonic() - began > 1.4
    child = ssh(lab.endpoint, "sleep 300 </dev/null >/dev/null 2>&1 & echo $!").stdout.decode()
    assert ssh(lab.endpoint, f"kill {child}").returncode == 0, "it is still there"


def test_the_exit_status_comes_before_a_background_process_lets_go(client: paramiko.SSHClient) -> None:
    channel = client.get_transport().open_session()
    channel.exec_command("sleep 300 & echo $!; exit 5")
    child = int(channel.makefile("rb").readline())
    assert channel.recv_exit_status() == 5
    _, stdout, _ = client.exec_command(f"kill {child}")
    assert stdout.channel.recv_exit_status() == 0, "it is still there"
    channel.close()


def test_input_that_is_not_read_does_no_harm(lab: Record) -> None:
    done = ssh(lab.endpoint, "exec 0<&-; sleep 0.3; echo done", input=b"x" * (4 * 1024 * 1024))
    assert (done.returncode, done.stdout) == (0, b"done\n")
    assert ssh(lab.endpoint, "head -c 5", input=b"x" * (4 * 1024 * 1024)).stdout == b"xxxxx"
    assert ssh(lab.endpoint, "echo still here").stdout == b"still here\n"


def test_zombies_are_taken_away(lab: Record) -> None:
    started = ssh(
        lab.endpoint, "for i in 1 2 3 4 5; do (sleep 0.1 </dev/null >/dev/null 2>&1 & echo $!); done"
    )
    pids = started.stdout.decode().split()
    assert len(pids) == 5
    left = "; ".join(f"test ! -e /proc/{pid} || echo {pid}" for pid in pids)
    wait_for(lambda: ssh(lab.endpoint, left).stdout == b"")


# --- much at once -------------------------------------------------------------------------------------


def test_many_channels_on_one_connection(client: paramiko.SSHClient) -> None:
    def run(number: int) -> tuple[int, bytes]:
        stdin, stdout, _ = client.exec_command(f"cat; exit {number}", timeout=60)
        stdin.write(b"%d" % number * 2000)
        stdin.channel.shutdown_write()
        return stdout.channel.recv_exit_status(), stdout.read()

    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(run, range(64)))
    assert results == [(n, b"%d" % n * 2000) for n in range(64)]


def test_more_channels_at_once_than_select_has_descriptors(client: paramiko.SSHClient) -> None:
    """1024 descriptors are where select() gives up; each channel takes several."""
    channels = []
    for _ in range(300):
        channel = client.get_transport().open_session(timeout=60)
        channel.exec_command("read x; echo $x")
        channels.append(channel)
    for number, channel in enumerate(channels):
        channel.sendall(b"%d\n" % number)
    for number, channel in enumerate(channels):
        assert channel.makefile("rb").read() == b"%d\n" % number
        channel.close()


def test_many_connections(lab: Record) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: ssh(lab.endpoint, f"echo {n}").stdout, range(24)))
    assert results == [b"%d\n" % n for n in range(24)]


def server_rss_bytes(lab: Record) -> int:
    """The ssh server's memory: the host's child that bears this name."""
    processes = proc.table()
    (server,) = [p for p in processes.values() if p.ppid == lab.pid and p.comm == "sshd"]
    return server.rss_bytes


def test_64_mib_each_way_in_bounded_memory(lab: Record) -> None:
    data = os.urandom(1 << 20) * (BIG >> 20)
    before = server_rss_bytes(lab)
    done = ssh(lab.endpoint, "cat", input=data)
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()
    assert server_rss_bytes(lab) - before < 24 << 20


def test_a_client_that_does_not_read_costs_no_memory(lab: Record, client: paramiko.SSHClient) -> None:
    before = server_rss_bytes(lab)
    channel = client.get_transport().open_session()
    channel.exec_command("yes")
    time.sleep(1)
    assert server_rss_bytes(lab) - before < 24 << 20
    channel.close()


def test_a_flood_on_both_streams_is_drained(lab: Record) -> None:
    done = ssh(lab.endpoint, "head -c 20000000 /dev/zero >&2 & head -c 20000000 /dev/zero; wait")
    assert (len(done.stdout), len(done.stderr), done.returncode) == (20_000_000, 20_000_000, 0)


# --- a client that goes away --------------------------------------------------------------------------


def test_a_silent_command_outlives_its_client(lab: Record, lab_paths) -> None:
    mark = lab_paths.workspace / "outlived"
    mark.unlink(missing_ok=True)
    process = subprocess.Popen(
        [*lifecycle.ssh_argv(lab.endpoint), "echo ready; sleep 1; echo done > /tank/workspace/outlived"],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(mark.exists)


def test_a_command_that_prints_meets_sigpipe(lab: Record, lab_paths) -> None:
    mark = lab_paths.workspace / "sigpipe"
    mark.unlink(missing_ok=True)
    command = "(while :; do echo tick; sleep 0.2; done); echo $? > /tank/workspace/sigpipe"
    process = subprocess.Popen(
        [*lifecycle.ssh_argv(lab.endpoint), command], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None and process.stdout.readline() == b"tick\n"
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: mark.exists() and mark.read_text())
    assert int(mark.read_text()) == 128 + signal.SIGPIPE


def test_a_vanished_client_leaves_no_thread_behind(lab: Record) -> None:
    def threads() -> int:
        (server,) = [p for p in proc.table().values() if p.ppid == lab.pid and p.comm == "sshd"]
        return server.threads

    wait_for(lambda: threads() < 6)
    for _ in range(5):
        client = connect(lab.endpoint)
        client.exec_command("sleep 1")
        client.get_transport().sock.close()
    wait_for(lambda: threads() < 6)


# --- who may come in ----------------------------------------------------------------------------------


def test_another_key_another_user_and_passwords_are_refused(lab: Record, tmp_path: Path) -> None:
    other = paramiko.ECDSAKey.generate()
    for change in (
        {"key_filename": None, "pkey": other},
        {"username": "admin"},
        {"key_filename": None, "password": ""},
    ):
        with pytest.raises(paramiko.SSHException):
            connect(lab.endpoint, **change)


def test_forwarding_is_refused(client: paramiko.SSHClient) -> None:
    with pytest.raises(paramiko.ChannelException):
        client.get_transport().open_channel("direct-tcpip", ("127.0.0.1", 1), ("127.0.0.1", 2))


def test_the_host_key_is_pinned(lab: Record, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    argv = [word.replace(lab.endpoint.known_hosts, str(empty)) for word in lifecycle.ssh_argv(lab.endpoint)]
    done = subprocess.run([*argv, "true"], capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 255 and b"Host key verification failed" in done.stderr


def test_keys_and_folder_are_private(lab: Record, lab_paths) -> None:
    assert lab_paths.root.stat().st_mode & 0o7777 == 0o700
    for name in ("id_ed25519", "host_ed25519"):
        assert (lab_paths.ssh / name).stat().st_mode & 0o7777 == 0o600
    assert ssh(lab.endpoint, f"ls {shlex.quote(str(lab_paths.ssh))}").returncode != 0  # not even seen inside


def test_the_server_listens_on_loopback_only(lab: Record) -> None:
    listening = [
        fields[1]
        for fields in (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
        if fields[3] == "0A" and fields[1].endswith(f":{lab.endpoint.port:04X}")
    ]
    assert listening == [f"0100007F:{lab.endpoint.port:04X}"]


# --- a person's terminal ------------------------------------------------------------------------------


def test_a_terminal_session(lab: Record) -> None:
    argv = lifecycle.ssh_argv(lab.endpoint)
    process = subprocess.Popen(
        [*argv[:-1], "-tt", argv[-1]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    out, _ = process.communicate(b"tty; stty size; echo $TERM-$((6*7)); exit 9\n", timeout=60)
    assert process.returncode == 9
    assert b"/dev/pts/" in out and b"-42" in out


def test_hanging_up_ends_a_terminal_session(lab: Record, client: paramiko.SSHClient) -> None:
    channel = client.get_transport().open_session()
    channel.get_pty("xterm", 132, 43)
    channel.exec_command("echo pid $$ $(stty size); sleep 600")
    line = channel.makefile("rb").readline().split()
    assert line[2:] == [b"43", b"132"]
    channel.close()
    wait_for(lambda: ssh(lab.endpoint, f"kill -0 {int(line[1])}").returncode != 0)
