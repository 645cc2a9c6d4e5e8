"""What `pct` and sudo say, as errors. Texts as the real tools print them.

Run: python -m pytest tests/unit/test_remote_pct_messages.py
"""

from __future__ import annotations

import pytest

from dflashctl.errors import ContainerDown, DflashError, Locked, NotFound, UsageError
from dflashctl.remote import freezer
from dflashctl.remote.pct_messages import classify, classify_sudo, is_lock_timeout, without_lock_notice

NO_CONFIG = "Configuration file 'nodes/pve1/lxc/999.conf' does not exist\n"
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
    "stderr",
    [
        "",
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


def test_only_a_lock_timeout_is_worth_another_try() -> None:
    assert is_lock_timeout(LOCKED)
    assert not is_lock_timeout("CT is locked (backup)\n")
    assert not is_lock_timeout("trying to acquire lock...\n OK\n")


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("trying to acquire lock...\n OK\n", ""),
        ("trying to acquire lock... OK\n", ""),
        ("trying to acquire lock...\n OK\nfailed to open /x\n", "failed to open /x"),
        ("failed to open OK\n", "failed to open OK"),
        ("", ""),
    ],
)
def test_a_lock_that_was_granted_is_no_complaint(said: str, kept: str) -> None:
    assert without_lock_notice(said) == kept


def test_sudo_speaks_first_or_not_at_all() -> None:
    assert classify_sudo("sudo: a terminal is required to read the password\n", "w") is not None
    assert classify_sudo("my program: sudo: no\n", "w") is None


def test_the_three_signs_of_a_frozen_container() -> None:
    v2 = b"4242 (init) S 1 2\n0::/lxc/200/ns/init.scope\n"
    v1 = b"4242 (init) S 1 2\n12:freezer:/lxc/200\n3:cpu,cpuacct:/lxc/200\n0::/\n"
    stopped = b"4242 (a ) T) T 1 2\n0::/\n"
    assert freezer.freezer_files(v2) == ["/sys/fs/cgroup/lxc/200/ns/init.scope/cgroup.events"]
    assert "/sys/fs/cgroup/freezer/lxc/200/freezer.state" in freezer.freezer_files(v1)
    assert freezer.is_stopped(stopped) and not freezer.is_stopped(v2)
    assert not freezer.is_stopped(b"4242 (x) T) S 1 2\n")  # a name that looks like a state
    assert freezer.says_frozen(b"populated 1\nfrozen 1\n")
    assert freezer.says_frozen(b"FROZEN\n")
    assert not freezer.says_frozen(b"populated 1\nfrozen 0\n")
    assert not freezer.says_frozen(b"THAWED\n")
    assert freezer.init_pid(b"name: ct\npid: 4242\nstatus: running\n") == 4242
    assert freezer.init_pid(b"status: stopped\n") is None


@pytest.mark.parametrize(
    ("process", "states", "expected"),
    [
        (b"42 (init) T 1\n0::/lxc/200\n", b"", True),
        (b"42 (init) S 1\n0::/lxc/200\n", b"populated 1\nfrozen 1\n", True),
        (b"42 (init) S 1\n0::/lxc/200\n", b"populated 1\nfrozen 0\n", False),
        (b"", b"", False),
    ],
)
def test_the_freezer_is_asked_in_order(process: bytes, states: bytes, expected: bool) -> None:
    answers = {"pct": b"pid: 42\n", "/proc/42/stat": process}

    def run(argv: object) -> bytes:
        words = list(argv)  # type: ignore[call-overload]
        return answers["pct"] if words[0] == "pct" else answers.get(words[1], states)

    assert freezer.is_frozen(run, 200) is expected
