"""The host's part of a deploy, without a laptop: orders through a pipe, a `pct` that does what a test wants.

Run: python -m pytest tests/unit/test_host_desk.py
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent import AgentError
from dflashctl.agent.releases import hostdesk, hostlock, pctlock

sys.path.insert(0, str(Path(__file__).parent))

from install_box import Emit

OLD = "dflashctl-deploy-" + "0" * 32


class Host:
    """A desk for container 200 on this machine, its staging folder and its caller's end of the line."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.staging = root / "staging"
        self.staging.mkdir()
        self.calls = root / "calls"
        self.reader, self.writer = os.pipe()
        self.emit = Emit()
        self.seen: list[tuple[int, int]] = []
        request = {"container": 200, "staging_dir": str(self.staging), "code_root": "/x"}
        self.desk = hostdesk.Desk(request, self.emit)

    def pct(self, text: str) -> None:
        """What `pct` does; `$3` and `$4` are source and destination of a push."""
        path = self.root / "bin" / "pct"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "$@" >> {self.calls}\n{text}\n')
        path.chmod(0o755)

    def say(self, *orders: dict[str, Any], data: bytes = b"", done: bool = True) -> None:
        def speak() -> None:
            for order in orders:
                os.write(self.writer, json.dumps(order).encode() + b"\n")
            view = data
            try:
                while view:
                    view = view[os.write(self.writer, view[:65536]) :]
                if done:
                    os.write(self.writer, b'\n{"do": "done"}\n')
            except BrokenPipeError:
                pass  # the desk gave up
            os.close(self.writer)

        threading.Thread(target=speak).start()

    def serve(self, silence_s: float = 60.0) -> None:
        try:
            self.desk.serve(hostdesk.Talk(self.reader, silence_s))
        except hostdesk.CallerGone:
            self.desk.take_back()
            raise
        finally:
            self.desk.close()
            os.close(self.reader)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "locks").mkdir()
    monkeypatch.setattr(hostdesk, "lock_folder", lambda: str(tmp_path / "locks"))
    return Host(tmp_path)


def deliver(to: Path, data: bytes) -> dict[str, Any]:
    return {"do": "deliver", "to": str(to), "size": len(data), "mode": 0o600}


