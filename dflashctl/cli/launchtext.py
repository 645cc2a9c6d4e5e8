"""What `launch` prints: the plan, the started record, the end."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from dflashctl.cli.eachhost import Outcome
from dflashctl.errors import RunBad
from dflashctl.render.hints import complete
from dflashctl.render.table import say
from dflashctl.render.text import commit, duration
from dflashctl.runs.ending import End, end_words, ended_as, failed
from dflashctl.runs.launch import LaunchPlan


def show_plan(plan: LaunchPlan, *, quiet: bool) -> dict[str, Any]:
    """--dry-run: what would be done. Returns the JSON document."""
    record = plan.record
    if not quiet:
        _rows(
            plan,
            {
                "would run": shlex.join(record["command"]),
                "in": record["cwd"],
                "GPUs": plan.gpu_words,
                "environment": " ".join(sorted(record["env"])),
                "secrets": " ".join(record["secrets"]) or "-",
                "release": release_words(plan),
                "log": record["log"],
            },
        )
        say("nothing was started (--dry-run)")
    return {**summary(plan), "dry_run": True, "command": record["command"], "env": record["env"]}


def show_answer(plan: LaunchPlan, answer: dict[str, Any], *, seconds: float, quiet: bool) -> Outcome:
    """The started record. The outcome has an error when it did not start, or has failed already."""
    tag = plan.record["tag"]
    pid = (answer["leader"] or {}).get("pid")
    document = {
        **summary(plan),
        "outcome": answer["outcome"],
        "why": answer["why"],
        "pid": pid,
        "log": answer["log"],
        "rotated": answer["rotated"],
        "exit": None,
        "seconds": round(seconds, 3),
    }
    if answer["outcome"] == "failed":
        what = f"{tag} did not start: {answer['why']}"
        return Outcome(document, RunBad(what, where=plan.host, next="correct it and launch again"))
    if answer["outcome"] == "starting":
        what = f"{tag} was asked to start, but its supervisor has not said a word yet"
        return Outcome(document, RunBad(what, where=plan.host, next=f"dflashctl status {tag}"))
    if not quiet:
        rows = {"run": plan.run_id, "pid": f"{pid} (inside)", "GPUs": plan.gpu_words}
        rows["release"] = release_words(plan)
        rows["log"] = answer["log"]
        if answer["rotated"]:
            rows["old log"] = answer["rotated"]
        _rows(plan, rows)
        say(f"launched in {duration(seconds)}")
    if answer["exit"] is not None:
        end = End(answer["exit"], None, answer["log_tail"], answer["root_cause"])
        return Outcome({**document, **end_document(end)}, show_end(plan, end, quiet=quiet))
    if not quiet:
        say(complete(f"next: dflashctl status {tag} · dflashctl logs {tag} -f"))
    return Outcome(document)


def end_document(end: End) -> dict[str, Any]:
    """How it ended, for the launch's document: it says `started` of a run that lives, and of no other."""
    if end.wedged:
        return {"outcome": "wedged", "why": "; ".join(end.wedged.evidence), "exit": None}
    return {"outcome": ended_as(end.exit, end.root_cause), "why": _words(end), "exit": end.exit}


def show_end(plan: LaunchPlan, end: End, *, quiet: bool) -> RunBad | None:
    """How it ended: an error, after the log's last lines, unless it ended well."""
    tag = plan.record["tag"]
    if end.wedged:
        what, next = "; ".join(end.wedged.evidence), " · ".join(end.wedged.next)
        return RunBad(f"{tag} is wedged, and goes on: {what}", where=plan.host, next=next)
    words = _words(end)
    if not failed(end.exit, end.root_cause):
        if not quiet:
            say(f"{tag} finished: {words}")
        return None
    if end.log_tail:
        say(end.log_tail, file=sys.stderr)
    return RunBad(f"{tag} {words}", where=plan.host, next=f"dflashctl logs {tag}")


def _words(end: End) -> str:
    return end.problem or end_words(end.exit or {}, end.root_cause)


def release_words(plan: LaunchPlan) -> str:
    """`7f3a91c2 (git 1c9e4d0, changed)`."""
    release, git = plan.record["release"], commit(plan.record["git"])
    if not release:
        return f"none: runs in {plan.record['cwd']}"
    return f"{release[:8]} (git {git})" if git else str(release[:8])


def summary(plan: LaunchPlan) -> dict[str, Any]:
    record = plan.record
    kept = ("tag", "recipe", "variant", "release", "git", "gpus", "log")
    return {
        "host": plan.host,
        "run": plan.run_id,
        **{key: record[key] for key in kept},
        "warnings": list(plan.warnings),
    }


def _rows(plan: LaunchPlan, rows: dict[str, str]) -> None:
    record = plan.record
    variant = f" · variant {record['variant']}" if record["variant"] else ""
    say(f"{plan.host} · {record['recipe']} · tag {record['tag']}{variant}")
    for name, value in rows.items():
        say(f"  {name:<13}{value}")
