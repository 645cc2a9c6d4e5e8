"""Run with: pytest tests/local/test_probe_ssh.py. `inspect` and `probe` through engine `ssh`: the same
commands, one and three, over a real connection to this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # for remote_box

from remote_box import Box

from dflashctl.config.hosts import Host
from dflashctl.inspect import reading
from dflashctl.inspect.subject import Subject
from dflashctl.probe import running
from dflashctl.probe.plan import of_file
from dflashctl.remote.ssh import SshEngine

CANNED = """
import os
with os.fdopen(int(os.environ["DFLASH_ANSWER_FD"]), "w") as out:
    out.write('{"progress": "half"}\\n{"answer": {"env": {"torch": "2.11.0"}}}\\n')
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshEngine]:
    """`commands` holds one entry for each remote command."""
    box = Box(tmp_path)
    folders = {name: str(tmp_path / name) for name in ("workdir", "log_dir", "state_dir", "code_root")}
    (tmp_path / "workdir").mkdir()
    host = box.host("ssh", python=sys.executable, path=os.environ["PATH"], **folders)
    commands: list[str] = []
    genuine = SshEngine.run

    def counted(self: Any, *args: Any, **how: Any) -> Any:
        commands.append("command")
        return genuine(self, *args, **how)

    monkeypatch.setattr(SshEngine, "run", counted)
    with SshEngine(host, box.target) as made:
        made.commands = commands  # type: ignore[attr-defined]
        yield made
    box.close()


def test_a_look_is_one_command(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{reading.SENT_AS}/__init__.py": "", f"{reading.SENT_AS}/torch_facts.py": CANNED}
    monkeypatch.setattr(reading, "package_files", lambda package, sent_as: files)
    heard: list[str] = []
    host: Host = engine.host
    facts = reading.look(engine, Subject(host), ["env"], progress=heard.append)
    assert engine.commands == ["command"] and facts.machine["torch"] == "2.11.0"
    assert heard[-1] == f"{host.name}: half"


def test_a_file_is_three_commands(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = of_file("mine.py", "print('größer', flush=True)", [], tag=None, deadline_s=120, env={})
    heard: list[str] = []
    # Whatever GPUs this machine has, they are looked at and left alone.
    monkeypatch.setattr(running, "gpus_for", lambda box, outside, wish, want: ((), ""))
    started = running.start(engine, work, None)
    watched = running.watch(engine, started.plan, work, on_log=heard.append)
    assert len(engine.commands) == 3 and "".join(heard) == "größer\n"
    assert (watched.end.exit or {})["code"] == 0
