"""Run on a machine with a GPU: pytest -m gpu tests/gpu/test_execution.py. Real CUDA graphs and Inductor give
what the eager step gives, without waiting for the device once, in memory that does not grow, and again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from test_optim import hold_updates_to_the_plain_ones, state_of
from tiny_models import save_target

from trainer import config as configs
from trainer.bench.shapes import SHAPES, batch_of, drafter_of, ends_of
from trainer.data.batch import Batch
from trainer.data.packing import Rows
from trainer.process.runfiles import RunFiles
from trainer.run.train import run
from trainer.sections import Optimizer
from trainer.training.captured_update import CapturedUpdates
from trainer.training.execution import captured
from trainer.training.objective import draw
from trainer.training.optim import DrafterOptimizer
from trainer.training.step import DrafterStep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
ROWS, ROW, WIDTH = 2, 1024, 48


def step_of(execution: str, device: torch.device | None = None) -> DrafterStep:
    shape, device = SHAPES["small"], device or torch.device("cuda")
    section: dict[str, Any] = {
        "target": {"path": "unused"},
        "drafter": {"mask_token_id": 0},
        "objective": {"anchors_per_pass": 16, "loss_chunk": 100},  # 5 chunks a pass
        "execution": execution,
    }
    drafter = drafter_of(shape, device).train()
    return DrafterStep(drafter, ends_of(shape, device), configs.load(section), WIDTH)


@pytest.mark.parametrize("execution", ["compiled", "captured"])
def test_the_step_equals_the_eager_one(gpus: int, execution: str) -> None:
    eager, other = step_of("eager"), step_of(execution)
    other.drafter.load_state_dict(eager.drafter.state_dict())
    for number in range(4):
        batch = batch_of(SHAPES["small"], ROWS, ROW, torch.device("cuda"), seed=number)
        uniform = draw((ROWS, ROW), 0, number, 0).cuda()
        found = []
        for step in (eager, other):
            sums = step.gradients(batch, [uniform])
            found.append((sums, [parameter.grad.clone() for parameter in step.drafter.parameters()]))  # type: ignore[union-attr]
            for parameter in step.drafter.parameters():
                parameter.grad = None
        assert torch.allclose(found[0][0].loss, found[1][0].loss, rtol=5e-3)
        for one, two in zip(found[0][1], found[1][1], strict=True):
            assert (one - two).norm() <= 0.03 * one.norm()


def test_a_step_runs_on_the_gpu_of_its_tensors(gpus: int) -> None:
    """The main thread of topology threads warms up the steps of GPUs that are not its own."""
    if gpus < 2:
        pytest.skip("DID NOT RUN: two GPUs are needed")
    found = []
    for device in (torch.device("cuda", 0), torch.device("cuda", 1)):
        step, batch = step_of("eager", device), batch_of(SHAPES["small"], ROWS, ROW, device)
        sums = step.gradients(batch, [draw((ROWS, ROW), 0, 0, 0).to(device)])
        found.append([sums.loss.cpu(), *(each.grad.cpu() for each in step.drafter.parameters())])  # type: ignore[union-attr]
        assert torch.cuda.current_device() == 0 and step.attention == "triton"
    for one, two in zip(*found, strict=True):
        assert (one - two).norm() <= 1e-3 * one.norm()


@pytest.mark.parametrize("shape", ["small", "27b-sliding"])
def test_our_attention_gives_the_step_of_flex_attention(gpus: int, shape: str) -> None:
    """Sliding and full layers, passes, and a last pass with dead blocks."""
    found = []
    for attention in ("flex", "triton"):
        section: dict[str, Any] = {
            "target": {"path": "unused"},
            "drafter": {"mask_token_id": 0},
            "objective": {"anchors_per_pass": 40},
            "attention": attention,
        }
        sizes, device = (
            dataclasses.replace(SHAPES[shape], hidden=512, ffn=1024, vocabulary=8192),
            torch.device("cuda"),
        )
        step = DrafterStep(
            drafter_of(sizes, device).train(), ends_of(sizes, device), configs.load(section), 100
        )
        batch = batch_of(sizes, ROWS, 4096, device)
        sums = step.gradients(batch, [draw((ROWS, 4096), 0, 0, 0).cuda()])
        found.append((sums, [parameter.grad for parameter in step.drafter.parameters()]))
    assert torch.allclose(found[0][0].loss, found[1][0].loss, rtol=2e-3)
    for one, two in zip(found[0][1], found[1][1], strict=True):
        assert one is not None and two is not None
        assert (one - two).norm() <= 0.02 * one.norm()


def test_the_gate_lets_a_true_graph_pass(gpus: int) -> None:
    step = step_of("compiled")
    batch = batch_of(SHAPES["small"], ROWS, ROW, torch.device("cuda"))
    captured(step._gradients, step.drafter, batch, [draw((ROWS, ROW), 0, 0, 0).cuda()])


@pytest.mark.parametrize("execution", ["eager", "compiled", "captured"])
def test_a_step_with_its_update_never_waits_for_the_device(gpus: int, execution: str) -> None:
    step = step_of(execution)
    optimizer = DrafterOptimizer(step.drafter, Optimizer())
    batch = batch_of(SHAPES["small"], ROWS, ROW, torch.device("cuda"))
    drawn = draw((ROWS, ROW), 0, 0, 0)
    uniform, host = drawn.cuda(), Rows(*(part.cpu() for part in batch.rows.parts()))
    host.supervised[:, 20:] = batch.rows.supervised[:, 20:] = False  # few of its slots count

    def whole() -> None:
        known = step.supervised(host, [drawn])
        sums = step.gradients(batch, [uniform], supervised=known)
        optimizer.step(1.0, sums.weight, step.execution.update)

    for _ in range(5):
        whole()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize("clip", [0.0, 0.7, 1e6])
def test_updates_equal_the_plain_ones(gpus: int, algorithm: str, clip: float) -> None:
    hold_updates_to_the_plain_ones(algorithm, clip, "cuda")


def test_a_bad_gradient_changes_nothing(gpus: int) -> None:
    step = step_of("eager")
    optimizer = DrafterOptimizer(step.drafter, Optimizer())
    for value in (1.0, torch.nan, 1.0):
        before = [parameter.detach().clone() for parameter in step.drafter.parameters()]
        for parameter in step.drafter.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step(1.0, torch.ones((), device="cuda"))
        same = all(torch.equal(a, b) for a, b in zip(before, step.drafter.parameters(), strict=True))
        assert same == (value != 1.0)
    for state in optimizer.algorithms[0].state.values():
        assert float(state["step"]) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replayed_update_equals_the_eager_one(gpus: int, dtype: torch.dtype) -> None:
    """To the bit, a bad gradient among them: so a run that is resumed, and captures anew, is the same run."""
    shape, device = SHAPES["small"], torch.device("cuda")
    drafters = [drafter_of(shape, device).to(dtype) for _ in range(2)]
    eager, replayed = (DrafterOptimizer(drafter, Optimizer()) for drafter in drafters)
    buffers = [[torch.zeros_like(each) for each in drafter.parameters()] for drafter in drafters]
    updates = CapturedUpdates()
    for number in range(8):
        weight, norms = torch.tensor(3.0 + number, device=device), []
        for drafter, optimizer, own in zip(drafters, (eager, replayed), buffers, strict=True):
            generator = torch.Generator(device).manual_seed(number)
            for parameter, buffer in zip(drafter.parameters(), own, strict=True):
                parameter.grad = buffer.normal_(generator=generator)
            if number == 5:
                own[3].view(-1)[7] = torch.nan
            norms.append(optimizer.step(0.9**number, weight, updates if optimizer is replayed else None))
        assert torch.equal(*norms) or number == 5
        one, two = (state_of(*pair) for pair in zip(drafters, (eager, replayed), strict=True))
        assert all(torch.equal(one[name], two[name]) for name in one), number
    assert len(updates._graphs) == 1


def documents_of(number: int, batch: Batch) -> Batch:
    """The batch with documents of random lengths, the last of them without anchors."""
    generator = torch.Generator().manual_seed(number)
    documents = (torch.rand(ROWS, ROW, generator=generator) < 0.02).long().cumsum(1)
    starts = torch.where(documents.diff(dim=1, prepend=documents[:, :1] - 1) > 0, torch.arange(ROW), 0)
    positions = torch.arange(ROW) - starts.cummax(1).values
    supervised = documents < documents[:, -1:]
    rows = Rows(batch.rows.tokens.cpu(), documents, positions, supervised)
    return Batch(rows.to(torch.device("cuda")), batch.states, rows)


@pytest.mark.parametrize("execution", ["eager", "compiled", "captured"])
def test_200_steps_of_random_lengths_neither_grow_in_memory_nor_compile(gpus: int, execution: str) -> None:
    step = step_of(execution)
    optimizer = DrafterOptimizer(step.drafter, Optimizer())
    batch = batch_of(SHAPES["small"], ROWS, ROW, torch.device("cuda"))

    def whole(number: int) -> None:
        uniform, here = draw((ROWS, ROW), 0, number, 0), documents_of(number, batch)
        assert here.host is not None
        known = step.supervised(here.host, [uniform])
        sums = step.gradients(here, [uniform.cuda()], supervised=known)
        optimizer.step(1.0, sums.weight, step.execution.update)

    for number in range(10):
        whole(number)
    compiled = dict(counters["stats"])
    reserved = torch.cuda.memory_reserved()
    segments = torch.cuda.memory_stats()["segment.all.current"]
    for number in range(10, 210):
        whole(number)
    assert torch.cuda.memory_reserved() == reserved
    assert torch.cuda.memory_stats()["segment.all.current"] == segments
    assert dict(counters["stats"]) == compiled


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "target")


def trained(folder: Path, target: Path, execution: str, steps: int, resume: Path | None = None) -> None:
    """A run of the real program's loop, on one GPU."""
    content: dict[str, Any] = {
        "target": {"path": str(target)},
        "device": "cuda",
        "attention": "dense",  # flex attention has no heads as small as these
        "execution": execution,
        "token_budget": 96,
        "micro_rows": 2,
        "drafter": {"layers": 2, "block_size": 4, "taps": [0, 2, 4], "mask_token": "<|mask|>"},
        "data": {"rows": 10, "row_tokens": 24, "prompt_tokens": 8, "batch": 10},
        "objective": {"anchors_per_document": 4, "gamma": 3.0, "replays": 2},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup_steps": 2, "kind": "constant_linear", "constant_share": 1.0},
        "budget": {"steps": steps},
        "report_every_s": 0.0,
        "evaluate": {"prompts": 0},
        "logging": {"trackers": []},
    }
    run(configs.load(content), RunFiles(folder), print, None, resume, allow_changes=resume is not None)


@pytest.mark.parametrize("execution", ["eager", "compiled", "captured"])
def test_a_resumed_run_is_the_run_to_the_bit(gpus: int, target: Path, tmp_path: Path, execution: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(whole, target, execution, 16)
    trained(parts, target, execution, 9)
    trained(parts, target, execution, 16, resume=parts)
    found = []
    for folder in (whole, parts):
        entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        last = folder / "checkpoints" / "step-0000016"
        digests = [
            hashlib.sha256((last / name).read_bytes()).hexdigest()
            for name in ("model.safetensors", "state.safetensors")
        ]
        found.append(([entry["loss"] for entry in entries if "loss" in entry], digests))
    assert len(found[0][0]) == 16 and found[0] == found[1]
