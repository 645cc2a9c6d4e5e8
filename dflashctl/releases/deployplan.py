"""From what is here and what is there to what a deploy will do. Pure: no file, no network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dflashctl.agent.releases.release import FILE, PROGRAM
from dflashctl.errors import VerificationFailed
from dflashctl.releases.sources import Snapshot, SourceFile
from dflashctl.render.text import count, plural, size

BLOCK_BYTES = 4096
SPARE_BYTES = 4 << 20
SPARE_INODES = 64


@dataclass(frozen=True)
class LocalCompile:
    """What this machine's Python says about the sources."""

    python_version: str
    count: int
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeployPlan:
    """What will happen on one host."""

    release: str
    before: str | None
    exists: bool
    total: int
    send: tuple[SourceFile, ...]
    need_bytes: int
    warnings: tuple[str, ...] = ()
    compiled_here: LocalCompile | None = None
    facts: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def send_bytes(self) -> int:
        return sum({file.sha256: file.size for file in self.send}.values())

    @property
    def is_current(self) -> bool:
        return self.exists and self.before == self.release

    def actions(self) -> list[str]:
        """What `--dry-run` prints, one line a step."""
        steps = []
        if self.send:
            part = f"{count(len(self.send))} of {plural(self.total, 'file')}"
            steps.append(f"send {part}, {size(self.send_bytes)} unpacked")
        if self.exists:
            steps.append(f"verify {plural(self.total, 'file')} of release {self.release[:8]}, which is there")
        else:
            kept = plural(self.total - len(self.send), "file")
            steps.append(f"unpack release {self.release[:8]}, taking {kept} from releases that are there")
        steps.append(f"prove it with {self.facts.get('python')}: sha256, compile, expect, import")
        if self.is_current:
            steps.append(f"leave current -> {self.release[:8]} as it is")
        else:
            steps.append(f"switch current -> {self.release[:8]} (now: {(self.before or 'none')[:8]})")
        return steps


def plan_deploy(snapshot: Snapshot, facts: dict[str, Any], local: LocalCompile) -> DeployPlan:
    """Decide what to send.

    Raises VerificationFailed (exit 4) before anything travels: a syntax error that this Python may judge, no
    space, no inodes.
    """
    release = snapshot.release
    known = {row["release"] for row in facts["releases"]}
    exists = release in known  # then the interpreter inside has judged it
    warnings = [] if exists else _judge_compile(local, str(facts["python_version"]))
    if snapshot.git_problem:
        warnings.append(f"no commit is recorded with this release: {snapshot.git_problem}")
    have = set(facts["have"])
    contents = [file for file in snapshot.files if file.mode in (FILE, PROGRAM)]
    send = tuple(file for file in contents if file.sha256 not in have)
    need_bytes, need_inodes = (0, 0) if exists else _needs(snapshot, send)
    _check_space(facts, need_bytes, need_inodes)
    return DeployPlan(
        release=release,
        before=facts["current"],
        exists=exists,
        total=len(snapshot.files),
        send=send,
        need_bytes=need_bytes,
        warnings=tuple(warnings),
        compiled_here=local,
        facts=facts,
    )


def minor(version: str) -> str:
    """3.12.3 -> 3.12: grammar changes with the minor version only."""
    return ".".join(version.split(".")[:2])


def _judge_compile(local: LocalCompile, inside: str) -> list[str]:
    if not local.problems:
        return []
    shown = "\n".join(local.problems[:10])
    if minor(local.python_version) == minor(inside):
        raise VerificationFailed(
            f"does not compile with Python {local.python_version}; nothing was sent\n{shown}",
            next="mend it, then deploy again",
        )
    return [
        f"does not compile here with Python {local.python_version}; Python {inside} inside decides\n{shown}"
    ]


def _needs(snapshot: Snapshot, send: tuple[SourceFile, ...]) -> tuple[int, int]:
    """(bytes, inodes) that a new release takes at the most, its archive included."""
    blocks = sum(-(-file.size // BLOCK_BYTES) * BLOCK_BYTES for file in snapshot.files)
    archive = sum({file.sha256: file.size + 1024 for file in send}.values())
    folders = {parent for file in snapshot.files for parent in _folders(file.path)}
    return (
        blocks + archive + len(folders) * BLOCK_BYTES + SPARE_BYTES,
        len(snapshot.files) + len(folders) + SPARE_INODES,
    )


def _folders(path: str) -> list[str]:
    steps = path.split("/")[:-1]
    return ["/".join(steps[: end + 1]) for end in range(len(steps))]


def _check_space(facts: dict[str, Any], need_bytes: int, need_inodes: int) -> None:
    free = int(facts["free_bytes"])
    if need_bytes > free:
        raise VerificationFailed(
            f"not enough space: the release needs {size(need_bytes)}, {size(free)} are free;"
            " nothing was sent",
            next="free some space there, or lower keep_releases in hosts.yaml",
        )
    inodes = facts["free_inodes"]
    if inodes is not None and need_inodes > int(inodes):
        raise VerificationFailed(
            f"not enough inodes: the release needs {count(need_inodes)}, {count(inodes)} are free;"
            " nothing was sent",
            next="remove small files there, or lower keep_releases in hosts.yaml",
        )
