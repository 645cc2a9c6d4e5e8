"""sftp and scp to the lab's host, with OpenSSH's clients and with paramiko."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from lab_client import connect, ssh

from dflashctl.lab import lifecycle
from dflashctl.lab.state import Record

pytestmark = pytest.mark.lab


@pytest.fixture
def sftp(lab: Record) -> Iterator[paramiko.SFTPClient]:
    client = connect(lab.endpoint)
    opened = client.open_sftp()
    ssh(lab.endpoint, "rm -rf /tmp/t && mkdir /tmp/t")
    opened.chdir("/tmp/t")
    yield opened
    client.close()


def scp(lab: Record, *words: str) -> subprocess.CompletedProcess[bytes]:
    argv = lifecycle.ssh_argv(lab.endpoint)[1:-1]
    argv[argv.index("-p")] = "-P"
    return subprocess.run(
        ["scp", "-q", *argv, *words], capture_output=True, timeout=120, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "64 MiB"
    path.write_bytes(os.urandom(64 << 20))
    return path


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.mark.parametrize("protocol", [[], ["-O"]], ids=["sftp", "old"])
def test_scp_there_and_back(lab: Record, big: Path, tmp_path: Path, protocol: list[str]) -> None:
    target = f"root@127.0.0.1:/tmp/big{len(protocol)}"
    done = scp(lab, *protocol, "-p", str(big), target)
    assert (done.returncode, done.stderr) == (0, b"")
    remote = ssh(lab.endpoint, f"sha256sum < /tmp/big{len(protocol)}").stdout.split()[0].decode()
    assert remote == digest(big)
    back = tmp_path / "back"
    assert scp(lab, *protocol, target, str(back)).returncode == 0
    assert digest(back) == digest(big)
    ssh(lab.endpoint, f"rm /tmp/big{len(protocol)}")


def test_paramiko_there_and_back(sftp: paramiko.SFTPClient, big: Path, tmp_path: Path) -> None:
    sftp.put(str(big), "big")  # checks the size by itself
    sftp.get("big", str(tmp_path / "back"))
    assert digest(tmp_path / "back") == digest(big)


def test_a_folder_by_scp(lab: Record, tmp_path: Path) -> None:
    for n in range(40):
        folder = tmp_path / "src" / f"d{n % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"f {n}").write_text(str(n))
    assert scp(lab, "-r", str(tmp_path / "src"), "root@127.0.0.1:/tmp/srccopy").returncode == 0
    assert scp(lab, "-r", "root@127.0.0.1:/tmp/srccopy", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back/d3/f 39").read_text() == "39"
    assert len(list((tmp_path / "back").rglob("f *"))) == 40


def test_openssh_sftp_in_a_batch(lab: Record, tmp_path: Path) -> None:
    (tmp_path / "up").write_text("content")
    (tmp_path / "batch").write_text(
        f"-rm /tmp/b1\n-rm /tmp/b2\nput {tmp_path}/up /tmp/b1\nchmod 640 /tmp/b1\nrename /tmp/b1 /tmp/b2\n"
        f"ln -s /tmp/b2 /tmp/b1\nls -l /tmp/b2\nget /tmp/b1 {tmp_path}/down\nrm /tmp/b1\n"
    )
    argv = lifecycle.ssh_argv(lab.endpoint)[1:]
    argv[argv.index("-p")] = "-P"
    done = subprocess.run(
        ["sftp", "-q", "-b", str(tmp_path / "batch"), *argv], capture_output=True, timeout=60, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "-rw-r-----" in done.stdout
    assert (tmp_path / "down").read_text() == "content"


def test_setting_a_size_does_not_empty_the_file(sftp: paramiko.SFTPClient) -> None:
    with sftp.open("f", "w") as file:
        file.write("0123456789")
        file.flush()
        file.truncate(4)
    assert sftp.open("f").read() == b"0123"
    sftp.truncate("f", 8)
    assert sftp.open("f").read() == b"0123\0\0\0\0"


def test_writes_at_any_place_and_appends(sftp: paramiko.SFTPClient) -> None:
    with sftp.open("f", "w") as file:
        file.write("aaaaaaaaaa")
    with sftp.open("f", "r+") as file:
        file.seek(3)
        file.write("XYZ")
        file.seek(0)
        assert file.read() == b"aaaXYZaaaa"
    with sftp.open("f", "a") as file:
        file.write("end")
    assert sftp.open("f").read() == b"aaaXYZaaaaend"


def test_modes_times_and_names(sftp: paramiko.SFTPClient) -> None:
    sftp.open("plain", "w").close()
    assert stat.S_IMODE(sftp.stat("plain").st_mode) == 0o644
    sftp.chmod("plain", 0o4711)
    sftp.utime("plain", (1_000_000_000, 1_100_000_000))
    found = sftp.stat("plain")
    assert (stat.S_IMODE(found.st_mode), found.st_mtime) == (0o4711, 1_100_000_000)
    sftp.open("naïve — 名前 \n\t'\"$", "w").close()
    sftp.symlink("plain", "link")
    assert set(sftp.listdir()) == {"plain", "naïve — 名前 \n\t'\"$", "link"}
    assert sftp.readlink("link") == "plain"
    assert stat.S_ISLNK(sftp.lstat("link").st_mode) and stat.S_ISREG(sftp.stat("link").st_mode)
    sftp.mkdir("folder", 0o700)
    assert stat.S_IMODE(sftp.stat("folder").st_mode) == 0o700
    sftp.rmdir("folder")
    assert sftp.normalize("../t/./link") == "/tmp/t/plain"


def test_renaming_never_overwrites_unless_asked(sftp: paramiko.SFTPClient) -> None:
    for name in ("a", "b"):
        with sftp.open(name, "w") as file:
            file.write(name)
    with pytest.raises(OSError):
        sftp.rename("a", "b")
    sftp.posix_rename("a", "b")
    assert sftp.listdir() == ["b"] and sftp.open("b").read() == b"a"


def test_errors_say_what_they_are(sftp: paramiko.SFTPClient) -> None:
    for action in (
        lambda: sftp.open("none"),
        lambda: sftp.stat("none"),
        lambda: sftp.remove("none"),
        lambda: sftp.listdir("none"),
        lambda: sftp.readlink("none"),
        lambda: sftp.open("none/x", "w"),
    ):
        with pytest.raises(FileNotFoundError):
            action()
    sftp.mkdir("d")
    for action in (lambda: sftp.open("d", "w"), lambda: sftp.remove("d"), lambda: sftp.mkdir("d")):
        with pytest.raises(OSError):
            action()
    with pytest.raises(OSError):
        sftp.open("/usr/new", "w")  # read-only
    sftp.open("x", "w").close()
    with pytest.raises(OSError):
        sftp.open("x", "wx")  # exists
    assert sftp.listdir() and sftp.stat(".")  # the session is well


def test_a_folder_of_3000_files_is_listed(lab: Record, sftp: paramiko.SFTPClient) -> None:
    ssh(lab.endpoint, "mkdir /tmp/t/many && cd /tmp/t/many && touch $(seq 3000)")
    assert sorted(sftp.listdir("many"), key=int) == [str(n) for n in range(1, 3001)]
    assert sum(1 for _ in sftp.listdir_iter("many")) == 3000
