"""The commands `prepare` and `data show`. Imports nothing heavy before one of them runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainer.errors import ConfigError
from trainer.guard import as_command, say
from trainer.machine import usable_cores
from trainer.sections import LEAST_TEMPERATURE
from trainer.shortage import Relief

if TYPE_CHECKING:
    from trainer.data.chat_template import Mode
    from trainer.data.reader import Settings

GOES_ON = "stopped; the same command goes on from here"

data = typer.Typer(no_args_is_help=True, help="Look at data before training on it.")

Target = Annotated[Path, typer.Option(help="The target's folder: its tokenizer and chat template are used.")]
Thinking = Annotated[
    Literal["on", "off"] | None,
    typer.Option(
        help="The template's thinking mode, as the target will be served; left out: its own default."
    ),
]
TemplateFile = Annotated[Path | None, typer.Option("--chat-template", help="Use this template instead.")]
Arguments = Annotated[
    list[str] | None,
    typer.Option("--template-arg", help="NAME=VALUE: a variable of the template; repeatable."),
]
Date = Annotated[str | None, typer.Option(help="YYYY-MM-DD, for templates that name the day.")]
Turns = Annotated[
    Literal["all", "last", "each"],
    typer.Option(help="Answers trained on; each: every answer ends a document of its own."),
]
LineLimit = Annotated[float, typer.Option(min=0.001, max=4096, help="A longer line is a bad row.")]


def temperature_of(value: float) -> float:
    """0, or what a recipe takes, too. Raises typer.BadParameter."""
    if value and not LEAST_TEMPERATURE <= value < math.inf:
        raise typer.BadParameter(f"{value:g} is neither 0 nor a number from {LEAST_TEMPERATURE:g} on")
    return value


def prepare(
    inputs: Annotated[list[Path], typer.Argument(help="JSONL or .txt files.", show_default=False)],
    target: Target,
    out: Annotated[Path, typer.Option(help="Where the store's folder comes to be.")] = Path("data"),
    thinking: Thinking = None,
    template_file: TemplateFile = None,
    arguments: Arguments = None,
    date: Date = None,
    turns: Turns = "all",
    max_bad_rows: Annotated[str, typer.Option(help="A number, or a share such as 0.5%.")] = "1%",
    max_line_mb: LineLimit = 16,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; left out: one a core.")] = None,
) -> None:
    """Conversations, texts or token ids -> a token store that training maps; made before any rank starts."""

    def work() -> None:
        from trainer.data.prepare import Tolerance
        from trainer.data.prepare import prepare as run
        from trainer.data.report import summary

        settings = settings_of(target, mode_of(thinking, arguments, date), template_file, turns, max_line_mb)
        tolerance = Tolerance.parse(max_bad_rows)
        store = run(inputs, settings, out, tolerance, workers or usable_cores(), say)
        for line in summary(store):
            print(line)

    lower = f"lower --workers (now {workers or usable_cores()}) or --max-line-mb (now {max_line_mb:g})"
    as_command(work, GOES_ON, Relief("prepare", f"{lower}; the same command goes on from here"))


@data.command("show")
def show(
    file: Annotated[Path, typer.Argument(help="A prepared store, or a JSONL file.")],
    row: Annotated[int, typer.Option(min=0, help="Which row, counted from 0 through all epochs.")] = 0,
    target: Annotated[
        Path | None, typer.Option(help="The target's folder; a store knows the one it was made with.")
    ] = None,
    row_tokens: Annotated[int, typer.Option(min=16, help="A store's rows: as in the recipe.")] = 4096,
    seed: Annotated[int, typer.Option(min=0, help="A store's rows: as in the recipe.")] = 0,
    long: Annotated[Literal["split", "refuse"], typer.Option(help="As train.data.long.")] = "split",
    thinking: Thinking = None,
    template_file: TemplateFile = None,
    arguments: Arguments = None,
    date: Date = None,
    turns: Turns = "all",
) -> None:
    """A row in colour: what is context, what is trained on, where documents begin."""

    def work() -> None:
        from rich.console import Console

        from trainer.data.store import Store

        folder = target
        if file.is_dir():
            folder = target or Path(Store(file).target)
            from trainer.data import show as looking  # torch comes in here, after what can be refused

            documents = looking.row_of_store(file, row, row_tokens, seed, long)
        else:
            if folder is None:
                raise ConfigError("needed for a file that is not prepared", where="--target")
            if not file.is_file():
                raise ConfigError("no such file", where=str(file))
            settings = settings_of(folder, mode_of(thinking, arguments, date), template_file, turns, 16)
            from trainer.data import show as looking

            documents = looking.row_of_file(file, row, settings)
        looking.show(documents, folder, Console(highlight=False))

    as_command(work)


def settings_of(
    target: Path,
    mode: Mode,
    template_file: Path | None,
    turns: Literal["all", "last", "each"],
    line_mb: float,
) -> Settings:
    from trainer.data.reader import Settings

    if not target.is_dir():
        raise ConfigError("no such folder", where=f"--target {target}")
    return Settings(
        target=str(target.resolve()),
        mode=mode,
        template_file=None if template_file is None else str(template_file),
        turns=turns,
        max_line_bytes=int(line_mb * 1_000_000),
    )


def mode_of(thinking: str | None, arguments: list[str] | None, date: str | None) -> Mode:
    import datetime

    from trainer.data.chat_template import DEFAULT_DATE, Mode

    values: dict[str, Any] = {}
    for each in arguments or []:
        name, equals, value = each.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{each!r}: expected NAME=VALUE", where="--template-arg")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value  # text that needs no quotes
    try:
        datetime.date.fromisoformat(date or DEFAULT_DATE)
    except ValueError:
        raise ConfigError(f"{date!r} is no date like {DEFAULT_DATE}", where="--date") from None
    return Mode(None if thinking is None else thinking == "on", values, date or DEFAULT_DATE)
