"""Releases, rollbacks, diffs and the deploy lock, as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflashctl.releases.diff import Comparison
from dflashctl.releases.listing import ReleaseRow
from dflashctl.render.text import age, block, commit, count, line, plural
from dflashctl.views.deploy import SHORT

if TYPE_CHECKING:
    from rich.text import Text

COLUMNS = ["RELEASE", ">AGE", "BY", "GIT", "RECIPE", ">FILES", "STATE"]


def cells(row: ReleaseRow) -> list[object]:
    """One row of `releases`."""
    facts = row.facts
    return [
        row.release[:SHORT],
        age(row.age_s),
        facts.get("deployed_by"),
        _git(facts.get("git")),
        facts.get("recipe"),
        count(facts.get("files")),
        ", ".join(row.states) or "-",
    ]


def _git(git: Any) -> str | None:
    return commit(git) if isinstance(git, dict) else None


def rollback_report(answer: dict[str, Any], *, dry_run: bool) -> str:
    """What a rollback proved and did."""
    short, before = str(answer["release"])[:SHORT], str(answer["before"] or "none")[:SHORT]
    by = f"{answer['python']} {answer['python_version']}"
    compiled = f", {count(answer['compiled'])} compiled" if answer["compiled"] else ""
    rows = [("verified inside", f"{count(answer['verified'])} sha256{compiled} by {by}")]
    if answer["entry"]:
        rows.append(("imports", f"{answer['entry']} from {answer['imports']}"))
    if dry_run:
        rows.append(("would switch", f"current -> {short} (now: {before})"))
    elif answer["switched"]:
        rows.append(("switched", f"current -> {short} (before: {before}, kept)"))
    else:
        rows.append(("unchanged", f"current -> {short}"))
    text = "\n".join(f"  {label:<18}{line(value)}" for label, value in rows)
    users = [run for release, run in answer["pinned"].items() if release == answer["before"]]
    if users and not dry_run and answer["switched"]:
        text += f"\nrun {line(users[0])} goes on with {before}: a rollback touches no live run"
    return text


def diff_text(found: Comparison) -> Text:
    """Coloured on a terminal."""
    from rich.text import Text

    made = Text()
    short = found.release[:SHORT]
    for file in found.files:
        head = {"added": "only here: ", "removed": f"only in {short}: "}.get(file.change, "")
        if head or file.change == "mode":
            made.append(f"{head}{line(file.path)}\n", style="bold")
        for each in block(file.text).split("\n") if file.text else []:
            made.append(each + "\n", style=_style(each))
    if found.drift:
        made.append(f"changed inside since it was deployed (drift), in {short}:\n", style="bold yellow")
        for each in found.drift:
            made.append(f"  {line(each)}\n", style="yellow")
    made.append(summary(found))
    return made


def _style(text: str) -> str:
    if text.startswith(("+++", "---")):
        return "bold"
    return {"+": "green", "-": "red", "@": "cyan"}.get(text[:1], "")


def summary(found: Comparison) -> str:
    """The last line."""
    short = found.release[:SHORT]
    drift = f"; {plural(len(found.drift), 'change')} inside since the deploy" if found.drift else ""
    if not found.files:
        return f"no difference between here and release {short}{drift}"
    return f"{plural(len(found.files), 'file')} here differ from release {short}{drift}".replace(
        "1 file here differ ", "1 file here differs "
    )


def lock_words(host: str, holder: dict[str, Any] | None) -> str:
    """Who, what, since when, where."""
    if holder is None:
        return f"{host}: nobody is deploying"
    who, what = line(holder.get("who") or "somebody"), line(holder.get("what") or "a deploy")
    since = f" for {age(holder.get('held_s'))}" if holder.get("held_s") is not None else ""
    where = f", container {holder['container']}" if holder.get("container") is not None else ""
    pid = f" (pid {holder['pid']} on the host)" if holder.get("pid") else ""
    return (
        f"{host}: {who} has been deploying {what}{since}{where}, {line(holder.get('code_root') or '')}{pid}"
    )