def test_an_archive_is_staged_in_a_closed_folder_pushed_and_removed(host: Host, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    host.pct(f'stat -c "%a" "$(dirname $3)" "$3" > {tmp_path}/modes; cp "$3" "$4"')
    host.say(deliver(tmp_path / "there", data), data=data)
    host.serve()
    assert (tmp_path / "there").read_bytes() == data
    assert (tmp_path / "modes").read_text().split() == ["700", "600"]
    assert list(host.staging.iterdir()) == []
    assert host.emit.events[-1] == {"delivered": str(tmp_path / "there"), "exit": 0, "said": ""}
    assert host.calls.read_text().split()[-2:] == ["--perms", "0600"]


@pytest.mark.parametrize("cut", [0, 1, 70_000])
def test_a_caller_that_goes_away_leaves_nothing(host: Host, tmp_path: Path, cut: int) -> None:
    data = os.urandom(100_000)
    host.pct("exit 0")
    host.say(deliver(tmp_path / "there", data), data=data[:cut], done=False)
    with pytest.raises(hostdesk.CallerGone):
        host.serve()
    assert list(host.staging.iterdir()) == []
    assert not host.calls.exists(), "a half archive is not pushed"


def test_what_was_delivered_is_taken_back_inside(host: Host, tmp_path: Path) -> None:
    host.pct('[ "$1" = push ] && cp "$3" "$4" || { shift 3; "$@"; }')
    host.say(deliver(tmp_path / "there", b"abc"), data=b"abc", done=False)
    with pytest.raises(hostdesk.CallerGone):
        host.serve()
    assert not (tmp_path / "there").exists()
    assert f"exec 200 -- rm -f -- {tmp_path}/there" in host.calls.read_text()


def test_a_silent_caller_is_given_up(host: Host) -> None:
    with pytest.raises(hostdesk.CallerGone, match="nothing was heard"):
        host.serve(silence_s=0.3)
    os.close(host.writer)


def test_words_of_a_push_that_exits_with_0_are_handed_on(host: Host, tmp_path: Path) -> None:
    host.pct("echo 'trying to acquire lock...' >&2; echo ' OK' >&2; echo 'failed to create file: x' >&2")
    host.say(deliver(tmp_path / "there", b"abc"), data=b"abc")
    host.serve()
    assert host.emit.events[-1]["said"] == "failed to create file: x"


def test_a_held_lock_is_waited_for_and_its_holder_named(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "pve-config-200.lock"
    text = f"trying to acquire lock...\\ncan't lock file '{lock}' - got timeout"
    host.pct(f'n=$(wc -l < {host.calls}); [ $n -ge 3 ] && exit 0; printf "{text}\\n" >&2; exit 4')
    holder = subprocess.Popen(
        ["flock", str(lock), "sh", "-c", "echo held; exec sleep 60"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        host.say(deliver(tmp_path / "there", b"abc"), data=b"abc")
        host.serve()
        waits = [event["phase"] for event in host.emit.events if "lock" in str(event.get("phase"))]
        assert len(waits) == 2 and f"pid {holder.pid}: flock" in waits[0]
        monkeypatch.setattr(hostdesk, "LOCK_PATIENCE_S", 0.0)
        host.calls.unlink()
        (tmp_path / "again").mkdir()
        other = Host(tmp_path / "again")
        other.say(deliver(tmp_path / "there", b"abc"), data=b"abc")
        with pytest.raises(AgentError, match="is locked by another pct command") as caught:
            other.serve()
        assert caught.value.kind == "locked" and lock.exists(), "it is Proxmox's: never removed"
    finally:
        os.killpg(holder.pid, signal.SIGTERM)  # flock's child holds the lock, too
        holder.communicate()


def test_no_space_on_the_host_is_said_before_a_byte_is_read(host: Host, tmp_path: Path) -> None:
    size = 1 << 60
    host.say({"do": "deliver", "to": "/x", "size": size, "mode": 0o600})
    with pytest.raises(AgentError, match="not enough space on the host") as caught:
        host.serve()
    assert "staging_dir" in caught.value.next
    assert {"ready": True} not in host.emit.events
    assert list(host.staging.iterdir()) == []


def test_only_litter_of_our_own_is_swept(tmp_path: Path) -> None:
    held = tmp_path / ("dflashctl-deploy-" + "1" * 32)
    for name in (OLD, held.name, "dflashctl-deploy-short", "somebody-elses"):
        (tmp_path / name).mkdir()
    (tmp_path / OLD / "archive").write_text("x")
    (tmp_path / ("dflashctl-deploy-" + "2" * 32)).symlink_to(tmp_path / "somebody-elses")
    descriptor = os.open(held, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    hostdesk.sweep(str(tmp_path))
    os.close(descriptor)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [held.name, "dflashctl-deploy-" + "2" * 32, "dflashctl-deploy-short", "somebody-elses"]


# --- the lock -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() or 0)
    yield tmp_path


def test_the_lock_file_goes_with_its_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "x.lock")
    with hostlock.HostLock(path, {"who": "anna@laptop", "what": "warm 1234"}, 0, lambda found: None):
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        found = hostlock.holder(path)
        assert found is not None and found["pid"] == os.getpid() and found["held_s"] < 60
        with (
            pytest.raises(AgentError, match=r"anna@laptop \(warm 1234\) is deploying here since") as caught,
            hostlock.HostLock(path, {}, 0, lambda found: None),
        ):
            raise AssertionError("two holders")
        assert caught.value.kind == "locked"
    assert not Path(path).exists() and hostlock.holder(path) is None


def test_many_takers_never_hold_it_together(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from dflashctl.agent.releases.hostlock import HostLock\n"
        "for _ in range(20):\n"
        "    with HostLock(sys.argv[1] + '/x.lock', {}, 30, lambda found: None):\n"
        "        os.mkdir(sys.argv[1] + '/alone'); time.sleep(0.002); os.rmdir(sys.argv[1] + '/alone')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    takers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=env) for _ in range(3)]
    assert [taker.wait(60) for taker in takers] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


class Deploying:
    """A process that holds the lock of a container and code root, and takes it back at SIGTERM."""

    CODE = (
        "import signal, sys; from dflashctl.agent.releases.hostlock import Broken, HostLock\n"
        "try:\n"
        "    with HostLock(sys.argv[1], {'who': 'anna@laptop'}, 0, lambda found: None):\n"
        "        print(1, flush=True); signal.pause()\n"
        "except Broken: pass\n"
    )

    def __init__(self, code_root: Path) -> None:
        self.where = {"container": 200, "code_root": str(code_root)}
        self.lock = Path(hostlock.lock_path(200, str(code_root)))
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        argv = [sys.executable, "-c", self.CODE, str(self.lock)]
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE)
        assert self.process.stdout is not None and self.process.stdout.readline() == b"1\n"

    def shown(self) -> Any:
        return hostlock.lock_show(self.where, None)["holder"]

    def broken(self, holder: Any) -> dict[str, Any]:
        return hostlock.lock_break({**self.where, "by": "bob@laptop", "holder": holder}, None)


@pytest.fixture
def deploying(folder: Path) -> Iterator[Deploying]:
    made = Deploying(folder / "code")
    with made.process:
        yield made
        made.process.kill()
    made.lock.unlink(missing_ok=True)


def test_breaking_the_lock_ends_the_holder_that_was_shown(deploying: Deploying) -> None:
    threading.Thread(target=deploying.process.wait, daemon=True).start()
    shown = deploying.shown()
    answer = deploying.broken(shown)
    assert answer["holder"]["who"] == "anna@laptop" and not answer["killed"]
    assert deploying.process.wait(10) == 0
    assert deploying.broken(shown) == {"holder": None, "killed": False}


def test_another_deploy_than_the_one_that_was_shown_goes_on(deploying: Deploying) -> None:
    """The question takes a person's time: meanwhile the deploy asked about ends, and the next one begins."""
    with pytest.raises(AgentError, match="another one holds the lock: anna@laptop") as caught:
        deploying.broken({"pid": deploying.process.pid, "start": 1, "who": "carl@laptop"})
    assert caught.value.kind == "locked" and deploying.process.poll() is None


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_holder_that_goes_by_itself_just_then_is_no_bug(
    deploying: Deploying, monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    shown, note = deploying.shown(), hostlock._note_breaker

    def meanwhile(*words: Any) -> None:
        deploying.process.send_signal(by)
        deploying.process.wait()
        note(*words)

    monkeypatch.setattr(hostlock, "_note_breaker", meanwhile)
    assert deploying.broken(shown)["killed"] is False


def test_the_same_place_has_the_same_lock(folder: Path) -> None:
    one = hostlock.lock_path(200, "/root/dflash")
    assert one == hostlock.lock_path(200, "/root//dflash/")
    assert len({one, hostlock.lock_path(201, "/root/dflash"), hostlock.lock_path(None, "/root/dflash")}) == 3
    assert stat.S_IMODE(Path(one).parent.stat().st_mode) == 0o700


def test_holders_of_a_lock_nobody_has(tmp_path: Path) -> None:
    assert pctlock.holder_words(str(tmp_path / "none")) == "unknown"
