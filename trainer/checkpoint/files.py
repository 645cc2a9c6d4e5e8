"""Checkpoints on disk: a folder in the published drafter format, plus what training needs to go on.

`config.json` and `model.safetensors` are a complete drafter (float32 masters); `state.safetensors` holds the
optimizer's moments and the random generators; `trainer.json` says how it came about and where it stands;
`checksums.json`, written last, has every file's size and sha256. A folder appears under its name only when
all of it is on disk. `best` is a link to the one of the highest acceptance length by real decoding.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.checkpoint import optimizer_state
from trainer.checkpoint.tensorfile import write_pieces, write_tensors
from trainer.errors import ConfigError, TrainerError
from trainer.model.drafter import Drafter
from trainer.shortage import is_shortage
from trainer.training.optim import DrafterOptimizer
from trainer.writing import sync

VERSION = 2
FOLDER = re.compile(r"step-\d{7,}")
BEST = "best"
DRAFTER_FILES = ("config.json", "model.safetensors")  # all that drafter.py reads
TRAINING_FILES = ("trainer.json", "state.safetensors", "checksums.json")  # beside them, to go on
FILES = ("model.safetensors", "state.safetensors", "trainer.json", "config.json")  # with checksums
RNG = "rng|"  # names of the generators' states in state.safetensors


class Damaged(TrainerError):
    """A checkpoint is not what was written."""


@dataclass(frozen=True)
class Snapshot:
    """One moment of training, in memory that training does not touch."""

    step: int
    config: dict[str, Any]  # config.json
    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    facts: dict[str, Any]  # trainer.json
    best: bool = False


def folder_name(step: int) -> str:
    return f"step-{step:07d}"


def listed(root: Path) -> list[Path]:
    """The checkpoints in `root`, newest first, sound or not."""
    found = [path for path in root.glob("step-*") if FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """By its name: of ten millions and more, names do not sort as their steps do."""
    return int(folder.name.removeprefix("step-"))


def generators() -> dict[str, Tensor]:
    """The states of torch's generators."""
    states = {f"{RNG}cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states[f"{RNG}cuda"] = torch.cuda.get_rng_state()
    return states


def to_host(name: str, tensor: Tensor) -> Tensor:
    """A copy of its own in host memory."""
    return tensor.detach().cpu().clone()


def take(
    step: int,
    drafter: Drafter,
    optimizer: DrafterOptimizer,
    facts: dict[str, Any],
    best: bool = False,
    keep: Callable[[str, Tensor], Tensor] = to_host,
) -> Snapshot:
    """A snapshot of now. `keep(name, tensor)` gives the copy in host memory. Where each rank has a share of
    the optimizer, all others `optimizer_state.give` theirs meanwhile.
    """
    weights = optimizer_state.masters(optimizer)
    state = {name: keep(name, tensor) for name, tensor in optimizer_state.whole_moments(optimizer)}
    state |= {name: keep(name, tensor) for name, tensor in generators().items()}
    return Snapshot(
        step,
        drafter.config.to_json("float32"),
        {name: keep(name, weights[name]) for name in drafter.state_dict()},
        state,
        {**facts, "step": step},
        best,
    )


def save(
    root: Path, step: int, drafter: Drafter, optimizer: DrafterOptimizer, facts: dict[str, Any], keep: int
) -> Path:
    """Write `root`/step-NNNNNNN here and now, and drop all but the newest `keep`. Raises as `write`."""
    folder = write(root, take(step, drafter, optimizer, facts))
    prune(root, keep)
    return folder


def write(root: Path, snapshot: Snapshot) -> Path:
    """Write a snapshot under its final name: all of it, on disk, or nothing.

    Raises:
        TrainerError: a weight is not finite; such a drafter is worth nothing and must not replace a good one.
        OSError: the disk is full, or refuses; what was begun is removed, earlier checkpoints stand.
    """
    broken = [name for name, tensor in snapshot.weights.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise TrainerError(f"weights of {broken[0]} are not finite; nothing was saved", where=str(root))
    final = root / folder_name(snapshot.step)
    aside = root / f".{final.name}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _fill(aside, snapshot)
        sync(aside)
        if final.exists():  # of an earlier life of the run, damaged or not
            replaced = root / f".{final.name}.old"
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        aside.rename(final)
        sync(root)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(root / f".{final.name}.old", ignore_errors=True)
    return final


def settle(root: Path, folder: Path, best: bool, keep: int) -> dict[Path, OSError]:
    """After `folder` was written: mark it if it is the best, and prune. Returns what could not be replaced or
    removed, and why; the checkpoint stands all the same.
    """
    left: dict[Path, OSError] = {}
    if best:
        try:
            mark_best(root, folder)
        except OSError as problem:
            left[root / BEST] = problem
    return left | prune(root, keep)


def _fill(folder: Path, snapshot: Snapshot) -> None:
    config = json.dumps(snapshot.config, indent=2, sort_keys=True) + "\n"
    facts = json.dumps({**snapshot.facts, "version": VERSION}, indent=1, sort_keys=True) + "\n"
    digests = {
        "model.safetensors": write_tensors(folder / "model.safetensors", snapshot.weights),
        "state.safetensors": write_tensors(folder / "state.safetensors", snapshot.state),
        "trainer.json": write_pieces(folder / "trainer.json", iter([facts.encode()])),
        "config.json": write_pieces(folder / "config.json", iter([config.encode()])),
    }
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest} for name, digest in digests.items()
    }
    text = json.dumps({"files": files, "version": VERSION}, indent=1, sort_keys=True) + "\n"
    write_pieces(folder / "checksums.json", iter([text.encode()]))


