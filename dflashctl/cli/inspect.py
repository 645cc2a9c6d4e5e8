"""`dflashctl inspect`: what torch is set to on a host or in a run, where it comes from, and differences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.common import HostOption, JsonOption, RecipeOption, VerboseOption, not_empty

if TYPE_CHECKING:
    from dflashctl.inspect.facts import Facts, Option

app = typer.Typer()

WhatArgument = Annotated[
    str,
    typer.Argument(
        help="inductor, env, or whom to compare: a host, a run's tag, HOST/TAG.", callback=not_empty
    ),
]
AgainstOption = Annotated[
    str | None,
    typer.Option(
        "--against",
        help="A host, a run's tag, or HOST/TAG: show the differences.",
        show_default=False,
        callback=not_empty,
    ),
]
RunOption = Annotated[
    str | None,
    typer.Option(
        "--run",
        help="A run's tag: with the environment that it had.",
        show_default=False,
        callback=not_empty,
    ),
]
FilterOption = Annotated[
    str | None,
    typer.Option("--filter", help="Only options and variables that match, case aside.", show_default=False),
]
DiffOption = Annotated[
    bool, typer.Option("--diff-default", help="Only options that are not at their default.")
]
VariablesOption = Annotated[
    bool, typer.Option("--variables", help="List the environment variables that this torch reads.")
]
AllOption = Annotated[bool, typer.Option("--all", help="With --against: what is equal, too.")]


@app.command()
def inspect(
    what: WhatArgument,
    against: AgainstOption = None,
    run: RunOption = None,
    filter: FilterOption = None,
    diff_default: DiffOption = False,
    variables: VariablesOption = False,
    all: AllOption = False,
    recipe: RecipeOption = None,
    host: HostOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show what torch is set to and why; compare two hosts or runs."""
    import re

    from dflashctl.cli.waitline import wait_line
    from dflashctl.config import load_hosts, load_recipe, resolve
    from dflashctl.errors import UsageError
    from dflashctl.inspect.reading import look
    from dflashctl.inspect.subject import parse
    from dflashctl.remote.factory import open_engine

    try:
        re.compile(filter or "")
    except re.error as error:
        raise UsageError(f"--filter: {filter!r} is not a regular expression: {error}") from None
    hosts = load_hosts()
    resolved = resolve(load_recipe(recipe, hosts), "inspect") if recipe else None
    sections = [what] if what in ("inductor", "env") else ["inductor", "env"]
    if len(sections) == 2:
        if against is None or run is not None:
            raise UsageError(
                f"{what!r} is neither inductor nor env",
                next="dflashctl inspect inductor, or compare: dflashctl inspect A --against B",
            )
        first = parse(what, hosts, host)
    else:
        first = parse(f"{hosts.host(host).name}/{run}" if run else None, hosts, host)
    subjects = [first] if against is None else [first, parse(against, hosts, host)]
    found = []
    with wait_line(not json) as wait:
        for subject in subjects:
            with open_engine(subject.host) as engine:
                found.append(look(engine, subject, sections, recipe=resolved, progress=wait))
    if against is not None:
        _show_differences(found[0], found[1], filter, everything=all, json=json)
        return
    facts = found[0]
    chosen = facts.config.chosen(filter, diff_default=diff_default) if facts.config else ()
    _show(facts, chosen, filter, variables=variables, json=json)


def _show(
    facts: Facts, chosen: tuple[Option, ...], filter: str | None, *, variables: bool, json: bool
) -> None:
    import re

    from dflashctl.inspect import tables
    from dflashctl.inspect.document import SCHEMA
    from dflashctl.render.json import emit
    from dflashctl.render.table import print_table, say, warn
    from dflashctl.render.text import plural

    config = facts.config
    if json:
        emit(SCHEMA, tables.document(facts, chosen))
    elif config is None:
        say(facts.subject)
        print_table(("", ""), tables.machine_rows(facts))
        say()
        print_table(("PACKAGE", "VERSION"), sorted(facts.packages.items()))
    else:
        look = re.compile(filter or "", re.IGNORECASE)
        options = plural(len(config.options), "option")
        say(f"{facts.subject} · torch {config.torch} · {options}, {len(chosen)} shown")
        print_table(tables.OPTION_COLUMNS, tables.option_rows(chosen, config))
        columns, rows = tables.mode_table(config.modes)
        rows = [row for row in rows if look.search(row[0])]
        if rows:
            say("\ntorch.compile(mode=...) sets")
            print_table(columns, rows)
        if variables:
            readable = {name: each for name, each in config.readable.items() if look.search(name)}
            say(f"\n{plural(len(readable), 'variable')} that this torch (or its triton) reads")
            print_table(tables.VARIABLE_COLUMNS, tables.variable_rows(readable, config.values))
    for words in (*facts.notes, *(config.problems if config else ())):
        warn(f"note: {words}")
    for words in tables.mistake_words(config) if config else ():
        warn(f"warning: {words}")


def _show_differences(a: Facts, b: Facts, filter: str | None, *, everything: bool, json: bool) -> None:
    import re

    from dflashctl.inspect import tables
    from dflashctl.inspect.compare import compare
    from dflashctl.inspect.document import SCHEMA
    from dflashctl.render.json import emit
    from dflashctl.render.table import print_table, say, warn
    from dflashctl.render.text import plural

    look = re.compile(filter or "", re.IGNORECASE)
    rows = [row for row in compare(a, b) if look.search(row.name)]
    different = [row for row in rows if not row.same]
    shown = rows if everything else different
    if json:
        emit(SCHEMA, tables.difference_document(a.subject, b.subject, shown))
    else:
        differences = plural(len(different), "difference")
        say(f"{a.subject} against {b.subject} · {differences} in {len(rows):,} values")
        if shown:
            print_table(("SECTION", "NAME", a.subject, b.subject), tables.difference_rows(shown))
    for facts in (a, b):
        for words in facts.notes:
            warn(f"note: {facts.subject}: {words}")
