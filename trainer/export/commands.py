"""`python -m trainer export` and `import`: a drafter out to servers, and a published one in for training."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.drafter import load_drafter
from trainer.errors import ConfigError, TrainerError
from trainer.export.files import write_folder
from trainer.export.given import for_export, for_import
from trainer.export.hf import read_hf
from trainer.export.names import body_shapes, check_names, head_shapes
from trainer.export.speculators import read_speculators, speculators_json
from trainer.export.start import recipe_lines
from trainer.model.architectures import as_looked_up, scales
from trainer.model.drafter_config import DrafterConfig
from trainer.model.folder import CONFIG, weight_files
from trainer.model.tensors import embedding_and_head, read_tensors

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FORMATS = ("hf", "speculators")
# What a checkpoint of speculators holds beside the drafter: copies of the target's weights.
TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True)
class Done:
    """What was written, and how to use it."""

    folder: Path
    format: str
    tensors: int
    parameters: int
    dtype: str
    commands: dict[str, str]  # what -> the command line, or the lines of a recipe
    notes: list[str]

    def document(self) -> dict[str, Any]:
        """For --json."""
        return {
            "schema": "trainer.export/1",
            "folder": str(self.folder),
            "format": self.format,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "dtype": self.dtype,
            "commands": self.commands,
            "notes": self.notes,
        }


def export(
    checkpoint: Path,
    out: Path,
    format: str,
    target: Path | None,
    name: str | None = None,
    dtype: str = "bfloat16",
    with_head: bool = True,
) -> Done:
    """Write the drafter in `checkpoint` to the new folder `out`.

    Args:
        target: the target's folder; needed for the speculators layout, checked against the drafter if given.
        name: under which servers find the target, when that is not its folder.
        with_head: the speculators layout carries the target's embedding and head along.
    Raises:
        ConfigError: no such drafter or target, they do not fit, or `out` is there.
        TrainerError: it cannot be written, or does not read back as it should.
    """
    given = for_export(checkpoint, out, format, target)
    config, raw = given.config, given.raw
    wide = load_drafter(checkpoint).state_dict()
    state = {key: tensor.to(DTYPES[dtype]) for key, tensor in wide.items()}
    too_large = [key for key, tensor in state.items() if not bool(tensor.isfinite().all())]
    if too_large:  # they were finite before: float16 ends at 65,504
        raise ConfigError(
            f"weight {too_large[0]} does not fit {dtype}", where=str(checkpoint), next="say --dtype bfloat16"
        )
    shapes = body_shapes(config)
    model = _without_weights(target) if target is not None else None
    scaled = model is not None and scales(model)
    if scaled and format == "speculators" and not with_head:
        raise ConfigError(
            "this target scales what its embedding gives, and readers of this layout take its bare rows",
            where=str(target),
            next="export without --no-head: the rows that are carried along are scaled",
        )
    known = name or (str(target.absolute()) if target else "TARGET")
    if format == "speculators":
        assert target is not None and raw is not None
        data = speculators_json(config, dtype, known, list(raw.get("architectures") or []))
        if with_head:
            shapes |= head_shapes(config)
            tables = read_as_tables(target, "export with --no-head; readers then take the target's own")
            state |= {key: tensor.to(DTYPES[dtype]) for key, tensor in tables.items()}
    else:
        data = config.to_json(dtype)
    check_names({key: tensor.shape for key, tensor in state.items()}, shapes, str(checkpoint))
    write_folder(out, data, state, partial(verify, config=config, state=state, format=format))
    count = sum(tensor.numel() for tensor in state.values())
    commands, notes = serving(config, format, out.absolute(), known, scaled)
    return Done(out, format, len(state), count, dtype, commands, notes)


def verify(folder: Path, config: DrafterConfig, state: Mapping[str, Tensor], format: str) -> None:
    """Read what was written, from the disk: the same shape, the same names, the same numbers.

    Raises:
        TrainerError: not so; then it is a fault of this program or of the disk.
    """
    data = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    read = read_speculators if format == "speculators" else read_hf
    again = read(data, config.num_target_layers, str(folder / CONFIG))
    tensors = read_tensors(weight_files(folder))
    same = tensors.keys() == state.keys() and all(
        tensor.dtype == state[key].dtype and torch.equal(tensor, state[key])
        for key, tensor in tensors.items()
    )
    if again != config or not same:
        raise TrainerError("what was written reads back differently", where=str(folder))


def read_as_tables(target: Path, next: str = "") -> dict[str, Tensor]:
    """`embedding_and_head` for readers that look rows up and do nothing more to them, as this layout's do:
    the scale of an embedding that has one (Gemma's) is in its rows.

    Raises:
        ConfigError: as `embedding_and_head`.
    """
    found = embedding_and_head(target, next)
    table = found["embed_tokens.weight"]
    model = _without_weights(target, table.dtype)
    return found if model is None else found | {"embed_tokens.weight": as_looked_up(model, table)}


def _without_weights(target: Path, dtype: torch.dtype = torch.float32) -> nn.Module | None:
    """The target in shapes alone; None for one that transformers does not know: nothing was trained on it."""
    from trainer.model.random_target import made_of

    try:
        with torch.device("meta"):
            return made_of(target, dtype)
    except ConfigError:
        return None


def serving(
    config: DrafterConfig, format: str, out: Path, target: str, scaled: bool = False
) -> tuple[dict[str, str], list[str]]:
    """The commands that serve an export, and what to know about them.

    Args:
        scaled: the target's embedding scales its rows; a drafter is trained on what comes out.
    """
    kinds = set(config.layer_types)
    mixed = len(kinds) > 1
    runner = "VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else ""
    notes = ["vLLM's V2 runner alone serves drafters with full and sliding layers"] if mixed else []
    if format == "speculators":
        if mixed:
            notes.append("in this layout vLLM takes full layers to be causal, too: let it serve --format hf")
            return {}, notes
        if scaled:
            notes.append("the embedding's rows are scaled as the target does; the package takes bare ones")
        return {"vllm": f"{runner}vllm serve {shlex.quote(str(out))}"}, notes
    speculation = {"method": "dflash", "model": str(out), "num_speculative_tokens": config.block_size - 1}
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", target]
    sglang += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(out)]
    sglang += ["--speculative-num-draft-tokens", str(config.block_size)]
    vllm = ["vllm", "serve", target, "--speculative-config", json.dumps(speculation)]
    if scaled:
        notes.append(
            "this target scales its embedding, and vLLM takes bare rows: let it serve --format speculators"
        )
        return {"sglang": shlex.join(sglang)}, notes
    return {"sglang": shlex.join(sglang), "vllm": runner + shlex.join(vllm)}, notes


def import_drafter(source: Path, out: Path, target: Path | None) -> Done:
    """Write the published drafter in `source`, of either layout, as a checkpoint for training to start from.

    Args:
        target: the target's folder; left out, the one that the drafter names, if it is here.
    Raises:
        ConfigError: not a plain DFlash drafter, weights that are missing, unknown or of another shape, or
            made for another target.
    """
    given = for_import(source, out, target)
    config = given.config
    tensors = read_tensors(weight_files(source))
    if given.foreign and "embed_tokens.weight" not in tensors:
        refuse_bare_rows(given.target, str(source))
    state = drafters_own(tensors, config, given.target, str(source))
    state = {name: tensor.float() for name, tensor in state.items()}
    check = partial(verify, config=config, state=state, format="hf")
    write_folder(out, config.to_json("float32"), state, check)
    count = sum(tensor.numel() for tensor in state.values())
    commands = {"recipe": recipe_lines(out, config)}
    return Done(out, "checkpoint", len(state), count, "float32", commands, [])


def refuse_bare_rows(target: Path | None, where: str) -> None:
    """Raises ConfigError: the target's embedding scales its rows, and a drafter that carries none was trained
    by speculators, on bare ones.
    """
    model = _without_weights(target) if target is not None else None
    if model is not None and scales(model):
        raise ConfigError(
            "in this layout a drafter without an embedding of its own reads bare rows of the target's, which "
            "scales them: here it would read scaled ones",
            where=where,
            next="import one in z-lab's layout, or train one",
        )


def drafters_own(
    tensors: Mapping[str, Tensor], config: DrafterConfig, target: Path | None, where: str
) -> dict[str, Tensor]:
    """The drafter's tensors under its own names; copies of the target's are compared with it and left out.

    Raises:
        ConfigError: other names or shapes than the drafter's, or an embedding that is not the target's.
    """
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    own = {
        name: tensor
        for name, tensor in plain.items()
        if name not in TARGETS_OWN and not name.endswith("rotary_emb.inv_freq")
    }
    check_names({name: tensor.shape for name, tensor in own.items()}, body_shapes(config), where)
    copies = [name for name in TARGETS_OWN[:2] if name in plain]
    if copies and target is not None:
        theirs = read_as_tables(target)
        for name in copies:
            mine = plain[name]
            if mine.shape != theirs[name].shape or not torch.equal(mine, theirs[name].to(mine.dtype)):
                raise ConfigError(
                    f"its {name} {list(mine.shape)} is not the target's; drafters here use the target's own",
                    where=where,
                    next="name the target that it was made for",
                )
    return own
