"""Deploys over broken lines, and interrupted ones.

After each: the old release still runs, no half state, no lock, no staging is left, and the message says what
to do. Run: python -m pytest tests/bed/test_deploy_faults.py   (the whole campaign: -m soak)
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path

import pytest
from bedkit.bed import Bed
from deploy_faults import UNREACHABLE, Case, staged
from proxy import Proxy

pytestmark = pytest.mark.bed


@pytest.fixture
def case(bed: Bed, tmp_path: Path) -> Case:
    return Case(bed, tmp_path / "project")


CUTS_EACH = 2


SEED = 20240607


# --- the line -----------------------------------------------------------------------------------------------


def whole_conversation(case: Case, proxy: Proxy) -> int:
    case.through(proxy.port)
    case.change()
    case.project.ok("deploy")
    case.before = case.current()
    return proxy.moved("up")


def cut_at(case: Case, proxy: Proxy, position: int) -> None:
    """Cut the connection after so many bytes, then look, then deploy again."""
    case.through(proxy.port)
    case.change()
    proxy.cut_after(position, "up")
    done = case.project.run("deploy", timeout=90)
    proxy.rules["up"].cut_at = None
    assert done.returncode in (0, UNREACHABLE), f"cut at {position}: {done.returncode} {done.stderr}"
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert done.stderr.count("error:") == 1
    case.unharmed(switched=False if done.returncode and position < 200_000 else None)


def test_the_line_cut_anywhere(case: Case, proxied: Proxy) -> None:
    whole = whole_conversation(case, proxied)
    rng = random.Random(SEED)
    steps = [rng.randrange(2_000, whole) for _ in range(CUTS_EACH - 1)] + [whole - 400]
    for position in steps:
        cut_at(case, proxied, position)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_line_cut_at_every_step(case: Case, proxied: Proxy) -> None:
    whole = whole_conversation(case, proxied)
    rng = random.Random(SEED + 1)
    for number in range(60):
        cut_at(case, proxied, rng.randrange(500, whole) if number % 3 else whole - 20 * number - 1)


def test_a_laptop_that_vanishes_without_a_goodbye_leaves_nothing(case: Case) -> None:
    """Killed outright while the archive is on its way: the host cleans up by itself."""
    case.change(noise=30_000_000)
    process = subprocess.Popen(
        case.project.argv("deploy"),
        cwd=case.project.folder,
        env=case.project.env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 90
        while not staged(case):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        folder = case.bed.on_host(["sh", "-c", f"stat -c '%a %U' {case.staging}/*"]).stdout
        assert folder == b"700 root\n"
    finally:
        process.kill()
        process.wait(10)
    case.unharmed()


def test_staging_of_a_desk_that_was_killed_is_swept_by_the_next(case: Case) -> None:
    case.change(noise=30_000_000)
    process = subprocess.Popen(
        case.project.argv("deploy"),
        cwd=case.project.folder,
        env=case.project.env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 90
    while not staged(case):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    [lock] = Path(f"/proc/{case.bed.pid}/root/run/dflashctl").glob(f"ct{case.bed.ids['main']}-*.lock")
    holder = json.loads(lock.read_text())
    assert holder["what"].startswith("steady ") and lock.stat().st_mode & 0o777 == 0o600
    case.bed.on_host(["kill", "-9", str(holder["pid"])])
    _, said = process.communicate(timeout=60)
    assert process.returncode == UNREACHABLE and "Traceback" not in said
    assert len(staged(case)) == 1, "nobody was there to remove it"
    assert case.current() == case.before
    case.deploy()
    assert case.current() != case.before and case.litter() == []


# --- Ctrl-C -------------------------------------------------------------------------------------------------


def test_ctrl_c_at_every_step(case: Case) -> None:
    """While the lock is taken, while bytes travel, while it is pushed, while it is proven inside."""
    root = Path(f"/proc/{case.bed.pid}/root")
    inside = case.bed.layout.rootfs(case.bed.ids["main"])
    code = root / f"{inside}{case.code}".lstrip("/")
    lock = root / "run/dflashctl"
    moments = {
        "lock": lambda: any(lock.glob("ct*.lock")),
        "staged": lambda: staged(case),
        "incoming": lambda: any(code.glob(".incoming-*")),
        "building": lambda: any((code / "releases").glob(".tmp-*")),
    }
    for name, look in moments.items():
        case.change(noise=4_000_000)
        code_, said = case.interrupted_at(look)
        assert code_ in (0, 130, -2), f"{name}: {code_} {said}"
        assert "Traceback" not in said
        if code_ == 130 and name in ("lock", "staged"):
            assert "nothing was switched" in said, f"{name}: {said}"
        case.unharmed(switched=None if code_ == 0 or name == "building" else False)
