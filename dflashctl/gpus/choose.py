"""Which GPUs a run gets: so many idle ones, or these. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflashctl.config.recipe import LaunchGpus
from dflashctl.errors import GpusBusy, UsageError
from dflashctl.gpus.idle import Box, Gpu
from dflashctl.render.text import plural, ranges

SYNTAX = "a number (any 3 idle ones), a list (5,6,7; one GPU alone: 5,), a range (0-4), UUIDs, or none"


class NoSuchGpus(GpusBusy):
    """The host does not have what was asked for: waiting does not help."""


@dataclass(frozen=True)
class Wish:
    """`count` idle ones, or exactly those named (indices or UUIDs), in that order."""

    count: int = 0
    names: tuple[int | str, ...] = ()

    @property
    def none(self) -> bool:
        return self.count == 0 and not self.names


def wish_of(recipe: LaunchGpus, option: str | None) -> Wish:
    """What --gpus says, else what the recipe says. Raises UsageError."""
    if option is not None:
        return parse(option)
    if recipe.ids is not None:
        return Wish(names=tuple(recipe.ids))
    if recipe.uuids is not None:
        return Wish(names=tuple(recipe.uuids))
    return Wish(count=recipe.count or 0)


def parse(text: str) -> Wish:
    """`3` is a count; `5,6,7`, `0-4,6` and `5,` are indices; `GPU-…` are UUIDs; `none` or `0` is no GPU."""
    text = text.strip()
    if text == "none":
        return Wish()
    if text.isdecimal():
        return Wish(count=int(text))
    names: list[int | str] = []
    for part in (part.strip() for part in text.rstrip(",").split(",")):
        if span := re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part):
            first, last = int(span[1]), int(span[2] or span[1])
            if last < first:
                raise UsageError(f"--gpus: {part} runs backwards", next=f"write {last}-{first}")
            names += range(first, last + 1)
        elif re.fullmatch(r"(GPU|MIG)-[0-9A-Za-z/-]+", part):
            names.append(part)
        else:
            raise UsageError(f"--gpus: cannot read {text!r}", next=f"give {SYNTAX}")
    if len(set(names)) != len(names):
        raise UsageError(f"--gpus: {text} names a GPU twice")
    return Wish(names=tuple(names))


def surprise(option: str | None) -> str:
    """A word to who wrote `--gpus 0` and may have meant the first GPU; "" for everything else."""
    if option is None or not option.strip().isdecimal() or int(option):
        return ""
    return f"--gpus {option.strip()} is a count: no GPUs; GPU 0 alone is --gpus 0,"


def choose(box: Box, wish: Wish, *, allow_busy: bool = False) -> tuple[Gpu, ...]:
    """The GPUs for a run. Raises GpusBusy with the reason for each that is missing or not idle, NoSuchGpus
    where that is no matter of waiting.

    `allow_busy` accepts a GPU that others hold, idle ones first; one that cannot be read it never accepts.
    """
    if wish.none:
        return ()
    if box.problem:
        hint = "dflashctl doctor says why; for a run without GPUs: --gpus none"
        raise GpusBusy(f"the GPUs cannot be read: {box.problem}", next=hint)
    return _named(box, wish.names, allow_busy) if wish.names else _any(box, wish.count, allow_busy)


def _named(box: Box, names: tuple[int | str, ...], allow_busy: bool) -> tuple[Gpu, ...]:
    chosen: list[Gpu] = []
    reasons, missing = [], 0
    for name in names:
        gpu = next((gpu for gpu in box.gpus if name in (gpu.index, gpu.uuid)), None)
        if gpu is None:
            reasons.append(f"GPU {name} is missing: this host has {_there(box, name)}")
            missing += 1
        elif gpu in chosen:
            raise UsageError(f"GPU {gpu.index} is named twice, once as {gpu.uuid}")
        elif gpu.busy and not (allow_busy and gpu.readable):
            reasons.append(f"GPU {gpu.index}: {gpu.busy}")
            missing += bool(gpu.reading.mig)
        else:
            chosen.append(gpu)
    if reasons and missing == len(reasons):
        raise NoSuchGpus("\n  ".join(reasons), next="choose others with --gpus; dflashctl gpu")
    if reasons:
        raise _refusal(reasons, allow_busy)
    return tuple(chosen)


def _there(box: Box, name: int | str) -> str:
    if str(name).startswith("MIG-"):
        return f"{plural(len(box.gpus), 'GPU')}, and a run gets whole ones, no slices"
    if isinstance(name, int):
        return f"GPUs {ranges([gpu.index for gpu in box.gpus])}"
    return f"{plural(len(box.gpus), 'GPU')}, none with this UUID"


def _any(box: Box, count: int, allow_busy: bool) -> tuple[Gpu, ...]:
    if count > len(box.whole):
        has = plural(len(box.gpus), "GPU")
        sliced = [f"GPU {gpu.index}: {gpu.busy}" for gpu in box.gpus if gpu.reading.mig]
        hint = "ask for fewer with --gpus" + ("" if sliced else "; where a card has gone: dflashctl doctor")
        reasons = [f"{plural(count, 'GPU')} wanted, this host has {has}", *sliced]
        raise NoSuchGpus("\n  ".join(reasons), next=hint)
    idle = [gpu for gpu in box.gpus if gpu.idle]
    held = [gpu for gpu in box.gpus if gpu.busy and gpu.readable]
    held.sort(key=lambda gpu: (gpu.reading.memory_used_mib or 0, gpu.index))
    usable = idle + held if allow_busy else idle
    if len(usable) < count:
        reasons = [f"{count} wanted, {len(idle)} of {len(box.gpus)} idle"]
        reasons += [f"GPU {gpu.index}: {gpu.busy}" for gpu in box.gpus if gpu.busy]
        meant = any(gpu.index == count for gpu in idle)
        raise _refusal(reasons, allow_busy, f"GPU {count} alone is --gpus {count}," if meant else "")
    return tuple(sorted(usable[:count], key=lambda gpu: gpu.index))


def _refusal(reasons: list[str], allow_busy: bool, meant: str = "") -> GpusBusy:
    """meant: what the person may have meant instead."""
    hint = (
        "dflashctl gpu"
        if allow_busy
        else "wait or kill what holds them, choose others with --gpus, or --allow-busy"
    )
    return GpusBusy("\n  ".join(reasons), next=f"{hint}; {meant}" if meant else hint)
