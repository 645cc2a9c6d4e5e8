"""`dflashctl logs`: show a run's log, follow it, search it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption, run_argument

if TYPE_CHECKING:
    from dflashctl.config.hosts import Host

app = typer.Typer()
SCHEMA = "dflashctl.logs/1"

TagArgument = Annotated[
    str | None, run_argument("A run's tag or id; without it the only live run, else the newest.")
]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")]
LinesOption = Annotated[
    int | None,
    typer.Option("--lines", "-n", help="The last N lines (100) or matches (all); 0: all.", min=0),
]
SinceOption = Annotated[str | None, typer.Option("--since", help="Written in the last 90s, 10m, 2h, 1d.")]
GrepOption = Annotated[str | None, typer.Option("--grep", help="Only lines that this regex finds.")]
CaseOption = Annotated[bool, typer.Option("--ignore-case", "-i", help="For --grep: a is A.")]
ErrorsOption = Annotated[
    bool, typer.Option("--errors", help="Only tracebacks, `error:` lines, known failures.")
]


@dataclass(frozen=True)
class Wishes:
    tag: str | None
    lines: int | None
    since_s: float | None
    grep: str | None
    ignore_case: bool
    errors: bool
    follow: bool
    json: bool


@app.command()
def logs(
    tag: TagArgument = None,
    host: HostOption = None,
    follow: FollowOption = False,
    lines: LinesOption = None,
    since: SinceOption = None,
    grep: GrepOption = None,
    ignore_case: CaseOption = False,
    errors: ErrorsOption = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show the end of a run's log, follow it through lost connections until the run ends, or search it there.

    Control characters are shown as escapes; a progress bar is shown as its last state.
    """
    from dflashctl.config import load_hosts
    from dflashctl.errors import UsageError
    from dflashctl.runs.durations import parse_duration

    since_s = None if since is None else parse_duration(since, option="--since")
    wishes = Wishes(tag, lines, since_s, grep, ignore_case, errors, follow, json)
    if json and follow:
        raise UsageError("--json prints one document, --follow never ends", next="leave one of them out")
    if grep is not None and errors:
        raise UsageError("either --grep or --errors, not both")
    searches = grep is not None or errors
    if searches and follow:
        raise UsageError("a search does not follow", next="pipe it: dflashctl logs -f | grep …")
    target = load_hosts().host(host)
    if searches:
        _search(target, wishes)
    else:
        _show(target, wishes)


def _show(target: Host, wishes: Wishes) -> None:
    from dflashctl.logs.reading import Source, read
    from dflashctl.render.json import emit
    from dflashctl.render.table import warn
    from dflashctl.views.logview import View

    usual = 100 if wishes.since_s is None else 0
    view = View(sys.stdout, sys.stderr, collect=wishes.json)
    run: dict[str, Any] = {}
    with view:
        read(
            target,
            Source(run.update, view.data, view.notice),
            tag=wishes.tag,
            lines=usual if wishes.lines is None else wishes.lines,
            since_s=wishes.since_s,
            follow=wishes.follow,
        )
    if wishes.json:
        kept = {key: run.get(key) for key in ("id", "tag", "path")}
        emit(SCHEMA, {"host": target.name, **kept, "lines": view.lines})
    elif view.silent and wishes.since_s is None and not wishes.follow:
        warn("the log is empty so far")


def _search(target: Host, wishes: Wishes) -> None:
    from dflashctl.logs.logsearch import search
    from dflashctl.remote.factory import open_engine
    from dflashctl.render.json import emit
    from dflashctl.render.table import warn
    from dflashctl.render.text import block, plural

    collected: list[dict[str, Any]] = []

    def on_line(number: int, text: str) -> None:
        if wishes.json:
            collected.append({"line": number, "text": text})
        else:
            sys.stdout.write(f"{number}: {block(text)}\n")

    with open_engine(target) as engine:
        found = search(
            engine,
            tag=wishes.tag,
            on_line=on_line,
            grep=wishes.grep,
            ignore_case=wishes.ignore_case,
            errors=wishes.errors,
            since_s=wishes.since_s,
            last=wishes.lines or 0,
        )
    sys.stdout.flush()
    if not found.since_known:
        warn("when its lines were written is not known: searched from the beginning")
    if wishes.json:
        kept = {key: found.run.get(key) for key in ("id", "tag", "path")}
        emit(SCHEMA, {"host": target.name, **kept, "matches": found.matches, "found": collected})
    elif found.matches == 0:
        warn("no line of the log tells of trouble" if wishes.errors else "no line of the log matches")
    elif found.sent < found.matches:
        warn(f"{found.sent:,} of {plural(found.matches, 'match', 'matches')} shown")
