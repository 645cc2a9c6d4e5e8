"""What `pct` and sudo say, as errors. Texts as the real tools print them.

Run: python -m pytest tests/unit/test_remote_pct_messages.py
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from dflashctl.errors import ContainerDown, DflashError, Locked, NotFound, Unreachable, UsageError
from dflashctl.remote import freezer
from dflashctl.remote.pct_messages import (
    classify,
    classify_sudo,
    is_lock_timeout,
    starting,
)

NO_CONFIG = "Configuration file 'nodes/pve1/lxc/999.conf' does not exist\n"
NO_CLUSTER = (
    "ipcc_send_rec[1] failed: Connection refused\nipcc_send_rec[2] failed: Connection refused\n"
    "Unable to load access control list: Connection refused\n"
)
NOT_FOR_YOU = NO_CLUSTER.replace("Connection refused", "Unknown error -1")
"""What a user other than root meets on a node: the question whether it is root comes later."""
LOCKED = "trying to acquire lock...\ncan't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout\n"

TABLE = [
    ("container '200' not running!\n", ContainerDown, "not running"),
    ("Error: container '200' not running!\n", ContainerDown, "not running"),
    ("can only push files to a running CT\n", ContainerDown, "not running"),
    (
        "can only pull files from a running VM at /usr/share/perl5/PVE/CLI/pct.pm line 645.\n",
        ContainerDown,
        "",
    ),
    (NO_CONFIG, NotFound, "no container 999 on node pve1"),
    (NO_CLUSTER, Unreachable, "pve-cluster"),
    (NO_CLUSTER.splitlines()[0] + "\n" + NO_CONFIG, Unreachable, "ipcc_send_rec[1] failed"),
    (NOT_FOR_YOU, UsageError, "ssh.sudo: true"),
    (NOT_FOR_YOU.replace("Unknown error -1", "Is a directory"), UsageError, "ssh.user: root"),
    (LOCKED, Locked, "pve-config-200.lock"),
    ("CT is locked (backup)\n", Locked, "backup"),
    ("please run as root\n", UsageError, "root"),
    ("bash: line 1: pct: command not found\n", UsageError, "pct: command not found"),
    ("sh: 1: pct: not found\n", UsageError, "pct: command not found"),
    ("zsh:1: command not found: pct\n", UsageError, "pct: command not found"),
    ("sudo: a password is required\n", UsageError, "a password is required"),
    ("bash: line 1: sudo: command not found\n", UsageError, "sudo: command not found"),
    ("sudo: pct: command not found\n", UsageError, "pct: command not found"),
    (
        "400 Parameter verification failed.\nvmid: value does not look like a valid VM ID\n"
        "pct exec <vmid> [<extra-args>] [OPTIONS]\n",
        UsageError,
        "does not look like a valid VM ID",
    ),
]


@pytest.mark.parametrize(("stderr", "kind", "words"), TABLE, ids=[row[0][:40] for row in TABLE])
def test_messages_of_pct(stderr: str, kind: type[DflashError], words: str) -> None:
    error = classify(stderr, container=200, where="ct200")
    assert type(error) is kind
    assert words in str(error)
    assert error.where == "ct200"


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("bash: pct: Kommando nicht gefunden.\n", "pct: Kommando nicht gefunden."),
        ("bash: Zeile 1: pct: Kommando nicht gefunden.\n", "pct: Kommando nicht gefunden."),
        ("bash: ligne 1: pct\u00a0: commande introuvable\n", "pct: commande introuvable"),
        ("bash: \u884c 1: pct: \u672a\u627e\u5230\u547d\u4ee4\n", "pct: \u672a\u627e\u5230\u547d\u4ee4"),
        ("bash: line 1: pct: command not found\n", "pct: command not found"),
        ("-bash: pct: Permission denied\n", "pct: Permission denied"),
        ("fish: Unknown command: pct\n", "pct: command not found"),
        ("zsh:1: command not found: pct\n", "pct: command not found"),
        ("sudo: pct: Befehl nicht gefunden\n", "pct: Befehl nicht gefunden"),
        ("bash: warning: setlocale: LC_ALL: cannot change locale (de_DE.UTF-8)\nsh: 1: sudo: not found\n",
         "sudo: command not found"),
    ],
)  # fmt: skip
def test_a_pct_that_cannot_be_run_is_told_in_every_language(stderr: str, words: str) -> None:
    error = classify(stderr, container=200, where="ct200")
    assert type(error) is UsageError and error.what == words
    assert "Proxmox host" in error.next


@pytest.mark.parametrize(
    "stderr",
    [
        "",
        "train.sh: pct: 97 of 100\nTraceback (most recent call last):\n",
        "ValueError: pct: negative\n",
        "Traceback (most recent call last):\n  ValueError: container ran away\n",
        "lxc-attach: 200: ../src/lxc/attach.c: lxc_attach_run_command: 1841 No such file or directory -"
        ' Failed to exec "nope"\n',
        "failed to open /nope: No such file or directory\n",
        "python3: command not found\n",
    ],
)
def test_words_of_the_program_are_not_taken_for_pct(stderr: str) -> None:
    assert classify(stderr, container=200, where="ct200") is None


def test_a_container_that_is_not_there_may_be_on_another_node() -> None:
    error = classify(NO_CONFIG, container=999, where="ct200")
    assert error is not None
    assert error.exit_code == 6
    assert "another node" in error.next


def test_a_user_without_root_is_told_about_the_sudo_setting() -> None:
    for text in ("please run as root\n", "bash: pct: command not found\n"):
        error = classify(text, container=200, where="ct200")
        assert error is not None
        assert "ssh.sudo: true" in error.next


def test_under_sudo_it_is_the_cluster_file_system_that_fails() -> None:
    error = classify(NOT_FOR_YOU, container=200, where="ct200", sudo=True)
    assert type(error) is Unreachable and "pve-cluster" in error.next and "sudo" not in error.next


def test_only_a_lock_timeout_is_worth_another_try() -> None:
    assert is_lock_timeout(LOCKED)
    assert not is_lock_timeout("CT is locked (backup)\n")
    assert not is_lock_timeout("trying to acquire lock...\n OK\n")


def test_sudo_speaks_first_or_not_at_all() -> None:
    assert classify_sudo("sudo: a terminal is required to read the password\n", "w") is not None
    assert classify_sudo("my program: sudo: no\n", "w") is None
    unresolved = "sudo: unable to resolve host pve: Name or service not known\n"
    assert classify_sudo(unresolved, "w") is None, "a warning: it goes on"
    refused = classify_sudo(unresolved + "sudo: a password is required\n", "w")
    assert refused is not None and refused.what == "sudo refused: a password is required"


def test_a_sudo_that_wants_a_terminal_is_not_told_to_want_no_password() -> None:
    refused = classify_sudo("sudo: sorry, you must have a tty to run sudo\n", "w")
    assert refused is not None and "requiretty" in refused.next and "NOPASSWD" not in refused.next
    asked = classify_sudo("sudo: a terminal is required to read the password\n", "w")
    assert asked is not None and "NOPASSWD" in asked.next


def test_the_signs_of_a_frozen_container() -> None:
    assert freezer.is_stopped(b"4242 (a ) T) T 1 2\n0::/\n")
    assert not freezer.is_stopped(b"4242 (init) S 1 2\n")
    assert not freezer.is_stopped(b"4242 (x) T) S 1 2\n")  # a name that looks like a state
    assert freezer.says_frozen(b"1 (init) S 1\npopulated 1\nfrozen 1\n")
    assert freezer.says_frozen(b"1 (init) S 1\nFROZEN\n")
    assert not freezer.says_frozen(b"1 (init) S 1\npopulated 1\nfrozen 0\n")
    assert not freezer.says_frozen(b"1 (init) S 1\nTHAWED\n")


V2 = {"4242/cgroup": "0::/lxc/200/ns/init.scope\n"}
V1 = {"4242/cgroup": "12:pids:/x\n7:cpu,freezer:/lxc/200\n3:cpu,cpuacct:/lxc/200\n1:name=systemd:/y\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "frozen"),
    [
        ({"4242/stat": "4242 (a ) S) T 1\n", **V2}, True),
        (
            {"4242/stat": "4242 (init) S 1\n", **V2, "cg/lxc/200/ns/init.scope/cgroup.events": "frozen 1\n"},
            True,
        ),
        (
            {"4242/stat": "4242 (init) S 1\n", **V2, "cg/lxc/200/ns/init.scope/cgroup.events": "frozen 0\n"},
            False,
        ),
        ({"4242/stat": "4242 (init) S 1\n", **V1, "cg/freezer/lxc/200/freezer.state": "FROZEN\n"}, True),
        ({"4242/stat": "4242 (init) S 1\n", **V1, "cg/freezer/lxc/200/freezer.state": "THAWED\n"}, False),
        ({"4242/stat": "4242 (init) S 1\n", **V1}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("by", ["lxc-info", "pct"])
def test_the_freezer_is_asked_in_one_command(
    files: dict[str, str], frozen: bool, by: str, tmp_path: Path
) -> None:
    """The script itself, over a made-up /proc and /sys/fs/cgroup."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    programs = {
        "lxc-info": "echo 4242" if by == "lxc-info" else "echo 200 does not exist; exit 1",
        "pct": "echo name: ct; echo pid: 4242; echo status: running" if by == "pct" else "exit 9",
    }
    for name, body in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def run(argv: Sequence[str]) -> bytes:
        env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
        return subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout

    assert freezer.is_frozen(run, 200, proc=str(tmp_path), cgroups=str(tmp_path / "cg")) is frozen


def test_a_container_that_is_stopped_is_not_frozen(tmp_path: Path) -> None:
    for said in ("-1", "", "x 1"):
        program = tmp_path / "lxc-info"
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o755)
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        run = lambda argv, env=env: subprocess.run(argv, env=env, capture_output=True).stdout  # noqa: E731
        assert freezer.is_frozen(run, 200, proc=str(tmp_path)) is False


@pytest.mark.parametrize(
    ("engine", "container", "command"),
    [
        ("pct", 200, "on the host: pct start 200"),
        ("lab", 200, "dflashctl lab up"),  # its host has no shell that a person would know of
        ("lab", 201, "on the host: pct start 201"),  # `lab up` starts the one container that it made
    ],
)
def test_a_stopped_container_is_started_where_it_can_be(engine: str, container: int, command: str) -> None:
    assert starting(engine, container) == command
    said = classify(f"container '{container}' not running!\n", container=container, where="h", engine=engine)
    assert said is not None and said.next == command
