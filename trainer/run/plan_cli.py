"""`python -m trainer plan`."""

from __future__ import annotations

import json as jsons
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainer import recipe_file
from trainer.guard import as_command, say
from trainer.shortage import is_shortage


def plan(
    recipe: Annotated[Path, typer.Argument(help="A recipe with a train: section.")],
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Plan for so many GPUs like this one; all that are seen if left out."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="To measure for, each of target and drafter.")
    ] = 15.0,
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
) -> None:
    """Measure target and drafter here, and predict what every layout of the GPUs would reach."""

    def work() -> None:
        read = recipe_file.read(recipe)
        config = read.config()
        import torch

        from trainer.run.out_of_memory import message
        from trainer.run.setup import assemble
        from trainer.topology.measure import measure
        from trainer.topology.plan import ranked
        from trainer.topology.planning import against, as_json, why

        phase = "loading"
        try:
            parts = assemble(config, say)
            phase = "measuring"
            rates = measure(config, parts.target, parts.drafter, gpus, seconds, say)
        except Exception as error:
            if not is_shortage(error):
                raise
            raise message(error, config, phase, None, None) from error
        cuda = parts.target.device.type == "cuda"
        found = ranked(rates, lambda layout: against(read.train, layout, torch.__version__, cuda))
        if json:
            print(jsons.dumps(as_json(rates, found)))
            return
        from rich.console import Console
        from rich.table import Table

        table = Table("layout", "tokens/s", "held back by", "GiB a GPU", "runs")
        for each in found:
            size = f"{each.needs_bytes / 2**30:.1f} of {each.memory_bytes / 2**30:.1f}"
            runs = "yes" if each.runs else each.against or "no: too large"
            table.add_row(str(each.layout), f"{each.tokens_s:,.0f}", each.bottleneck, size, runs)
        Console(width=None if sys.stdout.isatty() else 110, highlight=False).print(table)
        print(why(found))

    as_command(work)
