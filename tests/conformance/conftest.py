"""Places for the table, one of each for a pytest worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pctkit import lxc, userns
from unproven import did_not_run


@pytest.fixture(scope="session")
def userns_place() -> Iterator[userns.Userns]:
    """Containers of plain namespaces. A machine that refuses them fails here, with the reason."""
    reason = userns.reason_against()
    if reason:
        pytest.fail(reason, pytrace=False)
    place = userns.Userns()
    try:
        yield place
    finally:
        place.close()


@pytest.fixture(scope="session")
def lxc_place() -> Iterator[lxc.Lxc]:
    """Real LXC containers."""
    reason = lxc.reason_against()
    if reason:
        did_not_run(f"pct over real LXC containers: {reason}")
    place = lxc.Lxc()
    try:
        yield place
    finally:
        place.close()