def mark_best(root: Path, folder: Path) -> None:
    """Point `best` at a checkpoint; the link is replaced in one step."""
    aside = root / f".{BEST}.tmp"
    aside.unlink(missing_ok=True)
    aside.symlink_to(folder.name)
    aside.replace(root / BEST)


def best_name(root: Path) -> str | None:
    """The folder that `best` names, there or not."""
    with suppress(OSError):
        return (root / BEST).readlink().name
    return None


def prune(root: Path, keep: int) -> dict[Path, OSError]:
    """Remove all but the newest `keep` and the best. Returns those that could not be, and why: another
    machine may read a file of theirs, or they are another user's.
    """
    left: dict[Path, OSError] = {}
    for old in listed(root)[keep:]:
        if old.name == best_name(root):
            continue
        try:
            shutil.rmtree(old)
        except OSError as problem:
            if old.exists():  # else a person removed it at the same time
                left[old] = problem
    return left


def sweep(root: Path) -> None:
    """Remove what killed writers left aside. Only for the one process that writes to `root`."""
    for path in root.glob(".*"):
        if path.name == f".{BEST}.tmp":
            path.unlink()
        elif re.fullmatch(r"\.step-\d{7,}(\.\d+)?\.(tmp|old)", path.name):
            shutil.rmtree(path)


def verify(folder: Path, beat: Callable[[], None] = lambda: None, only: Collection[str] = ()) -> None:
    """Hold every file to its size and sha256, or those named in `only`.

    Raises:
        Damaged: with the first file that is not what was written, and how.
    """
    try:
        table = json.loads((folder / "checksums.json").read_text(encoding="utf-8"))["files"]
        wanted = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in table.items()}
    except FileNotFoundError:
        raise Damaged("checksums.json is missing: it was not written to its end", where=str(folder)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"checksums.json cannot be read: {error}", where=str(folder)) from None
    for name in only or FILES:
        if name not in wanted:
            raise Damaged(f"checksums.json does not know {name}", where=str(folder))
        size, digest = wanted[name]
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                raise Damaged(f"{name} has {found:,} bytes, {size:,} were written", where=str(folder))
            with path.open("rb") as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == digest
        except OSError as error:
            if is_shortage(error):  # of this machine: nothing is wrong with the file
                raise
            raise Damaged(f"{name} cannot be read: {error.strerror}", where=str(folder)) from None
        if not same:
            raise Damaged(f"{name} is not what was written (its sha256 differs)", where=str(folder))
        beat()


def read_facts(folder: Path) -> dict[str, Any]:
    """trainer.json. Raises ConfigError: it is of another version."""
    facts: dict[str, Any] = json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
    if facts.get("version") != VERSION:
        raise ConfigError(
            f"it is of version {facts.get('version')}, this trainer reads {VERSION}",
            where=str(folder),
            next="resume with the trainer that wrote it (`code` in its trainer.json), or begin a new run "
            f"with train.drafter.init: drafter and init_from: {folder}",
        )
    return facts


def restore(folder: Path, optimizer: DrafterOptimizer) -> None:
    """Take over weights, moments and generators of a verified checkpoint, bit for bit."""
    state = load_file(folder / "state.safetensors")
    generator_states = {name: state.pop(name) for name in [*state] if name.startswith(RNG)}
    optimizer_state.load(optimizer, load_file(folder / "model.safetensors"), state)
    restore_generators(generator_states)


def restore_generators(states: Mapping[str, Tensor]) -> None:
    """Set torch's generators to what `generators` gave; the GPU's only where there is one."""
    torch.set_rng_state(states[f"{RNG}cpu"])
    if torch.cuda.is_available() and f"{RNG}cuda" in states:
        torch.cuda.set_rng_state(states[f"{RNG}cuda"])
