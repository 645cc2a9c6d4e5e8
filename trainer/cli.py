"""`python -m trainer train RECIPE` and `python -m trainer eval CHECKPOINT`.

Imports nothing heavy before a command runs, so help and wrong recipes answer at once.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer import config as configs
from trainer import failures, recipe_file
from trainer.bench.cli import bench
from trainer.data.cli import data, prepare
from trainer.data.regenerate_cli import regenerate
from trainer.errors import ConfigError, Stopped, TrainerError
from trainer.evaluation.cli import eval
from trainer.export.cli import export, import_
from trainer.machine import importing, prepare_environment
from trainer.run.console import Console, Plain, for_stdout
from trainer.run.runfiles import RunFiles
from trainer.topology.cli import plan
from trainer.topology.planning import resolve_auto
from trainer.topology.rank import RankFiles, WatchedFiles
from trainer.topology.start import as_watched, launch, wanted_ranks
from trainer.writing import lose_lines_that_do_not_fit, of_the_disk

if TYPE_CHECKING:
    from trainer.topology.ranks import Ranks

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Train DFlash drafters, and measure them by real decoding.",
)
app.command()(eval)
app.command()(plan)
app.command()(export)
app.command("import")(import_)
app.command()(prepare)
app.command()(bench)
app.command()(regenerate)
app.add_typer(data, name="data")


def read_recipe(path: Path) -> Any:
    """The `train:` section of a recipe file. Raises ConfigError: it cannot be read, or has none."""
    return recipe_file.read(path).train


def read_config(path: Path) -> configs.TrainConfig:
    """The configuration of a recipe file. Raises ConfigError, with the place of every problem."""
    return recipe_file.read(path).config()


def _refuse(recipe: Path, resume: Path | None) -> None:
    """Raises ConfigError for a recipe that cannot be run, and for nothing to go on from."""
    read_config(recipe)
    if resume is not None and not resume.is_dir():
        raise ConfigError(
            "no such folder to resume from",
            where=str(resume),
            next="name a run's folder, or one of its checkpoints/step-* folders",
        )


def run_folder() -> Path:
    """The supervisor's folder for this run, or a new one under ./runs when run by hand."""
    given = os.environ.get("DFLASH_RUN_DIR")
    return Path(given) if given else Path("runs") / time.strftime("%Y%m%dT%H%M%S", time.gmtime())


def _begun() -> RunFiles:
    """The run's folder, with its first phase. Exits where it cannot be made or written to."""
    begun: list[RunFiles] = []

    def begin() -> None:
        files = RunFiles(run_folder())
        files.enter("loading")
        begun.append(files)

    failed = guarded(begin, None)
    if failed:
        raise SystemExit(failed)
    return begun[0]


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe with a train: section.")],
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on from a run's folder (its newest sound checkpoint) or from one checkpoint."),
    ] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Go on although recipe or data are others than before.")
    ] = False,
) -> None:
    """Train a drafter as the recipe says; files go to $DFLASH_RUN_DIR, else to ./runs/<time>."""
    prepare_environment()
    lose_lines_that_do_not_fit()
    if "DFLASH_RUN_DIR" not in os.environ:  # by hand: a recipe that is refused leaves no folder behind
        refused = guarded(partial(_refuse, recipe, resume), None)
        if refused:
            raise SystemExit(refused)
    files = _begun()
    ranks = 1

    def decide() -> None:
        nonlocal ranks, recipe
        config = read_config(recipe)
        if config.topology == "auto":
            recipe = resolve_auto(recipe, files.folder)
            config = read_config(recipe)
        ranks = wanted_ranks(config)

    failed = guarded(decide, files)
    if failed:
        raise SystemExit(failed)
    options = ["--resume", str(resume.resolve())] if resume else []
    options += ["--allow-changes"] if allow_changes else []
    launch(files.folder, ranks, [str(recipe), *options])


Resume = Annotated[Path | None, typer.Option()]
AllowChanges = Annotated[bool, typer.Option("--allow-changes")]


@app.command(hidden=True)
def alone(recipe: Path, resume: Resume = None, allow_changes: AllowChanges = False) -> None:
    """The one process of a run that has no others; the launcher starts it."""
    prepare_environment()
    lose_lines_that_do_not_fit()
    files = WatchedFiles(run_folder())
    as_watched(files, lambda: trained(recipe, files, for_stdout(files.started), resume, allow_changes, None))


@app.command(hidden=True)
def rank(recipe: Path, resume: Resume = None, allow_changes: AllowChanges = False) -> None:
    """One process of several; the launcher starts it."""
    prepare_environment()
    lose_lines_that_do_not_fit()
    files = RankFiles(run_folder(), int(os.environ["RANK"]))

    def work() -> int:
        with importing():
            from trainer.topology.ranks import Ranks

        group = Ranks(files.beat)
        console = for_stdout(files.started) if group.first else Plain(lambda text: None)
        return trained(recipe, files, console, resume, allow_changes, group)

    as_watched(files, work)


def trained(
    recipe: Path,
    files: RunFiles,
    console: Console,
    resume: Path | None,
    allow_changes: bool,
    ranks: Ranks | None,
) -> int:
    """Train and show what came of it; the exit code."""

    def work() -> None:
        config = read_config(recipe)
        with importing():
            from trainer.run.train import run  # torch comes in here

        report = run(config, files, console.say, console, resume, allow_changes, ranks)
        if report is not None:
            show(report.columns, report.rows, report.notes, report.headline)
        console.say(f"done; files in {files.folder}")

    return guarded(work, files)


def guarded(work: Callable[[], None], files: RunFiles | None) -> int:
    """Run `work`; its failure becomes a message, root_cause.json and an exit code; only bugs keep a
    traceback. A failure that others have met before is told with what it means and what helps.
    """
    try:
        work()
    except Stopped as error:  # being told to stop is no failure
        _say(f"error: {error}")
        return error.exit_code
    except Exception as error:
        known = files.fail(error) if files else failures.of_error(error)
        told = error if isinstance(error, TrainerError) else of_the_disk(error)
        said = f"error: {told}" if told else traceback.format_exc().rstrip()
        _say("\n".join([said, failures.words(known)] if known else [said]))
        return told.exit_code if told else 1
    return 0


def _say(text: str) -> None:
    """On stderr; that nobody reads it any more changes no exit code."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def show(columns: list[str], rows: list[list[str]], notes: list[str], headline: str) -> None:
    """The result, readable in a log file too."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    console.print(table)
    for note in notes:
        console.print(note, markup=False)
    console.print(headline, markup=False, style="bold")


def main() -> None:
    app(prog_name="python -m trainer")
