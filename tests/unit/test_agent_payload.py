"""What travels to the machine: the agent's zip, its loader, the envelope of a request.

Run: python -m pytest tests/unit/test_agent_payload.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from agent_kit import NONCE, local_host

from dflashctl.agent import main as agent_main
from dflashctl.agent import payload
from dflashctl.remote import agent_call
from dflashctl.remote.agent_call import AnswerReader, call
from dflashctl.remote.local import LocalEngine


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    return LocalEngine(local_host(tmp_path))


def test_the_loader_needs_no_clever_quoting() -> None:
    assert "'" not in agent_call.LOADER and "\n" not in agent_call.LOADER and "!" not in agent_call.LOADER


def test_the_loader_works_where_python_has_no_memfd(tmp_path: Path) -> None:
    without = f"import os\nif hasattr(os, 'memfd_create'): del os.memfd_create\n{agent_call.LOADER}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", without],
        input=agent_call.pack("ping", {"echo": 1}, NONCE, 10),
        capture_output=True,
        timeout=20,
        check=False,
    )
    reader = AnswerReader(NONCE)
    reader.feed(done.stdout)
    assert (reader.body() or {})["result"]["echo"] == 1


def test_the_payload_depends_on_the_sources_alone() -> None:
    assert payload.build_payload() == payload.build_payload()
    with zipfile.ZipFile(BytesIO(payload.build_payload())) as archive:
        names = archive.namelist()
        assert names == sorted(names)
        assert {"__main__.py", "dflash_agent/__init__.py", "dflash_agent/main.py"} <= set(names)
        assert all(info.date_time == (1980, 1, 1, 0, 0, 0) for info in archive.infolist())


def test_the_payload_is_the_same_from_a_zipped_install(tmp_path: Path) -> None:
    """As from a wheel that was not unpacked."""
    package = Path(agent_main.__file__).parent
    bundle = tmp_path / "bundle.zip"
    with zipfile.ZipFile(bundle, "w") as archive:
        archive.writestr("dflashctl/__init__.py", "__version__ = '0'\n")
        for source in package.rglob("*.py"):
            archive.write(source, f"dflashctl/agent/{source.relative_to(package)}")
    script = (
        "import sys, hashlib\n"
        f"sys.path.insert(0, {str(bundle)!r})\n"
        "from dflashctl.agent import payload\n"
        "assert '.zip' in payload.__file__\n"
        "print(hashlib.sha256(payload.build_payload()).hexdigest())"
    )
    printed = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=20, check=True
    )
    import hashlib

    assert printed.stdout.strip() == hashlib.sha256(payload.build_payload()).hexdigest()


def test_the_agent_knows_the_zip_that_it_came_from(tmp_path: Path) -> None:
    """So a supervisor is of the version that launched it, whatever the laptop sends later."""
    archive = tmp_path / "agent.zip"
    archive.write_bytes(payload.build_payload())
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(archive)!r})\n"
        "from dflash_agent import payload\n"
        f"open({str(tmp_path / 'supervisor.pyz')!r}, 'wb').write(payload.payload_bytes())"
    )
    subprocess.run([sys.executable, "-I", "-c", script], timeout=20, check=True)
    written = tmp_path / "supervisor.pyz"
    assert written.read_bytes() == archive.read_bytes()
    usage = subprocess.run(
        [sys.executable, "-I", str(written), "dance"], capture_output=True, text=True, timeout=20, check=False
    )
    assert usage.returncode == 2 and "supervise RUN_DIR" in usage.stderr


def test_every_operation_of_the_table_exists() -> None:
    for op in agent_main.OPS:
        assert callable(agent_main.find_op(op)), op


@pytest.mark.skipif(shutil.which("python3") is None, reason="no other python3 on this machine's PATH")
def test_the_machine_s_own_python_answers_too(tmp_path: Path) -> None:
    engine = LocalEngine(local_host(tmp_path, python=shutil.which("python3")))
    assert call(engine, "ping", {}, where="host", timeout_s=20)["protocol"] == agent_main.PROTOCOL


def test_the_envelope_is_json_in_ascii_after_the_zip() -> None:
    data = agent_call.pack("ping", {"é": 1}, NONCE, 7.0)
    size = int.from_bytes(data[:8], "big")
    envelope = data[8 + size + 8 :]
    assert envelope.isascii()
    assert json.loads(envelope) == {
        "op": "ping",
        "nonce": NONCE,
        "timeout_s": 7.0 + agent_call.AGENT_GRACE_S,
        "request": {"é": 1},
    }
