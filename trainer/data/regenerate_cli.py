"""The command `regenerate`. Imports nothing heavy before it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainer.data.cli import GOES_ON, Arguments, Date, TemplateFile, Thinking, mode_of, temperature_of
from trainer.errors import ConfigError
from trainer.guard import as_command, say
from trainer.shortage import Relief

if TYPE_CHECKING:
    from trainer.data.chat_template import Mode
    from trainer.data.regenerate import Answering, Sampling

WINDOW_BATCHES = 16  # rows that are sorted by length together, in batches: little padding, and soon on disk


def regenerate(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="JSONL of conversations or questions.")],
    out: Annotated[Path, typer.Option(help="The new JSONL file.")],
    target: Annotated[
        Path | None, typer.Option(help="The target's folder, to answer on this machine.")
    ] = None,
    server: Annotated[str | None, typer.Option(help="Or a server's address, up to /v1.")] = None,
    model: Annotated[str | None, typer.Option(help="The target's name on the server.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0, callback=temperature_of, help="0: the most likely token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.01, max=1, help="The most likely tokens of this share; 1: all.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: all tokens.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="An answer that is longer is not used.")] = 4096,
    seed: Annotated[int, typer.Option(min=0, help="Of what is sampled.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="On this machine: rows at once.")] = 32,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="On this machine.")] = "auto",
    concurrency: Annotated[int, typer.Option(min=1, help="Of a server: requests at once.")] = 32,
    tries: Annotated[int, typer.Option(min=1, help="Of a server: before an answer is given up.")] = 6,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="Of a server: for one answer.")
    ] = 600.0,
    key_env: Annotated[
        str | None, typer.Option(help="Of a server: NAME of the environment variable that holds the key.")
    ] = None,
    thinking: Thinking = None,
    template_file: TemplateFile = None,
    arguments: Arguments = None,
    date: Date = None,
) -> None:
    """Let the target write all answers itself; what was interrupted goes on where it stopped."""

    def work() -> None:
        from trainer.data.regenerate import Sampling, refuse_files, report
        from trainer.data.regenerate import regenerate as run

        if (target is None) == (server is None):
            raise ConfigError("one of --target and --server is needed", next="see --help")
        refuse_files(source, out)
        mode = mode_of(thinking, arguments, date)
        sampling = Sampling(temperature, top_p, top_k, max_new_tokens, seed)
        known: dict[str, Any] = {**dataclasses.asdict(sampling), **dataclasses.asdict(mode)}
        if target is not None:
            window = WINDOW_BATCHES * batch
            known |= {"target": str(target.resolve()), "batch": batch, "template_file": str(template_file)}
            answering = _local(target, mode, template_file, sampling, batch, device, window)
        else:
            window = 1
            known |= {"model": model}
            options = {"concurrency": concurrency, "tries": tries, "timeout_s": timeout_s, "key_env": key_env}
            answering = _server(str(server), model, mode, sampling, template_file, options)
        for line in report(run(source, out, known, window, answering, say), out):
            print(line)

    lower = f"lower --batch (now {batch}) or --max-new-tokens (now {max_new_tokens:,})"
    as_command(work, GOES_ON, Relief("regenerate", f"{lower}; the same command goes on from here"))


def _local(
    target: Path,
    mode: Mode,
    template_file: Path | None,
    sampling: Sampling,
    batch: int,
    device: str,
    window: int,
) -> Answering:
    from trainer.data.chat_template import load

    if not target.is_dir():
        raise ConfigError("no such folder", where=f"--target {target}")
    load(target, mode, template_file)  # refused before torch is imported
    from trainer.data.local import LocalTarget

    return LocalTarget(target, mode, template_file, sampling, batch, device).answering(window)


def _server(
    url: str,
    model: str | None,
    mode: Mode,
    sampling: Sampling,
    template_file: Path | None,
    options: dict[str, Any],
) -> Answering:
    from trainer.data.server import Server, ServerSettings

    if model is None:
        raise ConfigError("needed with --server: the target's name there", where="--model")
    if template_file is not None:
        raise ConfigError("the server has its own template", where="--chat-template")
    settings = ServerSettings(url, model, thinking=mode.thinking, arguments=mode.arguments, **options)
    return Server(settings, sampling).answering()
