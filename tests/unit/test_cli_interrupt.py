"""Ctrl-C at any time, and whatever it meets, ends the program with a word and exit code 130.

Run: python -m pytest tests/unit/test_cli_interrupt.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from frame_kit import ROOT, command

from dflashctl.cli import main as frame

pytestmark = pytest.mark.usefixtures("log")


def test_ctrl_c_says_interrupted(verb: Any, capsys: pytest.CaptureFixture[str], log: Path) -> None:
    def wait() -> None:
        raise KeyboardInterrupt

    verb(wait)
    assert frame.run(["status"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not log.exists()


def test_ctrl_c_in_the_real_program(tmp_path: Path) -> None:
    script = (
        "import sys, time, types, typer\n"
        "module = types.ModuleType('dflashctl.cli.status')\n"
        "module.app = typer.Typer()\n"
        "@module.app.command()\n"
        "def wait():\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(30)\n"
        "sys.modules['dflashctl.cli.status'] = module\n"
        "from dflashctl.cli.main import main\n"
        "main(['status'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr.read() == "interrupted\n"


def test_ctrl_c_while_the_program_is_still_being_imported(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = command("status", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_that_python_wrapped_into_another_error(
    verb: Any, capsys: pytest.CaptureFixture[str], log: Path
) -> None:
    def build_a_class() -> None:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    verb(build_a_class)
    assert frame.run(["status"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not log.exists()


def test_ctrl_c_in_a_callback_is_not_lost() -> None:
    script = (
        "import sys, time, types, typer, weakref\n"
        "module = types.ModuleType('dflashctl.cli.status')\n"
        "module.app = typer.Typer()\n"
        "class Thing: ...\n"
        "def interrupt(_):\n"
        "    raise KeyboardInterrupt\n"
        "@module.app.command()\n"
        "def wait():\n"
        "    thing = Thing()\n"
        "    reference = weakref.ref(thing, interrupt)\n"
        "    del thing\n"
        "    for _ in range(1000): time.sleep(0.01)\n"
        "sys.modules['dflashctl.cli.status'] = module\n"
        "from dflashctl.start import main\n"
        "sys.argv[1:] = ['status']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_ctrl_c_that_something_made_another_error_of_is_still_ctrl_c() -> None:
    """As pydantic does while it builds a model: its error does not carry the cause."""
    script = (
        "import os, signal, sys, types, typer\n"
        "module = types.ModuleType('dflashctl.cli.status')\n"
        "module.app = typer.Typer()\n"
        "@module.app.command()\n"
        "def wait():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        raise ValueError('Error building the serializer') from None\n"
        "sys.modules['dflashctl.cli.status'] = module\n"
        "from dflashctl.start import main\n"
        "sys.argv[1:] = ['status']\n"
        "main()\n"
    )
    # A background job ignores SIGINT, and its children inherit that.
    done = subprocess.run(
        [sys.executable, "-c", f"import signal; signal.signal(2, signal.default_int_handler)\n{script}"],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
