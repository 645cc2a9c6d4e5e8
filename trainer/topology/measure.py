"""What one GPU (or this CPU) does with a recipe's target and drafter, in about a minute: rates for plan.py.

Tokens are random and rows are one document each: neither changes how long a frozen target or a drafter of
fixed shapes takes. There are as many rows as a rank has of a batch when all GPUs are colocated.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Callable

import torch

from trainer.data.batch import Batch
from trainer.data.packing import Rows
from trainer.model.drafter import Drafter
from trainer.model.ends import bytes_of, ends_bytes
from trainer.model.tapped_model import States
from trainer.model.target import Target
from trainer.sections import TrainConfig
from trainer.topology.plan import Rates
from trainer.topology.start import part_of
from trainer.topology.work import row_gradients
from trainer.training.loss import Sums
from trainer.training.optim import DrafterOptimizer, trained_bytes, unshareable
from trainer.training.step import DrafterStep

WARM_UPS = 2
LEAST = 2
"""Timed repetitions at least, however long they take."""
LINK_BYTES = 1 << 28

Say = Callable[[str], None]


def measure(
    config: TrainConfig, target: Target, drafter: Drafter, gpus: int | None, seconds: float, say: Say
) -> Rates:
    """Rates of this recipe on the present device.

    Args:
        gpus: how many are to be planned for; None: those that torch sees, or the layout's on a CPU.
        seconds: for each of target and drafter.
    """
    mine = sum(each.nbytes for each in drafter.parameters())
    whole = bytes_of(target)
    device = target.device
    rows = _random_rows(config, target)
    cuda = device.type == "cuda"
    if gpus is None:
        gpus = torch.cuda.device_count() if cuda else config.layout.targets + config.layout.drafters
    full = config.objective.labels != "data"
    # What a colocated rank does at a step: the target reads its whole share, the drafter goes through it.
    part = rows[slice(0, -(-config.batch_rows // gpus))]

    def prefill() -> None:
        target.states(part.tokens, part.positions, part.documents, full=full)

    target_s, used = _time(prefill, seconds, device)
    target_bytes = max(float(whole), used - mine)
    target_rate = part.tokens.numel() / target_s
    say(f"target: {target_rate:,.0f} tokens/s, {target_bytes / 2**30:.2f} GiB")
    states = target.states(part.tokens, part.positions, part.documents, full=full)
    width = len(target.taps) * target.hidden_size
    per_token = (width + (target.hidden_size if full else 0)) * states.taps.element_size()
    drafter_rate, optimizer_s, used, kept = _drafter(config, target, drafter, part, states, seconds)
    drafter_bytes = max(float(mine), used - whole)
    split = dataclasses.replace(config, topology="split")
    held = whole if part_of(0, split) == "all" else ends_bytes(target)
    say(
        f"drafter: {drafter_rate:,.0f} tokens/s, {drafter_bytes / 2**30:.2f} GiB; an optimizer step "
        f"{optimizer_s:.3f} s"
    )
    link = _link(device)
    say(f"link: {link / 2**30:.1f} GiB/s, {per_token:,} bytes of hidden states a token")
    return Rates(
        target_tokens_s=target_rate,
        drafter_tokens_s=drafter_rate,
        optimizer_s=optimizer_s,
        gradient_bytes=sum(each.numel() * each.element_size() for each in drafter.parameters()),
        batch_tokens=config.batch_rows * config.data.row_tokens,
        link_bytes_s=link,
        bytes_per_token=per_token,
        memory_bytes=_memory(device),
        target_bytes=target_bytes,
        drafter_bytes=drafter_bytes,
        held_bytes=held,
        slots=config.layout.queue + 1,
        gpus=gpus,
        moment_bytes=_shared_moments(config, drafter),
        target_pass_bytes=target_bytes - whole,
        drafter_pass_bytes=0.0 if config.micro_rows else max(0.0, drafter_bytes - kept),
    )


def _shared_moments(config: TrainConfig, drafter: Drafter) -> float:
    """Bytes of moments that ranks may share out, by the recipe."""
    if config.layout.shard_optimizer == "off" or unshareable(config.optimizer):
        return 0.0
    return 8.0 * sum(each.numel() for each in drafter.parameters())  # two of float32


def _random_rows(config: TrainConfig, target: Target) -> Rows:
    shape = (config.batch_rows, config.data.row_tokens)
    generator = torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(target.vocabulary, shape, generator=generator)
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    documents = torch.zeros(shape, dtype=torch.int64)
    supervised = torch.ones(shape, dtype=torch.bool)
    return Rows(tokens, documents, positions, supervised).to(target.device)


def _drafter(
    config: TrainConfig, target: Target, drafter: Drafter, part: Rows, states: States, seconds: float
) -> tuple[float, float, float, float]:
    """Tokens a second of forward and backward on `part`, in passes of the recipe's `micro_rows`, seconds of
    an optimizer step, bytes in use, and those of weights, gradients and moments.
    """
    per_document = config.objective.anchors_per_document
    width = config.objective.anchors_per_row or min(per_document, config.data.row_tokens - 1)
    size = min(config.micro_rows or len(part), len(part))
    few = dataclasses.replace(config, token_budget=len(part) * config.data.row_tokens, micro_rows=size)
    step = DrafterStep(drafter.train(), target, few, width)
    optimizer = DrafterOptimizer(drafter, config.optimizer)

    def gradients() -> Sums:
        return row_gradients(step, few, Batch(part, states), 0, slice(0, len(part)))

    def whole() -> None:
        optimizer.step(0.0, gradients().weight)

    # Whole steps first: their moments and gradients are there in a run, and count as memory.
    step_s, used = _time(whole, seconds / 2, target.device)
    gradients_s, _ = _time(gradients, seconds / 2, target.device)
    drafter.zero_grad(set_to_none=True)
    weights, moments = trained_bytes(optimizer)
    return part.tokens.numel() / gradients_s, max(0.0, step_s - gradients_s), used, 2 * weights + moments


def _time(work: Callable[[], object], seconds: float, device: torch.device) -> tuple[float, float]:
    """Median seconds of one call after warm-up, and the most memory that was in use."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARM_UPS):
        work()
    took: list[float] = []
    end = time.perf_counter() + seconds
    while len(took) < LEAST or time.perf_counter() < end:
        if cuda:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    took.sort()
    used = torch.cuda.max_memory_allocated(device) if cuda else _resident()
    return took[len(took) // 2], float(used)


def _resident() -> float:
    """The most main memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    from trainer.machine import available_memory

    return _resident() + float(available_memory() or 0)


def _link(device: torch.device) -> float:
    """Bytes a second from this device to the next one of its kind."""
    other = device
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        other = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
    source = torch.ones(LINK_BYTES, dtype=torch.uint8, device=device)
    sink = torch.empty(LINK_BYTES, dtype=torch.uint8, device=other)

    def copy() -> None:
        sink.copy_(source)
        if other.type == "cuda":
            torch.cuda.synchronize(other)

    seconds, _ = _time(copy, 0.2, device)
    return LINK_BYTES / seconds
