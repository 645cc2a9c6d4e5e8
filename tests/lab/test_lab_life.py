"""The lab comes up, is found, goes, and leaves nothing."""

from __future__ import annotations

import subprocess

import pytest

from dflashctl.lab import lifecycle
from dflashctl.lab.state import Record, load_endpoint

pytestmark = pytest.mark.lab


def ssh(record: Record, command: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    argv = lifecycle.ssh_argv(record.endpoint)
    return subprocess.run([*argv, command], capture_output=True, timeout=60, check=False, **options)


def test_the_fixture_lab_answers_ssh(lab: Record) -> None:
    assert load_endpoint() == lab.endpoint
    done = ssh(lab, "hostname; exit 7")
    assert (done.returncode, done.stdout) == (7, b"pve1\n")
