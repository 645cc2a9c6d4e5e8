"""Memory in which hidden states reach another process: slots that the reader owns and each writer opens once.

On a GPU they are its own memory, opened by the others through CUDA IPC. Elsewhere they are memory without a
name (memfd_create(2)) that the others map through the reader's /proc entry: nothing is left, whatever ends
the run, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.machine import available_memory

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@dataclass(frozen=True)
class Shape:
    """One slot: the states of some rows."""

    rows: int
    tokens: int
    width: int  # taps times hidden size
    final: int  # hidden size, when the final states travel too; 0: they do not
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        return self.rows * self.tokens * (self.width + self.final)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def views(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """Taps [R, S, K * H] and final states [R, S, H] of one slot's flat memory."""
        taps = self.rows * self.tokens * self.width
        final = flat[taps:].view(self.rows, self.tokens, self.final) if self.final else None
        return flat[:taps].view(self.rows, self.tokens, self.width), final


class Slots:
    """`count` slots in one piece of memory [count, elements]."""

    def __init__(self, shape: Shape, memory: Tensor) -> None:
        self.shape, self.memory = shape, memory

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, slot: int) -> tuple[Tensor, Tensor | None]:
        return self.shape.views(self.memory[slot])


@dataclass
class Owned:
    """The reader's side: its slots, and what a writer needs to open them (picklable)."""

    slots: Slots
    ticket: Any
    descriptor: int | None = None

    def opened_by_all(self) -> None:
        """Everybody has it: from now on it lives as long as it is mapped."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def make(shape: Shape, count: int, device: torch.device) -> Owned:
    """Slots on the reader's device.

    Raises:
        ConfigError: no room; or GPU memory that cannot be shared.
    """
    if device.type == "cuda":
        refuse_expandable_segments(os.environ)
        memory = torch.empty(count, shape.elements, dtype=shape.dtype, device=device)
        from torch.multiprocessing.reductions import reduce_tensor

        return Owned(Slots(shape, memory), ("ipc", shape, reduce_tensor(memory)))
    needed, available = count * shape.bytes, available_memory()
    if available is not None and needed > available:  # the kernel would give it, and then end somebody
        raise ConfigError(
            f"no room for {count} batches of hidden states: {needed / 2**30:,.2f} GiB, of main memory "
            f"{available / 2**30:,.2f} GiB are left",
            where="train.layout.queue",
            next="a smaller layout.queue, or a smaller token_budget",
        )
    descriptor = os.memfd_create("dflash-states", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, max(1, needed))
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    memory = _mapped(path, shape, count)
    return Owned(Slots(shape, memory), ("memory", shape, (path, count)), descriptor)


def opened(ticket: Any) -> Slots:
    """The writer's side. On a GPU the memory is the reader's; a copy into it goes over the link."""
    kind, shape, rest = ticket
    if kind == "ipc":
        rebuild, arguments = rest
        return Slots(shape, rebuild(*arguments))
    path, count = rest
    return Slots(shape, _mapped(path, shape, count))


def _mapped(path: str, shape: Shape, count: int) -> Tensor:
    flat = torch.from_file(path, shared=True, size=count * shape.elements, dtype=shape.dtype)
    return flat.view(count, shape.elements)


def refuse_expandable_segments(environment: Any) -> None:
    """Raises ConfigError: memory of expandable segments is not shared reliably (pytorch#165685, #198305)."""
    for name in ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in str(environment.get(name, "")).lower().replace(" ", ""):
            raise ConfigError(
                f"{name} asks for expandable_segments, whose memory other processes cannot open reliably",
                where="topology split",
                next=f"take expandable_segments out of {name}; shapes are fixed, so it gains nothing here",
            )


def checksum(tensors: Sequence[Tensor | None], samples: int = 64) -> float:
    """A sum over some elements, evenly spread, weighted by place: is what was written what is read?"""
    total = 0.0
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            flat = tensor.reshape(-1)
            some = flat[:: max(1, len(flat) // samples)].double()
            total += float(some @ torch.arange(1.0, len(some) + 1, dtype=some.dtype, device=some.device))
    return total
