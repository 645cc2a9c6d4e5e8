"""Each way in which a machine refuses namespaces gets its reason and its remedy."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dflashctl.errors import ExitCode, Unreachable, UsageError
from dflashctl.lab import refused
from dflashctl.lab.refused import Facts

OPEN = Facts(apparmor_restricts=None, userns_clone=None, max_user_namespaces=15000, in_container=False)
UBUNTU = Facts(apparmor_restricts=1, userns_clone=1, max_user_namespaces=15000, in_container=False)
DEBIAN_10 = Facts(apparmor_restricts=None, userns_clone=0, max_user_namespaces=15000, in_container=False)
NONE = Facts(apparmor_restricts=0, userns_clone=None, max_user_namespaces=0, in_container=False)
DOCKER = Facts(apparmor_restricts=None, userns_clone=None, max_user_namespaces=15000, in_container=True)


@pytest.mark.parametrize(
    ("stage", "number", "known", "why", "helps"),
    [
        ("map", errno.EPERM, UBUNTU, "AppArmor", "apparmor_restrict_unprivileged_userns=0"),
        ("mount", errno.EACCES, UBUNTU, "AppArmor", "apparmor_restrict_unprivileged_userns=0"),
        ("unshare", errno.EPERM, DEBIAN_10, "for root", "kernel.unprivileged_userns_clone=1"),
        ("unshare", errno.ENOSPC, NONE, "allows no user namespaces", "user.max_user_namespaces="),
        ("unshare", errno.ENOSPC, OPEN, "no more user namespaces", "user.max_user_namespaces="),
        ("unshare", errno.EPERM, DOCKER, "this container", "seccomp=unconfined"),
        ("proc", errno.EPERM, DOCKER, "this container", "systempaths=unconfined"),
        ("unshare", errno.EINVAL, OPEN, "CONFIG_USER_NS", "virtual machine"),
        ("unshare", errno.EPERM, OPEN, "refuses user namespaces", "virtual machine"),
        ("proc", errno.EPERM, OPEN, "step proc", "virtual machine"),
    ],
)
def test_refusals_have_a_reason_and_a_remedy(
    stage: str, number: int, known: Facts, why: str, helps: str
) -> None:
    error = refused.explain({"stage": stage, "errno": number, "error": "x: no"}, Path("/l/host.log"), known)
    assert isinstance(error, UsageError)
    assert why in error.what and refused.NEVER in error.what
    assert helps in error.next


def test_a_full_disk_is_not_taken_for_a_refusal() -> None:
    told = {"stage": "mount", "errno": errno.ENOSPC, "error": "mount dir /srv: No space left on device"}
    error = refused.explain(told, Path("/l/host.log"), OPEN)
    assert "no room" in error.what and error.where == "/l" and "DFLASHCTL_LAB_DIR" in error.next


def test_other_failures_point_at_the_log() -> None:
    for told in ({}, {"stage": "start", "errno": 0, "error": "ImportError('x')"}, {"pid": 3}):
        error = refused.explain(told, Path("/l/host.log"), OPEN)
        assert isinstance(error, Unreachable) and error.where == "/l/host.log"


def test_macos_is_told_that_it_has_no_namespaces() -> None:
    with pytest.raises(UsageError, match="macOS has no namespaces") as caught:
        refused.check_platform("darwin")
    assert caught.value.exit_code == ExitCode.USAGE
    refused.check_platform("linux")


def test_facts_of_this_machine_can_be_read() -> None:
    found = refused.facts()
    assert found.max_user_namespaces is None or found.max_user_namespaces >= 0
