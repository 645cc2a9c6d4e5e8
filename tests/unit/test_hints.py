"""Run with: pytest tests/unit/test_hints.py. Commands that messages name, and the host that was named."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from dflashctl.cli import main as frame
from dflashctl.cli.common import HostOption
from dflashctl.errors import NotFound
from dflashctl.render import hints
from dflashctl.runs.facts import Ending, RunFacts
from dflashctl.runs.verdict import judge, told


@pytest.fixture(autouse=True)
def _nobody_named_a_host() -> Iterator[None]:
    hints.begin()
    yield
    hints.begin()


@pytest.mark.parametrize(
    ("text", "completed"),
    [
        ("dflashctl kill localtls", "dflashctl kill -H ct200 localtls"),
        ("next: dflashctl status a · dflashctl logs a -f",
         "next: dflashctl status -H ct200 a · dflashctl logs -H ct200 a -f"),
        ("dflashctl runs", "dflashctl runs -H ct200"),
        ("dflashctl runs show a", "dflashctl runs show -H ct200 a"),
        ("dflashctl runs repair --dry-run", "dflashctl runs repair -H ct200 --dry-run"),
        ("To look: `dflashctl lock show` tells", "To look: `dflashctl lock show -H ct200` tells"),
        ("log line 9: KeyError (known: dflashctl explain a)",
         "log line 9: KeyError (known: dflashctl explain -H ct200 a)"),
        ("dflashctl gpu shows who holds what", "dflashctl gpu -H ct200 shows who holds what"),
        ("dflashctl deploy --recipe x --host ct200", "dflashctl deploy --recipe x --host ct200"),
        ("dflashctl deploy -H b, or dflashctl lock show",
         "dflashctl deploy -H b, or dflashctl lock show -H ct200"),
        ("ended by SIGKILL, which dflashctl did not send", "ended by SIGKILL, which dflashctl did not send"),
        ("dflashctl host trust ct200", "dflashctl host trust ct200"),
        ("dflashctl lab up", "dflashctl lab up"),
        ("dflashctl -v logs every step", "dflashctl -v logs every step"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_command_gets_the_host_that_was_named_and_prose_does_not(text: str, completed: str) -> None:
    assert hints.complete(text) == text
    hints.named("ct200")
    assert hints.complete(text) == completed
    assert hints.complete(completed) == completed
    hints.named(None)
    assert hints.complete(text) == completed, "a command within a command adds no other host"


@pytest.mark.parametrize(
    ("text", "completed"),
    [
        ("dflashctl diff · dflashctl deploy", "dflashctl diff -r {} · dflashctl deploy -r {}"),
        ("dflashctl launch --tag NAME", "dflashctl launch -r {} --tag NAME"),
        ("dflashctl deploy -r other", "dflashctl deploy -r other"),
        ("dflashctl runs diff a b · dflashctl logs a", "dflashctl runs diff a b · dflashctl logs a"),
    ],
)
def test_a_command_that_needs_a_recipe_gets_the_one_that_was_named(text: str, completed: str) -> None:
    for typed, quoted in (("pipeline", "pipeline"), ("/home/a b/hello.yaml", "'/home/a b/hello.yaml'")):
        hints.begin()
        hints.named_recipe(typed)
        assert hints.complete(text) == completed.format(quoted, quoted)
        hints.named_recipe(None)
        assert hints.complete(hints.complete(text)) == completed.format(quoted, quoted)
    hints.named("ct200")
    assert hints.complete("dflashctl deploy") == "dflashctl deploy -r '/home/a b/hello.yaml' -H ct200"
    hints.begin()
    assert hints.complete(text) == text


def test_every_verb_that_needs_a_recipe_is_known() -> None:
    for name in frame.VERBS:
        option = [p for p in frame.load_verb(name).params if p.name == "recipe" and p.callback]
        assert bool(option) == (name in (*hints.WITH_RECIPE, "inspect")), name


def test_every_verb_with_that_option_is_known() -> None:
    for name in frame.VERBS:
        command = frame.load_verb(name)
        below = getattr(command, "commands", {})
        has_host = [each for each in (command, *below.values()) if "host" in [p.name for p in each.params]]
        own_name = name == "host"  # there it is the argument
        assert bool(has_host) == (name in hints.VERBS) or own_name, name
        if name in hints.VERBS:
            assert {each for each in below if each != "list_"} <= set(hints.SUBCOMMANDS), name


def test_a_verdict_names_the_host_and_stays_a_pure_function() -> None:
    facts = RunFacts("20261130T120000000-abcdef", "a", ending=Ending("exited", 3))
    assert told(facts) == judge(facts)
    hints.named("ct200")
    assert judge(facts).next == ("dflashctl logs a",)
    assert told(facts).next == ("dflashctl logs -H ct200 a",)


def test_an_error_names_it_for_people_and_for_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def fail(host: HostOption = None, json: bool = False) -> None:
        raise NotFound("no run x", where="ct200", next="dflashctl runs")

    module: Any = types.ModuleType("dflashctl.cli.status")
    module.app = typer.Typer()
    module.app.command()(fail)
    monkeypatch.setitem(sys.modules, "dflashctl.cli.status", module)
    assert frame.run(["status", "-H", "ct200"]) == 6
    assert capsys.readouterr().err == "error: ct200: no run x\nnext: dflashctl runs -H ct200\n"
    assert frame.run(["status", "--host", "ct200", "--json"]) == 6
    assert json.loads(capsys.readouterr().out)["next"] == "dflashctl runs -H ct200"
    assert frame.run(["status"]) == 6
    assert capsys.readouterr().err == "error: ct200: no run x\nnext: dflashctl runs\n"


def test_each_of_several_hosts_is_named_in_its_own_message(capsys: Any) -> None:
    from dflashctl.cli.eachhost import Outcome, each_host
    from dflashctl.config.hosts import Host
    from dflashctl.errors import SomeHostsFailed

    def act(host: Host) -> Outcome:
        where = {"a": "", "b": "b", "c": "/workspace"}[host.name]
        raise NotFound("no run x", where=where, next="dflashctl runs")

    hosts = [
        Host(
            name=name, engine="local", python="/p", code_root="/c", workdir="/w", log_dir="/l", state_dir="/s"
        )
        for name in ("a", "b", "c")
    ]
    hints.named("a,b,c")
    with pytest.raises(SomeHostsFailed):
        each_host(hosts, act, json=False, schema="dflashctl.status/1")
    said = capsys.readouterr().err
    assert "next: dflashctl runs -H a\n" in said and "next: dflashctl runs -H b\n" in said
    heads = [line for line in said.splitlines() if not line.startswith("next")]
    assert heads == ["a: no run x", "b: no run x", "c: /workspace: no run x"], "each host once"
