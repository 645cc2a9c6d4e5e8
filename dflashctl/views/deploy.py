"""What a deploy looks like: the rows for people, the document for programs."""

from __future__ import annotations

from typing import Any

from dflashctl.releases.deploy import Deployed
from dflashctl.releases.deployplan import DeployPlan
from dflashctl.render.text import block, commit, count, duration, line, plural, size

LABEL_WIDTH = 18
SHORT = 8


def title(host: str, recipe: str, release: str, git: dict[str, Any] | None, changed: int) -> str:
    """ct200 · threadwarm · release 7f3a91c2 (git 1c9e4d0, 2 files changed)."""
    source = f" (git {commit(git, plural(changed, 'file') + ' changed')})" if git else ""
    return line(f"{host} · {recipe} · release {release[:SHORT]}{source}")


def report(done: Deployed) -> str:
    """The rows of a finished deploy."""
    proof, plan = done.proof, done.plan
    rows = [*_compiled_here(plan), ("sent", _sent(done))]
    inside = f"{proof['python']} {proof['python_version']}"
    compiled = f", {count(proof['compiled'])} compiled" if proof["compiled"] else ""
    rows.append(("verified inside", f"{count(proof['verified'])} sha256{compiled} by {inside}"))
    for number, hit in enumerate(proof["expect"]):
        rows.append(("expect" if number == 0 else "", _expectation(hit)))
    if proof["imports"]:
        rows.append(("imports", _import(proof)))
    rows.append(("switched" if proof["switched"] else "unchanged", _switch(proof)))
    if proof["pruned"]:
        rows.append(("removed", ", ".join(name[:SHORT] for name in proof["pruned"])))
    text = "\n".join(f"  {label:<{LABEL_WIDTH}}{line(value)}" for label, value in rows)
    last = "nothing to send" if not done.sent_files and not proof["switched"] else "deployed"
    return f"{text}\n{last} in {duration(done.seconds)}"


def _compiled_here(plan: DeployPlan) -> list[tuple[str, str]]:
    local = plan.compiled_here
    if local is None or not local.count:
        return []
    inside = str(plan.facts["python_version"])
    same = local.python_version.split(".")[:2] == inside.split(".")[:2]
    note = "" if same else f" by {local.python_version}; {inside} inside decides"
    return [("compiled here", f"{plural(local.count - len(local.problems), 'file')}{note}")]


def _sent(done: Deployed) -> str:
    if not done.sent_files:
        return f"nothing: all of {plural(done.plan.total, 'file')} are there"
    return f"{count(done.sent_files)} of {plural(done.plan.total, 'file')}, {size(done.archive_bytes)}"


def _expectation(hit: dict[str, Any]) -> str:
    if not hit["present"]:
        return f"{hit['file']}: no line has {hit['pattern']}"
    return f"{hit['file']}:{hit['line']}: {hit['text']}"


def _import(proof: dict[str, Any]) -> str:
    """The release's folder, shortened: the full hash says nothing more to a person."""
    origin, release = str(proof["imports"]), str(proof["release"])
    folder = origin.partition(release)[0] + release[:SHORT]
    return f"{proof['entry']} from {folder}"


def _switch(proof: dict[str, Any]) -> str:
    now = str(proof["release"])[:SHORT]
    if proof.get("to"):
        before = f" (before: {proof['before'][:SHORT]})" if proof["before"] and proof["switched"] else ""
        return f"{proof['to']} is {now}{before}"
    if not proof["switched"]:
        return f"current -> {now}"
    before = proof["before"]
    return f"current -> {now}" + (f" (before: {before[:SHORT]}, kept)" if before else " (the first)")


def plan_report(plan: DeployPlan) -> str:
    """What `--dry-run` prints."""
    steps = "\n".join(f"  would {line(step)}" for step in plan.actions())
    return f"{steps}\nnothing was sent or changed"


def warnings(items: tuple[str, ...] | list[str]) -> str:
    """Warnings, escaped, one a paragraph."""
    return "\n".join(f"warning: {block(item)}" for item in items)


def deployed_payload(done: Deployed) -> dict[str, Any]:
    """What was done, for `dflashctl.deploy/1`."""
    return {
        **plan_payload(done.plan),
        "git": done.git,
        "sent_files": done.sent_files,
        "archive_bytes": done.archive_bytes,
        "proof": done.proof,
        "seconds": round(done.seconds, 3),
    }


def plan_payload(plan: DeployPlan) -> dict[str, Any]:
    """The plan's part, which `--dry-run --json` prints alone."""
    return {
        "release": plan.release,
        "before": plan.before,
        "files": plan.total,
        "send": [file.path for file in plan.send],
        "send_bytes": plan.send_bytes,
        "actions": plan.actions(),
        "warnings": list(plan.warnings),
    }
