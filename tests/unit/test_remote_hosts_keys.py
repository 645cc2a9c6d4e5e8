"""known_hosts: what is stored for a name, compared with OpenSSH's own reading of the same file.

Run: python -m pytest tests/unit/test_remote_hosts_keys.py
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from dflashctl.errors import HostKeyChanged
from dflashctl.remote.hostkeys import Offered, OtherHostKey, UnknownHostKey, check
from dflashctl.remote.known_hosts import (
    fingerprint,
    keys_for,
    line_for,
    lookup_name,
    matches,
    parse,
    read_files,
    store,
    without_name,
)

BLOB = b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes(range(32))
OTHER = b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes(range(1, 33))
TYPE = "ssh-ed25519"
KEY = base64.b64encode(BLOB).decode()


def hashed(name: str) -> str:
    salt = bytes(range(20))
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("names", "wanted", "expected"),
    [
        ("box", "box", True),
        ("BOX", "box", True),
        ("box,192.0.2.7", "192.0.2.7", True),
        ("box", "box2", False),
        ("box", "abox", False),
        ("*.lab", "gpu.lab", True),
        ("*.lab", "lab", False),
        ("gpu?", "gpu1", True),
        ("*.lab,!bad.lab", "bad.lab", False),
        ("!bad.lab,*.lab", "bad.lab", False),
        ("[box]:2222", "[box]:2222", True),
        ("[box]:2222", "box", False),
        ("box", "[box]:2222", False),
        ("[box]:2222", "b:2222", False),  # no class of characters
        ("[127.0.0.1]:*", "[127.0.0.1]:40123", True),
        (hashed("box"), "box", True),
        (hashed("box"), "other", False),
        (hashed("[127.0.0.1]:40123"), "[127.0.0.1]:40123", True),
        ("|1|broken", "box", False),
        ("|1|!!|??", "box", False),
    ],
)
def test_which_names_a_line_speaks_of(names: str, wanted: str, expected: bool) -> None:
    assert matches(names, wanted) is expected


needs_ssh_keygen = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="ssh-keygen (openssh-client) is not here to compare with"
)


@needs_ssh_keygen
@pytest.mark.parametrize(
    "names", ["box", "*.lab", "*.lab,!bad.lab", "[box]:2222", "[127.0.0.1]:*", "gpu?,box"]
)
@pytest.mark.parametrize("wanted", ["box", "gpu.lab", "bad.lab", "[box]:2222", "[127.0.0.1]:40123", "gpu1"])
def test_openssh_reads_the_same_names(tmp_path: Path, names: str, wanted: str) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"{names} {TYPE} {KEY}\n")
    found = subprocess.run(
        ["ssh-keygen", "-F", wanted, "-f", str(file)], capture_output=True, timeout=10, check=False
    )
    assert matches(names, wanted) is (found.returncode == 0)


def test_names_are_looked_up_as_openssh_writes_them() -> None:
    assert lookup_name("Box", 22) == "box"
    assert lookup_name("box", 2222) == "[box]:2222"
    assert lookup_name("box", 2222, alias="cluster") == "cluster"


@needs_ssh_keygen
def test_fingerprints_are_those_of_ssh_keygen(tmp_path: Path) -> None:
    file = tmp_path / "key.pub"
    file.write_text(f"{TYPE} {KEY}\n")
    printed = subprocess.run(
        ["ssh-keygen", "-lf", str(file)], capture_output=True, text=True, timeout=10, check=True
    )
    assert printed.stdout.split()[1] == fingerprint(BLOB)


def test_damaged_lines_and_comments_are_passed_over() -> None:
    damaged = f"# comment\n\nbox\nbox {TYPE}\nbox {TYPE} ***\n"
    text = f"{damaged}box {TYPE} {KEY} a comment\n@cert-authority *.lab {TYPE} {KEY}\n"
    found = parse(text)
    assert [(key.where, key.marker) for key in found] == [
        ("known_hosts:6", ""),
        ("known_hosts:7", "@cert-authority"),
    ]


def test_a_known_key_passes_whatever_its_line_looks_like() -> None:
    for names in ("box", "b*", hashed("box"), "a,box,c"):
        check(
            keys_for(parse(f"{names} {TYPE} {KEY}"), "box"), Offered("box", TYPE, BLOB), label="l", where="w"
        )


def test_one_of_several_known_keys_is_enough() -> None:
    known = parse(line_for("box", TYPE, OTHER) + line_for("box", TYPE, BLOB))
    check(keys_for(known, "box"), Offered("box", TYPE, BLOB), label="l", where="w")


def test_a_certificate_authority_is_no_key_of_the_host() -> None:
    known = keys_for(parse(f"@cert-authority box {TYPE} {KEY}"), "box")
    with pytest.raises(UnknownHostKey, match="@cert-authority in known_hosts:1 is not asked"):
        check(known, Offered("box", TYPE, BLOB), label="l", where="w")


def test_a_revoked_key_is_refused_even_where_it_is_known() -> None:
    known = parse(f"box {TYPE} {KEY}\n@revoked * {TYPE} {KEY}\n")
    with pytest.raises(HostKeyChanged, match="revoked"):
        check(keys_for(known, "box"), Offered("box", TYPE, BLOB), label="l", where="w")


def test_a_key_of_another_type_than_the_known_one_counts_as_changed() -> None:
    known = keys_for(parse(f"box ssh-rsa {base64.b64encode(OTHER).decode()}"), "box")
    with pytest.raises(OtherHostKey) as caught:
        check(known, Offered("box", TYPE, BLOB), label="ct200", where="w")
    assert "dflashctl host trust ct200 --replace" in caught.value.next


def test_a_missing_file_is_empty_and_a_folder_is_an_error(tmp_path: Path) -> None:
    assert read_files([tmp_path / "none", tmp_path / "none" / "below"]) == []
    with pytest.raises(OSError):
        read_files([tmp_path])


def test_storing_makes_private_files_and_keeps_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "ssh" / "known_hosts"
    store(file, "box", TYPE, BLOB)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    file.write_text("# mine\nold ssh-rsa AAAA")  # no newline at its end
    file.chmod(0o644)
    store(file, "box", TYPE, BLOB)
    assert file.read_text() == f"# mine\nold ssh-rsa AAAA\nbox {TYPE} {KEY}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert list(file.parent.iterdir()) == [file]


def test_storing_through_a_symbolic_link_keeps_the_link(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles"
    real.write_text("")
    link = tmp_path / "known_hosts"
    link.symlink_to(real)
    store(link, "box", TYPE, BLOB)
    assert link.is_symlink()
    assert KEY in real.read_text()


def test_replacing_takes_the_name_out_of_every_other_line(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    old = base64.b64encode(OTHER).decode()
    file.write_text(
        f"box {TYPE} {old}\n"
        f"box,192.0.2.7 {TYPE} {old}\n"
        f"{hashed('box')} {TYPE} {old}\n"
        f"@cert-authority box {TYPE} {old}\n"
        f"other {TYPE} {old}\n"
    )
    store(file, "box", TYPE, BLOB, replace=True)
    assert file.read_text() == (
        f"192.0.2.7 {TYPE} {old}\n@cert-authority box {TYPE} {old}\nother {TYPE} {old}\nbox {TYPE} {KEY}\n"
    )


def test_without_name_leaves_comments_and_empty_lines() -> None:
    for line in ("\n", "# box\n", "box\n"):
        assert without_name(line, "box") == line


def test_a_file_that_cannot_be_written_leaves_nothing_aside(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text("")
    (tmp_path / f".known_hosts.{os.getpid()}.new").mkdir()
    with pytest.raises(OSError):
        store(file, "box", TYPE, BLOB)
    assert file.read_text() == ""
