"""Fixtures of the bed: `bed` (a running host with containers), `proxied` (a harmful line to its sshd).

A bed that cannot run here is never silent: in CI it fails the tests, elsewhere one loud line at the end says
what did not run and how to get it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import clock
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bedkit import need
from bedkit.bed import Bed, sessions
from bedkit.ground import make_trees
from bedkit.project import Project
from bedkit.rootfs import RootfsError
from proxy import Proxy
from unproven import did_not_run

Project.forked = True
_LOUD = "the bed. {}. To get it, {}"


@pytest.fixture(scope="session")
def bed_session() -> Iterator[Bed]:
    """One bed for all tests of this worker."""
    reason = need.reason_against()
    if reason is not None:
        did_not_run(_LOUD.format(reason, need.HOW))
    try:
        with clock.stopped():  # a slow mirror, or another worker that waits for it
            make_trees()
    except RootfsError as error:  # no network, no mirror: only this may be missing where the bed could run
        mirror = "let this machine reach a Debian mirror once, or set DFLASHCTL_BED_CACHE"
        did_not_run(_LOUD.format(error, mirror))
    yield from sessions()


@pytest.fixture
def bed(bed_session: Bed) -> Iterator[Bed]:
    """The bed as new: healthy GPUs, empty containers, nobody in them."""
    try:
        yield bed_session
    finally:
        bed_session.reset()


@pytest.fixture
def proxied(bed: Bed) -> Iterator[Proxy]:
    """A line to the bed's sshd that can be harmed; its port's host key is known."""
    with Proxy(bed.port) as proxy:
        with open(bed.known_hosts, "a") as f:
            f.write(bed.known_hosts_line(proxy.port))
        yield proxy
