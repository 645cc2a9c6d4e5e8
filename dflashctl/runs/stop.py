"""Which runs a kill means, and what their GPUs say afterwards. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflashctl.errors import NotFound, NotOurs, UsageError
from dflashctl.gpus.idle import Box, Gpu
from dflashctl.render.text import clip


def choose_targets(
    runs: Sequence[Mapping[str, Any]], name: str | None, *, everything: bool, host: str
) -> list[Mapping[str, Any]]:
    """The runs to end, of those that are not over (newest first). `name` is a tag or an id.

    Empty when a named run is not among them: it may have ended, which the caller finds out. Raises UsageError
    when no name is given and several runs live, NotFound when none does.
    """
    if everything:
        return list(runs)
    if name is not None:
        by_id = [run for run in runs if run.get("id") == name]
        return by_id or [run for run in runs if run.get("tag") == name]
    if not runs:
        raise NotFound("no run is live", where=host, next="dflashctl runs")
    if len(runs) > 1:
        tags = ", ".join(f"{run.get('tag')} ({run.get('id')})" for run in runs)
        raise UsageError(
            f"{len(runs)} runs are live: {tags}",
            where=host,
            next="dflashctl kill TAG, or dflashctl kill --all",
        )
    return list(runs)


@dataclass(frozen=True)
class Freed:
    """What one GPU of a killed run looks like now.

    `free`: nobody and nothing is on it. `shared`: only other live runs have it, which is theirs to say.
    `settling`: memory or utilisation without a stranger; the driver may need a moment more.
    """

    index: int
    uuid: str
    words: str
    free: bool
    shared: bool
    settling: bool

    @property
    def fine(self) -> bool:
        return self.free or self.shared


def check_freed(recorded: Iterable[Mapping[str, Any]], box: Box, killed: Iterable[str]) -> list[Freed]:
    """Each GPU that the killed runs (ids) had: free, or who has it. The unreadable is not claimed free."""
    ids = set(killed)
    entries = {str(gpu.get("uuid")): gpu for gpu in recorded}
    return sorted(
        (_freed(uuid, entry.get("index"), box, ids) for uuid, entry in entries.items()),
        key=lambda one: one.index,
    )


def _freed(uuid: str, index: Any, box: Box, killed: set[str]) -> Freed:
    gpu = box.by_uuid(uuid)
    if gpu is None:
        number = index if isinstance(index, int) else -1
        words = f"not known: {box.problem or 'it is missing from what nvidia-smi lists'}"
        return Freed(number, uuid, words, free=False, shared=False, settling=False)
    strangers = [one for one in gpu.holders if one.kind != "run"]
    others = [one for one in gpu.holders if one.kind == "run" and one.run_id not in killed]
    return Freed(
        gpu.index,
        uuid,
        freed_words(gpu),
        free=gpu.idle,
        shared=gpu.readable and len(others) == len(gpu.holders) and bool(others or gpu.reserved),
        settling=gpu.busy != "" and not strangers and not others and not gpu.reserved,
    )


def freed_words(gpu: Gpu) -> str:
    """`free, 0 MiB`, or what is wrong with it."""
    used = gpu.reading.memory_used_mib
    return gpu.busy or ("free" if used is None else f"free, {used:,} MiB")


def not_done(host: str, stopped: Sequence[Mapping[str, Any]], freed: Sequence[Freed]) -> NotOurs | None:
    """The error of a kill that somebody survived, or after which a GPU is not free; None when all is well."""
    survivors = [one for answer in stopped for one in answer["survivors"]]
    what = [f"cannot be killed: {process_words(one)}" for one in survivors]
    what += [f"GPU {one.index} is not free: {one.words}" for one in freed if not one.fine]
    if not what:
        return None
    hint = "dflashctl gpu shows who holds what"
    if any(one.get("state") == "D" for one in survivors):
        hint += "; state D ends when its device call returns, or with a reboot of the host"
    problems = [str(each) for answer in stopped for each in answer.get("problems", ())]
    if any("Operation not permitted" in each for each in problems):
        hint = "it is another user's: kill it as that user, or as root"
    return NotOurs("\n  ".join(what), where=host, next=hint)


def process_words(process: Mapping[str, Any]) -> str:
    """`pid 312 (python train.py), state D in nvidia_close`."""
    command = clip(" ".join(process.get("cmdline") or ()) or process.get("comm"), 80)
    where = f" in {process['wchan']}" if process.get("wchan") else ""
    return f"pid {process.get('pid')} ({command}), state {process.get('state')}{where}"
