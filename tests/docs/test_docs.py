"""The commands in README.md and docs/ are true: each ```sh block runs here as it stands, from the repository.

A block in a section that shows a hosts.yaml runs with that file, its machine being the lab's own ssh server
under the name that the file uses. `make test` is what runs this; `make demo` runs once, in test_demo.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflashctl.cli.main import VERBS
from dflashctl.lab import lifecycle
from dflashctl.lab.state import LabEndpoint

REPOSITORY = Path(__file__).parents[2]
ELSEWHERE = {"make demo": "tests/docs/test_demo.py", "make test": "runs this very test"}
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
EXPECT = re.compile(r"^ +expect +(?P<file>\S+):(?P<line>\d+): (?P<text>.+)$", re.MULTILINE)
PATH = re.compile(r"`((?:trainer|tests|docs|bench|recipes|dflashctl/\w+)/[\w./-]+)`")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One ```sh block, and the hosts.yaml of its section if it shows one."""

    file: str
    line: int
    commands: str
    hosts: str | None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for path in PAGES:
        text = path.read_text()
        for match in FENCE.finditer(text):
            if match[1] not in ("sh", "bash", "console"):
                continue
            section = text[text.rfind("\n## ", 0, match.start()) + 1 : match.start()]
            shown = [m[2] for m in FENCE.finditer(section) if m[1] == "yaml" and "\nhosts:" in "\n" + m[2]]
            line = text.count("\n", 0, match.start()) + 2
            name = path.relative_to(REPOSITORY).as_posix()
            found.append(Block(name, line, match[2], shown[-1] if shown else None))
    return found


def to_run(block: Block) -> list[str]:
    return [
        line for line in block.commands.splitlines() if line.split("#")[0].strip() not in {"", *ELSEWHERE}
    ]


def test_the_readme_shows_both_commands() -> None:
    shown = "".join(block.commands for block in blocks() if block.file == "README.md").splitlines()
    assert set(ELSEWHERE) <= set(shown)


def test_the_line_that_the_readme_shows_as_expected_is_the_demos() -> None:
    recipe = yaml.safe_load((REPOSITORY / "recipes" / "demo.yaml").read_text())
    found = []
    for expected in recipe["deploy"]["expect"]:
        lines = enumerate((REPOSITORY / expected["file"]).read_text().splitlines(), 1)
        number, text = next(each for each in lines if re.search(expected["regex"], each[1]))
        found.append((expected["file"], str(number), text))
    assert EXPECT.findall((REPOSITORY / "README.md").read_text()) == found


def test_every_link_leads_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert target.startswith("https://") or (path.parent / target).exists(), f"{path}: {target}"


def test_the_readme_lists_every_page() -> None:
    listed = set(re.findall(r"\]\((docs/[^)#]+\.md)\)", (REPOSITORY / "README.md").read_text()))
    assert listed == {f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")}


def test_every_path_that_a_page_names_is_there() -> None:
    """`trainer/run/train.py` and its like; without a folder it is a file of a run, NAME is any name."""
    for page in PAGES:
        for name in PATH.findall(page.read_text()):
            assert "NAME" in name or (REPOSITORY / name).exists(), f"{page}: {name}"


def test_every_verb_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [verb for verb in VERBS if f"dflashctl {verb}" not in text] == []


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment of somebody who follows the page on a machine of their own."""
    home = tmp_path / "home"
    home.mkdir()
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("DFLASH", "XDG_"))}
    lab_dir = str(tmp_path / "lab")
    monkeypatch.setenv("DFLASHCTL_LAB_DIR", lab_dir)
    bin_dir = str(Path(sys.executable).parent)
    try:
        yield {
            **keep,
            "HOME": str(home),
            "PATH": f"{bin_dir}:{os.environ['PATH']}",
            "DFLASHCTL_LAB_DIR": lab_dir,
            "OMP_NUM_THREADS": "1",  # other tests use the other cores
        }
    finally:
        lifecycle.down()


def as_real_host(block: Block, endpoint: LabEndpoint, home: Path) -> str:
    """The section's hosts.yaml with what no test can have replaced: the machine behind the name, its Python.
    Returns its path."""
    data: dict[str, Any] = yaml.safe_load(block.hosts or "")
    (home / ".ssh").mkdir(mode=0o700)
    lines = []
    for host in data["hosts"].values():
        assert host["engine"] == "pct" and host["container"] == endpoint.container
        lines += [
            f"Host {host['ssh']['host']}",
            f"  HostName {endpoint.host}\n  Port {endpoint.port}",
            f"  IdentityFile {endpoint.key}\n  UserKnownHostsFile {home}/.ssh/known_hosts",
        ]
        host.update(python=endpoint.python, home=endpoint.home, path=endpoint.path)
        host["env"] = {**host.get("env", {}), **endpoint.env}
        host["code_root"] = endpoint.code_root
    (home / ".ssh" / "config").write_text("\n".join(lines) + "\n")
    path = home / "hosts.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.mark.lab
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", [b for b in blocks() if to_run(b)], ids=str)
def test_commands_run(block: Block, reader: dict[str, str]) -> None:
    if block.hosts is not None:
        endpoint = lifecycle.up().record.endpoint
        reader["DFLASHCTL_HOSTS"] = as_real_host(block, endpoint, Path(reader["HOME"]))
    script = "set -eux\n" + "\n".join(to_run(block))
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=REPOSITORY,
        env=reader,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
