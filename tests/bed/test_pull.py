"""`dflashctl pull` over the whole way, ssh and `pct exec`: awkward bytes, harm to the line, trouble here."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from bedkit.bed import Bed
from bedkit.project import Project
from proxy import Proxy

from dflashctl.agent.history.pull import CHUNK_BYTES, SAMPLE
from dflashctl.agent.records import runfolder
from dflashctl.history.places import PART

pytestmark = pytest.mark.bed

DEADLINE_S = 90.0
FRAME = (
    b"\nDFLASH-ANSWER 0123456789abcdef0123456789abcdef 2\n{}\nDFLASH-END 0123456789abcdef0123456789abcdef\n"
)
BIG = random.Random(7).randbytes(5_000_000)
AWKWARD = {
    "step_1/all bytes": bytes(range(256)) * 999,
    "step_1/sample": SAMPLE * 5,
    "step_1/frames": FRAME * 3000,
    "step_1/newlines": b"\n" * (CHUNK_BYTES + 1),
    "step_1/returns": b"\r\n" * CHUNK_BYTES,
    "step_1/" + b"\xff\nx".decode("utf-8", "surrogateescape"): b"\xff",
    "step_1/empty": b"",
    "step_1/one": b"\n",
    "step_2/frame less": BIG[: CHUNK_BYTES - 1],
    "step_2/frame": BIG[:CHUNK_BYTES],
    "step_2/frames": BIG[: 3 * CHUNK_BYTES],
    "step_2/frame more": BIG[: CHUNK_BYTES + 1],
    "step_2/model.safetensors": BIG,
}


def make_run(bed: Bed, files: Mapping[str, bytes]) -> None:
    """An ended run `t` inside that left these checkpoints."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        record = json.dumps({"version": 1, "tag": "t"}).encode()
        for name, data in {
            "record.json": record,
            **{f"checkpoints/{k}": v for k, v in files.items()},
        }.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(data), 1_700_000_000
            tar.addfile(entry, io.BytesIO(data))
    folder = f"/workspace/.dflashctl/runs/{runfolder.new_id()}"
    bed.inside("main", ["sh", "-c", f"mkdir -p {folder} && tar -xf - -C {folder}"], input=packed.getvalue())


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def project(bed: Bed, proxied: Proxy, tmp_path: Path) -> Project:
    return Project(tmp_path / "project", {"bed": bed.host_entry(port=proxied.port)})


def wait_for(what: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def pulling(project: Project, into: Path) -> Iterator[subprocess.Popen[str]]:
    """A pull of BIG that has begun to arrive."""
    pull = subprocess.Popen(
        project.argv("pull", "t", "--to", str(into)),
        cwd=project.folder,
        env=project.env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        part = into / f"big{PART}"
        wait_for(lambda: pull.poll() is not None or (part.exists() and part.stat().st_size > 500_000))
        assert pull.poll() is None, pull.communicate()
        yield pull
    finally:
        pull.kill()
        pull.communicate()


def test_every_byte_comes_home_over_a_line_that_is_cut_again_and_again(
    bed: Bed, proxied: Proxy, project: Project, tmp_path: Path
) -> None:
    make_run(bed, AWKWARD)
    proxied.cut_after(3_000_000, "down")
    document = project.json("pull", "t", "--to", str(tmp_path / "here"))
    assert tree(tmp_path / "here") == AWKWARD
    assert len(proxied.connections) >= 4, "it was cut"
    total = sum(map(len, AWKWARD.values()))
    assert (len(document["fetched"]), document["bytes"]) == (len(AWKWARD), total), "no byte came twice"
    assert proxied.moved("down") < 1.1 * total, "as they are, not as base64"
    again = project.json("pull", "t", "--to", str(tmp_path / "here"))
    assert (len(again["same"]), again["bytes"]) == (len(AWKWARD), 0)


@pytest.mark.parametrize("harm", [r"tr '\377' '?'", r"sed 's/$/\r/'"], ids=["one byte", "newlines"])
def test_what_maims_bytes_on_the_way_is_told_and_they_come_as_base64(
    harm: str, bed: Bed, project: Project, tmp_path: Path
) -> None:
    entry = bed.host_entry()
    script = f'#!/bin/sh\n{entry["python"]} "$@" | {harm}\n'
    make = "cat > /workspace/maiming && chmod 755 /workspace/maiming"
    bed.inside("main", ["sh", "-c", make], input=script.encode())
    project.write_hosts({"bed": entry | {"python": "/workspace/maiming"}})
    make_run(bed, AWKWARD)
    done = project.ok("pull", "t", "--to", str(tmp_path / "here"))
    assert tree(tmp_path / "here") == AWKWARD
    assert "something on the way changes bytes: they came as base64" in done.stderr


def test_a_second_pull_and_status_go_on_beside_one_and_ctrl_c_keeps_what_has_come(
    bed: Bed, proxied: Proxy, project: Project, tmp_path: Path
) -> None:
    make_run(bed, {"big": BIG})
    proxied.throttle(800_000)
    into = tmp_path / "here"
    with pulling(project, into) as pull:
        proxied.rules["down"].bytes_per_s = 60_000  # it lasts as long as a busy machine takes for the others
        second = project.run("pull", "t", "--to", str(into))
        assert second.returncode == 4 and "refused: big: another pull is bringing it" in second.stderr
        assert project.json("status", "t")["runs"][0]["tag"] == "t"
        assert pull.poll() is None, "they came while it was at work"
        pull.send_signal(signal.SIGINT)
        out, _ = pull.communicate(timeout=DEADLINE_S)
    assert pull.returncode == 130 and "Traceback" not in out
    proxied.throttle(None)
    kept = (into / f"big{PART}").stat().st_size
    assert kept > 500_000
    assert project.json("pull", "t", "--to", str(into))["bytes"] == len(BIG) - kept
    assert tree(into) == {"big": BIG}


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_here_is_named_and_what_came_is_not_sent_again(
    bed: Bed, project: Project, tmp_path: Path
) -> None:
    make_run(bed, {"big": BIG})
    place = tmp_path / "disk"
    with small_disk(place):
        full = project.run("pull", "t", "--to", str(place))
        assert full.returncode == 2 and "No space left on device" in full.stderr
        assert "Traceback" not in full.stderr and "make room" in full.stderr
        kept = (place / f"big{PART}").stat().st_size
        assert kept > 1_500_000
        subprocess.run(["mount", "-o", "remount,size=20m", str(place)], check=True)
        assert project.json("pull", "t", "--to", str(place))["bytes"] == len(BIG) - kept
        assert tree(place) == {"big": BIG}


def test_a_line_that_stalls_is_given_up_and_the_rest_comes_over_another(
    bed: Bed, proxied: Proxy, project: Project, tmp_path: Path
) -> None:
    make_run(bed, {"big": BIG})
    proxied.throttle(800_000)
    into = tmp_path / "here"
    with pulling(project, into) as pull:
        before = len(proxied.connections)
        proxied.stall()
        wait_for(lambda: len(proxied.connections) > before)
        proxied.resume()
        proxied.throttle(None)
        out, _ = pull.communicate(timeout=DEADLINE_S)
    assert pull.returncode == 0 and tree(into) == {"big": BIG}, out
