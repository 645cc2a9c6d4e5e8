"""The command `eval`. Imports nothing heavy before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainer.data.cli import Arguments, Date, TemplateFile, Thinking, mode_of, temperature_of
from trainer.guard import as_command, say
from trainer.machine import importing
from trainer.sections import Evaluate
from trainer.shortage import Relief


def eval(
    checkpoint: Annotated[Path, typer.Argument(help="A folder with a drafter (checkpoints/step-...).")],
    target: Annotated[str, typer.Option(help="The target's folder.")],
    sets: Annotated[
        list[Path] | None,
        typer.Option("--set", help="A published file of an evaluation set; repeatable. Else held-out text."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Of each set.")] = 24,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode after each.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=temperature_of, help="Of sampled figures; 0: greedy only.")
    ] = 0.7,
    seed: Annotated[int, typer.Option(min=0, help="Chooses prompts and luck.")] = 0,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Of both models; auto: bfloat16 on a GPU, float32 on a CPU."),
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to decode.")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Prompts of one length decoded together.")] = 1,
    thinking: Thinking = None,
    template_file: TemplateFile = None,
    arguments: Arguments = None,
    date: Date = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead.")] = False,
) -> None:
    """Measure a drafter by real decoding: acceptance length, speed, and that the text is the target's own."""

    def work() -> None:
        from trainer.evaluation.given import Questions, read_pair

        asked = Questions(sets, mode_of(thinking, arguments, date), template_file) if sets else None
        pair = read_pair(checkpoint, target)  # refuses what it can before torch is imported
        if asked is not None:
            asked.read(pair.target, pair.encoder, prompts)
        with importing():
            from trainer.evaluation.evaluate_checkpoint import evaluate_checkpoint
            from trainer.evaluation.measure import Options
            from trainer.evaluation.tables import document, evaluation_report

        section = Evaluate(prompts=prompts, new_tokens=new_tokens, temperature=temperature or 1.0)
        options = Options(dtype, device, batch, sampled=temperature > 0)
        found = evaluate_checkpoint(checkpoint, target, section, seed, options, asked, say)
        if as_json:
            print(json.dumps(document(found), indent=2))
        else:
            evaluation_report(found).show()
        found.check()

    wide = "" if dtype == "bfloat16" else "say --dtype bfloat16, or "
    relief = Relief(
        "eval",
        f"{wide}lower --batch (now {batch}) or --new-tokens (now {new_tokens:,})",
        f"{wide}{Relief.loading}",
    )
    as_command(work, relief=relief)
