"""Places for the table, one of each for a pytest worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pctkit import lxc, userns


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
    """Real LXC containers. Where they cannot be had: a failure with CI=true, elsewhere a skip that says
    why."""
    reason = lxc.reason_against()
    if reason:
        text = f"DID NOT RUN: pct over real LXC containers: {reason}"
        pytest.fail(text, pytrace=False) if os.environ.get("CI") == "true" else pytest.skip(text)
    place = lxc.Lxc()
    try:
        yield place
    finally:
        place.close()
