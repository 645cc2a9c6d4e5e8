"""Parts of the pct stand-in by themselves. The whole is proven by tests/conformance."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.lab.pct import attach, backends, commands, config, freezer, namespaces, transfer
from dflashctl.lab.pct import locale as callers_locale
from dflashctl.lab.pct.errors import AttachError, Die, ParameterError
from dflashctl.lab.pct.state import State

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = transfer.Ownership(None, None, None)
V9 = (6, 1, 10)


def make_state(folder: Path, **settings: object) -> State:
    (folder / "pct.json").write_text('{"version": 1, "node": "pve1"}')
    (folder / "conf").mkdir()
    (folder / "ns").mkdir()
    if settings:
        import json

        (folder / "pct.json").write_text(json.dumps({"version": 1, "node": "pve1", **settings}))
    return State(str(folder))


def call_pct(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})"
    code += "; import os; os.geteuid = lambda: 0; from dflashctl.lab.pct.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, *args],
        env={"DFLASHCTL_PCT_STATE": str(folder), "PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


# Safety: nothing runs outside a container.


def test_exec_never_runs_outside_namespaces(tmp_path: Path) -> None:
    """Even when the recorded first process is one of ours, alive and with the right start time."""
    state = make_state(tmp_path)
    (tmp_path / "conf" / "200.conf").write_text("hostname: ct200\n")
    (tmp_path / "ns" / "200.json").write_text('{"backend": "userns"}')
    (tmp_path / "ns" / "200.init").write_text(f"{os.getpid()} {namespaces.start_ticks(os.getpid())}\n")
    assert backends.backend(state, 200).running()
    marker = tmp_path / "ran"
    done = call_pct(tmp_path, "exec", "200", "--", "/usr/bin/touch", str(marker))
    assert done.returncode == 1
    assert "lxc-attach: 200:" in done.stderr
    assert not marker.exists()


def test_push_never_writes_outside_namespaces(tmp_path: Path) -> None:
    make_state(tmp_path)
    (tmp_path / "conf" / "200.conf").write_text("unprivileged: 1\n")
    (tmp_path / "ns" / "200.json").write_text('{"backend": "userns"}')
    (tmp_path / "ns" / "200.init").write_text(f"{os.getpid()} {namespaces.start_ticks(os.getpid())}\n")
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("x")
    done = call_pct(tmp_path, "push", "200", str(source), str(target))
    assert (done.returncode, done.stderr) == (0, "failed to open the container's mount namespace\n")
    assert not target.exists()


def test_our_own_namespaces_are_not_a_container() -> None:
    with pytest.raises(AttachError, match="no pid namespace of its own"):
        namespaces.open_all(os.getpid())


def test_our_own_processes_are_not_frozen(tmp_path: Path) -> None:
    make_state(tmp_path)
    with pytest.raises(Die, match="nothing is frozen"):
        freezer.freeze(str(tmp_path), 200, os.getpid())


def test_a_container_that_is_gone_cannot_be_entered(capfd: pytest.CaptureFixture[str]) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert attach.run(200, child.pid, [b"true"], {}) == 1
    assert "Failed to get init pid" in capfd.readouterr().err


def test_a_recycled_pid_is_not_the_container(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    (tmp_path / "ns" / "200.json").write_text('{"backend": "userns"}')
    (tmp_path / "ns" / "200.init").write_text(f"{os.getpid()} 1\n")
    assert not backends.backend(state, 200).running()


# Start-up.


def test_few_modules_are_imported() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); before = set(sys.modules);"
        "import dflashctl.lab.pct.cli; print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    heavy = {"subprocess", "ctypes", "pathlib", "typing", "dataclasses", "argparse", "asyncio", "logging"}
    assert not heavy & set(done.stdout.split())


def test_the_start_up_delay_is_waited(tmp_path: Path) -> None:
    make_state(tmp_path, startup_delay_s=0.3)
    began = time.monotonic()
    assert call_pct(tmp_path, "list").returncode == 0
    assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read"),
        ('{"version": 2}', "has version 2, known is 1"),
        ('{"version": 1, "pve": 6}', "pve is 6, known are 7, 8 and 9"),
    ],
)
def test_a_broken_state_is_said(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "pct.json").write_text(text)
    done = call_pct(tmp_path, "list")
    assert done.returncode == 255
    assert message in done.stderr
    assert "Traceback" not in done.stderr


# Environment and locale.


def test_the_callers_environment_is_read_as_it_is() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})"
        "; from dflashctl.lab.pct.locale import environment; print(environment())"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], env={"A": "ä="}, capture_output=True, check=True, timeout=60
    )
    assert done.stdout == b"{b'A': b'\\xc3\\xa4='}\n"  # without the LC_CTYPE that Python sets


@pytest.mark.parametrize(
    ("env", "codec"),
    [
        ({}, "ascii"),
        ({b"LANG": b"C"}, "ascii"),
        ({b"LANG": b"C.UTF-8"}, "utf-8"),
        ({b"LANG": b"C.UTF-8", b"LC_ALL": b"C"}, "ascii"),
        ({b"LANG": b"C", b"LC_CTYPE": b"C.UTF-8"}, "utf-8"),
        ({b"LANG": b"C", b"LC_ALL": b"", b"LC_CTYPE": b"C.UTF-8"}, "utf-8"),
    ],
)
def test_the_locale_decides_how_arguments_are_read(env: dict[bytes, bytes], codec: str) -> None:
    assert callers_locale.codec(env) == (codec, "")


def test_environment_inside() -> None:
    host = {b"A": b"1", b"container": b"no", b"PATH": b"/sbin"}
    kept = attach.environment(host, [b"TERM=linux", b"X=a=b"], keep=True)
    assert kept == {
        b"A": b"1",
        b"PATH": b"/sbin",
        b"container": b"lxc",
        b"TERM": b"linux",
        b"X": b"a=b",
    }
    cleared = attach.environment(host, [b"TERM=linux"], keep=False)
    assert cleared == {b"PATH": attach.CLEAR_ENV_PATH, b"container": b"lxc", b"TERM": b"linux"}


# Parameters.


def parameters(name: str, *args: str, version: tuple[int, ...] = V9) -> dict[str, commands.Value]:
    words = [word.encode() for word in args]
    return commands.parameters(commands.COMMANDS[name], words, "utf-8", version)


def test_parameters_are_typed() -> None:
    assert parameters("shutdown", "200", "--timeout", "5", "--forceStop") == {
        "vmid": 200,
        "timeout": 5,
        "forceStop": True,
    }
    assert parameters("exec", "200", "--", "a b", "é") == {"vmid": 200, "extra-args": ["a b", "é"]}


@pytest.mark.parametrize("vmid", ["99", "1000000000", "0200", "+200", "1e3", "200 ", "²00"])
def test_what_is_no_vmid(vmid: str) -> None:
    with pytest.raises(ParameterError):
        parameters("status", vmid)


@pytest.mark.parametrize("vmid", ["100", "999999999"])
def test_what_is_a_vmid(vmid: str) -> None:
    assert parameters("status", vmid) == {"vmid": int(vmid)}


def test_options_come_with_releases() -> None:
    with pytest.raises(ParameterError, match="unable to parse option"):
        parameters("exec", "200", "--keep-env=0", version=(5, 0, 8))
    assert parameters("exec", "200", "--keep-env=0", version=(5, 0, 9))["keep-env"] is False


# Files.


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ("755", 0o755),
        ("0755", 0o755),
        ("0x1ed", 0o755),
        ("x1ED", 0o755),
        ("", 0),
        ("0", 0),
        ("07777", 0o7777),
    ],
)
def test_modes(given: str, mode: int) -> None:
    assert transfer._mode(transfer.Ownership(given, None, None).perms or "") == mode


@pytest.mark.parametrize("given", ["9", "0x", "0xg", "-5", "7 5", "u+x", "0b1", "1" * 30])
def test_what_is_no_mode(given: str) -> None:
    with pytest.raises(Die, match="invalid mode"):
        transfer._mode(transfer.Ownership(given, None, None).perms or "")


def test_an_existing_file_keeps_inode_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old and longer")
    path.chmod(0o640)
    before = path.stat()
    os.close(transfer.create_file(str(path), NOBODY))
    after = path.stat()
    assert (after.st_ino, after.st_mode, after.st_size) == (before.st_ino, before.st_mode, 0)


def test_a_file_copied_onto_itself_is_emptied(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f"
    path.write_text("precious")
    source = os.open(path, os.O_RDONLY)
    transfer.copy(source, transfer.create_file(str(path), NOBODY), "at x line 1")
    assert path.read_text() == ""
    assert capfd.readouterr().err.endswith("are identical (not copied) at x line 1.\n")


def test_a_copy_to_a_full_disk_ends_silently(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "f"
    source.write_bytes(b"x" * 5000)
    transfer.copy(os.open(source, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY), "")
    assert capfd.readouterr() == ("", "")


@given(data=st.binary(max_size=4000))
def test_content_is_copied_whole(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("copy")
    (folder / "from").write_bytes(data)
    source = os.open(folder / "from", os.O_RDONLY)
    target = transfer.create_file(str(folder / "to"), NOBODY)
    transfer.copy(source, target, "")
    os.close(source)
    os.close(target)
    assert (folder / "to").read_bytes() == data


# Configuration.


def test_configuration_sections() -> None:
    warnings: list[str] = []
    text = (
        "#a comment%3A\n#more\narch: amd64\ncores: 4\nlxc.mount.entry = /dev/x dev/x none bind\n"
        "lxc.cgroup2.devices.allow: c 195:* rwm\nnonsense\n[pve:pending]\ncores: 8\ndelete: arch,!mp0\n"
        "[snap]\ncores: 2\n"
    )
    file = config.parse(text, 200, warnings.append)
    assert warnings == ["vm 200 - unable to parse config: nonsense\n"]
    assert config.lines(config.shown(file, current=True)) == [
        "arch: amd64\n",
        "cores: 4\n",
        "description: a comment%3A%0Amore%0A\n",
        "lxc.mount.entry: /dev/x dev/x none bind\n",
        "lxc.cgroup2.devices.allow: c 195:* rwm\n",
    ]
    assert "arch: amd64\n" not in config.lines(config.shown(file, current=False))
    assert file.snapshots["snap"].values == {"cores": "2"}


@given(st.text())
def test_encoded_text_comes_back(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: in no file
        return
    assert config.decode_text(config.encode_text(text)) == text


def test_long_paths_are_hashed_as_lxc_does() -> None:
    assert backends.command_socket("/var/lib/lxc", "200") == " @/var/lib/lxc/200/command"
    hashed = backends.command_socket("/" + "x" * 120, "200")
    assert hashed.startswith(" @lxc/") and hashed.endswith("/command") and len(hashed) == 30
