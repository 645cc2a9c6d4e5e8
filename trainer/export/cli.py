"""The commands `export` and `import`. Imports nothing heavy before one of them runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainer.guard import as_command
from trainer.shortage import Relief

if TYPE_CHECKING:
    from trainer.export.commands import Done

AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document instead.")]
MORE = "use a machine or container with more memory: all weights are held in it, and read back"


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A folder with a drafter (checkpoints/step-...).")],
    out: Annotated[Path, typer.Argument(help="The new folder.")],
    format: Annotated[
        Literal["hf", "speculators"],
        typer.Option(help="hf: z-lab's code, SGLang, vLLM; speculators: the package of that name."),
    ] = "hf",
    target: Annotated[
        Path | None, typer.Option(help="The target's folder: checked; speculators needs it.")
    ] = None,
    target_name: Annotated[
        str | None, typer.Option(help="The target as servers find it, when not by its folder.")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"],
        typer.Option(help="Of the weights; float16 for GPUs without bfloat16."),
    ] = "bfloat16",
    head: Annotated[
        bool, typer.Option(help="speculators: carry the target's embedding and head along.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Write a drafter as servers load it; every name, shape and key is checked, and read back."""

    def work() -> None:
        from trainer.export.given import for_export

        for_export(checkpoint, out, format, target)  # refuses what it can before torch is imported
        from trainer.export.commands import export as run

        tell(run(checkpoint, out, format, target, target_name, dtype, head), as_json)

    bare = "say --no-head: embedding and head are most of it; or " if format == "speculators" and head else ""
    more = f"{bare}{MORE}"
    as_command(work, relief=Relief("export", more, more))


def import_(
    source: Annotated[Path, typer.Argument(help="A folder with a published drafter, in either layout.")],
    out: Annotated[Path, typer.Argument(help="The new folder; training can start from it.")],
    target: Annotated[
        Path | None, typer.Option(help="The target's folder; else the one that the drafter names.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read a published drafter, so that it can be measured and trained on."""

    def work() -> None:
        from trainer.export.given import for_import

        for_import(source, out, target)  # refuses what it can before torch is imported
        from trainer.export.commands import import_drafter

        tell(import_drafter(source, out, target), as_json)

    as_command(work, relief=Relief("import", MORE, MORE))


def tell(done: Done, as_json: bool) -> None:
    if as_json:
        print(json.dumps(done.document(), indent=2))
        return
    print(
        f"{done.folder}: {done.format}, {done.tensors} tensors, {done.parameters:,} parameters, {done.dtype}"
    )
    for note in done.notes:
        print(f"note: {note}")
    for what, command in done.commands.items():
        print(f"{what}: {command}")
