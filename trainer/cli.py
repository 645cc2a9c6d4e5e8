"""`python -m trainer train RECIPE` and `python -m trainer eval CHECKPOINT`.

Imports nothing heavy before a command runs, so help and wrong recipes answer at once.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer import needs, recipe_file
from trainer.bench.cli import bench
from trainer.data.cli import data, prepare
from trainer.data.regenerate_cli import regenerate
from trainer.errors import ConfigError
from trainer.evaluation.cli import eval
from trainer.export.cli import export, import_
from trainer.guard import guarded, say
from trainer.machine import importing, prepare_environment
from trainer.process.runfiles import RunFiles
from trainer.run.console import Console, Plain, for_stdout
from trainer.run.plan_cli import plan
from trainer.sections import TrainConfig
from trainer.topology.planning import resolve_auto
from trainer.topology.rank import RankFiles, WatchedFiles
from trainer.topology.start import as_watched, launch, wanted_ranks
from trainer.writing import lock, lose_lines_that_cannot_be_told

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


def read_config(path: Path) -> TrainConfig:
    """The configuration of a recipe file. Raises ConfigError, with the place of every problem."""
    return recipe_file.read(path).config()


def _refuse(recipe: Path, resume: Path | None) -> None:
    """Raises ConfigError for a recipe that cannot be run, for nothing to go on from, and without torch."""
    config = read_config(recipe)
    needs.check_packages()
    _check_files(config)
    if resume is not None and not resume.is_dir():
        raise ConfigError(
            "no such folder to resume from",
            where=str(resume),
            next="name a run's folder, or one of its checkpoints/step-* folders",
        )


def _check_files(config: TrainConfig) -> None:
    """Raises ConfigError where the target or the store that a recipe names is not there, before anything is
    imported or loaded: a large target takes minutes."""
    from trainer.data.named_store import named_store
    from trainer.model.target_files import find_target

    find_target(config.target.path)
    if config.data.source == "store":
        named_store(config)


def run_folder() -> Path:
    """The supervisor's folder for this run, or a new one under ./runs when run by hand."""
    given = os.environ.get("DFLASH_RUN_DIR")
    return Path(given) if given else Path("runs") / time.strftime("%Y%m%dT%H%M%S", time.gmtime())


def _begun() -> RunFiles:
    """The run's folder, with its first phase, this process's until it ends. Exits where it cannot be made or
    written to, or is another's.
    """
    begun: list[RunFiles] = []

    def begin() -> None:
        files = RunFiles(run_folder())
        lock(files.folder / "launcher.lock")  # before anything of another run's is written over
        files.forget_failure()
        files.enter("loading")
        begun.append(files)

    failed = guarded(begin)
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
    lose_lines_that_cannot_be_told()
    if "DFLASH_RUN_DIR" not in os.environ:  # by hand: a recipe that is refused leaves no folder behind
        refused = guarded(partial(_refuse, recipe, resume))
        if refused:
            raise SystemExit(refused)
    files = _begun()
    ranks = 1

    def decide() -> None:
        nonlocal ranks, recipe
        read = recipe_file.read(recipe)
        config = read.config()
        _check_files(config)
        for warning in read.warnings():
            say(f"WARNING: {warning}")
            files.note(warning)
        if config.topology == "auto":
            recipe = resolve_auto(recipe, files.folder)
            config = read_config(recipe)
        ranks = wanted_ranks(config)

    failed = guarded(decide, files.fail)
    if failed:
        raise SystemExit(failed)
    options = ["--resume", str(resume.resolve())] if resume else []
    options += ["--allow-changes"] if allow_changes else []
    failed = guarded(partial(launch, files.folder, ranks, [str(recipe), *options]), files.fail)
    raise SystemExit(failed)


Resume = Annotated[Path | None, typer.Option()]
AllowChanges = Annotated[bool, typer.Option("--allow-changes")]


@app.command(hidden=True)
def alone(recipe: Path, resume: Resume = None, allow_changes: AllowChanges = False) -> None:
    """The one process of a run that has no others; the launcher starts it."""
    prepare_environment()
    lose_lines_that_cannot_be_told()
    files = WatchedFiles(run_folder())
    as_watched(files, lambda: trained(recipe, files, for_stdout(files.started), resume, allow_changes, None))


@app.command(hidden=True)
def rank(recipe: Path, resume: Resume = None, allow_changes: AllowChanges = False) -> None:
    """One process of several; the launcher starts it."""
    prepare_environment()
    lose_lines_that_cannot_be_told()
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
        if "torch" not in sys.modules:  # seconds without a word, more from a cold disk
            console.say("importing torch and transformers")
        with importing():
            from trainer.run.train import run

        report = run(config, files, console.say, console, resume, allow_changes, ranks)
        if report is not None:
            report.show()
        console.say(f"done; files in {files.folder}")

    return guarded(work, files.fail)


def main() -> None:
    app(prog_name="python -m trainer")
