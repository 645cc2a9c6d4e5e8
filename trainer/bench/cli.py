"""The command `bench`. Imports nothing heavy before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trainer.errors import ConfigError
from trainer.guard import as_command
from trainer.machine import importing
from trainer.model.kernels import slow_for_want_of
from trainer.shortage import Relief

SETTINGS = [
    *("bench", "shape", "context_tokens", "row_tokens", "anchors", "anchors_per_pass", "micro_rows"),
    *("execution", "precision", "attention", "compile", "documents", "device", "torch", "repeats"),
]
USUAL = (49_152, 4_096, 512)  # context tokens, tokens of a row, anchors
SMALLER = {"toy": (128, 32, 24), "small": (2048, 1024, 64)}
TAKES_LESS = {  # by part: what of it is in memory at once
    "step": "--micro-rows, --anchors-per-pass or --context-tokens",
    "loss": "--anchors",
    "mask": "--anchors or --context-tokens",
    "target": "--micro-rows or --context-tokens",
}


def bench(
    what: Annotated[Literal["step", "loss", "mask", "target"], typer.Argument(help="What to run.")],
    shape: Annotated[
        Literal["27b", "27b-sliding", "small", "toy"], typer.Option(help="Sizes of drafter and target.")
    ] = "27b",
    context_tokens: Annotated[int | None, typer.Option(min=16, help="Of a step; default by shape.")] = None,
    row_tokens: Annotated[int | None, typer.Option(min=16, help="Of a row; default by shape.")] = None,
    anchors: Annotated[
        int | None, typer.Option(min=1, help="Of all rows together; default by shape.")
    ] = None,
    anchors_per_pass: Annotated[int | None, typer.Option(min=1, help="Of a row, in memory at once.")] = None,
    micro_rows: Annotated[int | None, typer.Option(min=1, help="Rows of one forward.")] = None,
    execution: Annotated[
        Literal["eager", "compiled", "captured"], typer.Option(help="Of a step, as train.execution.")
    ] = "eager",
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="Of products, as train.precision.")
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to run.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="The median counts.")] = 5,
    attention: Annotated[
        Literal["sdpa", "flex"] | None, typer.Option(help="Of the target; default by device.")
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="The target's layers; default by device.")
    ] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="In each row of the target.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures there, too.")] = None,
) -> None:
    """Time one part of training on random data: a table, then one line of JSON."""

    def work() -> None:
        with importing():
            from trainer.bench.measure import Settings, bench_loss, bench_mask, bench_step, problems
            from trainer.bench.prefill import bench_target

        tokens, row, blocks = SMALLER.get(shape, USUAL)
        settings = Settings(
            shape,
            context_tokens or tokens,
            row_tokens or row,
            anchors or blocks,
            anchors_per_pass,
            micro_rows,
            execution,
            precision,
            device,
            repeats,
            attention,
            compile,
            documents,
        )
        if found := problems(settings):
            raise ConfigError("; ".join(found), where=f"bench {what}")
        benches = {"step": bench_step, "loss": bench_loss, "mask": bench_mask, "target": bench_target}
        figures = benches[what](settings)
        show(figures)
        line = json.dumps(figures)
        print(line, flush=True)
        if out is not None:
            out.write_text(line + "\n", encoding="utf-8")

    smaller = "choose a smaller --shape"
    as_command(work, relief=Relief(f"bench {what}", f"lower {TAKES_LESS[what]}, or {smaller}", smaller))


def show(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110, highlight=False)
    about = ", ".join(f"{name} {figures[name]}" for name in SETTINGS if figures.get(name) is not None)
    console.print(about, markup=False)
    table = Table("figure", "value")
    table.columns[1].justify = "right"
    for name, value in figures.items():
        if name not in SETTINGS and name not in ("formula", "absent_kernels"):
            table.add_row(name, told(value))
    console.print(table)
    if "formula" in figures:
        console.print(f"operations: {figures['formula']}", markup=False)
    for line in slow_for_want_of(figures.get("absent_kernels", [])):
        console.print(line, markup=False, soft_wrap=True)


def told(value: Any) -> str:
    if value is None:
        return "not told on a CPU"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
