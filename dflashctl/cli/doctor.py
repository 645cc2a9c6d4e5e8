"""`dflashctl doctor`: look at everything that a run needs, and say what is wrong and how to mend it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption

if TYPE_CHECKING:
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.config.hosts import Host
    from dflashctl.doctor.checks import Report
    from dflashctl.errors import VerificationFailed

app = typer.Typer()


@app.command()
def doctor(host: HostOption = None, json: JsonOption = False, verbose: VerboseOption = False) -> None:
    """Look at connection, container, GPUs, room and software of a host, and say how to mend what is wrong.

    Changes nothing. Exit code 4 when a check failed; warnings, and what is not known, leave it 0.
    """
    from dflashctl.cli.eachhost import each_host
    from dflashctl.config import load_hosts
    from dflashctl.doctor.document import SCHEMA

    each_host(load_hosts().hosts(host), lambda each: _examine(each, json), json=json, schema=SCHEMA)


def _examine(host: Host, json: bool) -> Outcome:
    import time

    from dflashctl.cli.eachhost import Outcome
    from dflashctl.cli.waitline import wait_line
    from dflashctl.doctor.checks import judge
    from dflashctl.doctor.document import payload
    from dflashctl.doctor.gather import gather
    from dflashctl.views.doctor import print_report

    started = time.monotonic()
    with wait_line(not json) as wait:
        facts = gather(host, lambda what: wait(f"{host.name}: {what}"))
    report = judge(facts)
    took_s = time.monotonic() - started
    if not json:
        print_report(host.name, report, took_s)
    return Outcome(payload(host, report, took_s), _error(host, report))


def _error(host: Host, report: Report) -> VerificationFailed | None:
    """The first failure, which mostly explains the others."""
    from dflashctl.errors import VerificationFailed
    from dflashctl.render.text import plural

    failures = report.of("failure")
    if not failures:
        return None
    first = failures[0]
    which = "" if len(failures) == 1 else ", the first being"
    return VerificationFailed(
        f"{plural(len(failures), 'check')} failed{which}: {first.name}: {first.found}",
        where=host.name,
        next=first.mend,
    )
