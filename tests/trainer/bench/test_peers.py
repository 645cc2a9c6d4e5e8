"""bench/peers.py at toy size on a CPU.

Run: python -m pytest tests/trainer/bench
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from unproven import did_not_run

from trainer.bench.measure import Settings, make_step
from trainer.bench.shapes import SHAPES, batch_of
from trainer.training.objective import make_blocks

pytestmark = pytest.mark.filterwarnings("ignore:flash_attn is not found:UserWarning")  # SpecForge's word

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def program() -> Any:
    path = REPOSITORY / "bench" / "peers.py"
    spec = importlib.util.spec_from_file_location("bench_peers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


TOY = [
    "--shape",
    "toy",
    "--context-tokens",
    "128",
    "--row-tokens",
    "32",
    "--anchors",
    "24",
    "--device",
    "cpu",
]
ABSENT = "not importable here"


def settings(**more: Any) -> Settings:
    return Settings("toy", 128, 32, 24, device="cpu", precision="float32", repeats=1, **more)


def importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.mark.soak  # docs/performance.md shows the same command, and its block runs in tests/docs
def test_all_run_beside_each_other_and_who_does_not_is_named() -> None:
    if not importable("speculators"):
        did_not_run("speculators is not installed: pip install --no-deps speculators==0.9.0")
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "bench" / "peers.py"), *TOY, "--repeats", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    there = ["ours", "speculators", "speculators/bf16", *(["specforge"] if importable("specforge") else [])]
    for name in there:
        found = figures["found"][name]
        assert found["context_tok_s"] == pytest.approx(128 / found["ms"] * 1e3)
        assert found["anchors"] == 24
    for name in there[1:]:
        ratio = figures["found"][name]["ms"] / figures["found"]["ours"]["ms"]
        assert figures["ours_over"][name]["context_tok_s"] == pytest.approx(ratio)
    if "specforge" not in there:
        assert f"specforge        DID NOT RUN: {ABSENT}" in done.stdout


@pytest.mark.parametrize("micro_rows", [None, 2])
def test_specforge_takes_part_where_it_is_importable(program: Any, micro_rows: int | None) -> None:
    found = program.measured(program.specforge, settings(micro_rows=micro_rows))
    if not importable("specforge"):
        assert found.startswith(ABSENT) and "PYTHONPATH=/path/to/SpecForge" in found
        return
    assert found["anchors"] == 24 and found["peak_gib"] is None
    assert found["context_tok_s"] == pytest.approx(128 / found["ms"] * 1e3)


@pytest.mark.parametrize("size", [4, 2])
def test_specforge_does_the_same_work_as_we_do(program: Any, size: int) -> None:
    """With our weights and its anchors: the same gradients, of the average over the whole batch."""
    theirs, shape, cpu, asked = sys.modules["peers_specforge"], SHAPES["toy"], torch.device("cpu"), settings()
    if not importable("specforge"):
        with pytest.raises(program.Absent, match=ABSENT):
            theirs.wrapped_drafter(shape, asked.width, cpu)
        return
    step, model = make_step(asked), theirs.wrapped_drafter(shape, asked.width, cpu)
    model.draft_model.load_state_dict(step.drafter.state_dict())
    model.lm_head.weight.data.copy_(step.head)
    model.embed_tokens.weight.data.copy_(step.target.embedding.weight)
    batch = batch_of(shape, asked.rows, asked.row_tokens, cpu)
    parts = [batch.part(slice(start, start + size)) for start in range(0, asked.rows, size)]
    torch.manual_seed(3)
    theirs.gradients_of(model, batch, size)
    torch.manual_seed(3)
    drawn = [model._sample_anchor_positions(32, part.rows.supervised.long(), cpu) for part in parts]
    anchors, keep = (torch.cat(each) for each in zip(*drawn, strict=True))
    blocks = make_blocks(batch.rows, anchors, keep, shape.block, 7.0, 0)
    sums = step._sums(batch, blocks, step.context(batch))
    (sums.loss / sums.weight).backward()
    found = dict(model.draft_model.named_parameters())
    for name, ours in step.drafter.named_parameters():
        torch.testing.assert_close(found[name].grad, ours.grad, rtol=1e-4, atol=1e-6)


def test_who_is_absent_is_told_how_to_be_brought(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps speculators" in program.measured(program.speculators, settings())
    assert program.measured(program.specforge, settings()).startswith(ABSENT)


def test_shapes_that_another_one_compiled_make_none_dynamic(program: Any) -> None:
    seen: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        held = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        seen.append([type(each.shape[0]).__name__ for each in held if isinstance(each, torch.Tensor)])
        return graph

    def shared(x: torch.Tensor) -> torch.Tensor:  # as all of them compile torch's flex_attention
        return x.sin()

    def peer(rows: int) -> Any:
        torch.compile(shared, backend=backend)(torch.ones(rows, 3))
        return program.Peer(lambda: None, 1)

    for rows in (4, 6):
        program.measured(lambda asked, rows=rows: peer(rows), settings())
    assert seen == [["int"], ["int"]]


def test_one_that_fails_takes_nobody_along_and_is_no_success(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(asked: Any) -> Any:
        raise ValueError("its own fault\nand more")

    monkeypatch.setattr(program, "PEERS", {"ours": program.ours, "other": failing})
    monkeypatch.setattr(sys, "argv", ["peers.py", *TOY, "--repeats", "1"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    told = capsys.readouterr()
    assert ended.value.code == 1 and "other            DID NOT RUN: ValueError: its own fault\n" in told.out
    found = json.loads(told.out.strip().splitlines()[-1])["found"]
    assert found["ours"]["anchors"] == 24 and found["other"] == "ValueError: its own fault"
    assert "Traceback" in told.err


def test_specforge_is_measured_with_all_rows_and_with_as_many_as_wished(program: Any) -> None:
    def rows(entrants: dict[str, Any]) -> dict[str, int | None]:
        return {name: asked.micro_rows for name, (_, asked) in entrants.items()}

    each = {"ours": None, "speculators": None, "speculators/bf16": None, "specforge": None}
    assert rows(program.entrants(settings())) == each
    assert rows(program.entrants(settings(micro_rows=2))) == {**each, "specforge/2": 2}
    assert rows(program.entrants(settings(micro_rows=2), ["ours", "specforge/2"])) == {
        "ours": None,
        "specforge/2": 2,
    }
    with pytest.raises(SystemExit, match="--who: nobody: not among ours, speculators, "):
        program.entrants(settings(), ["ours", "nobody"])


def test_float32_masters_take_steps_that_bfloat16_weights_would_lose(program: Any) -> None:
    """Both are AdamW with clipping: a step of 1e-4 is less than the spacing of bfloat16 near 1."""
    weights = {}
    for masters, dtype in ((False, torch.float32), (True, torch.float32), (True, torch.bfloat16)):
        model = torch.nn.Linear(4, 1, bias=False).to(dtype)
        torch.nn.init.ones_(model.weight)
        step = program.updated(model, lambda model=model: model.weight.sum().backward(), masters=masters)
        for _ in range(50):
            step()
        assert model.weight.grad is None
        weights[masters, dtype] = model.weight.detach().float()
    plain = weights[False, torch.float32]
    torch.testing.assert_close(plain, torch.full((1, 4), 0.995), rtol=0, atol=1e-4)
    torch.testing.assert_close(weights[True, torch.float32], plain)
    torch.testing.assert_close(weights[True, torch.bfloat16], plain.bfloat16().float())


def test_ratios_are_ours_over_theirs_and_leave_out_what_did_not_run(program: Any) -> None:
    mine = {"ms": 1.0, "context_tok_s": 300.0, "peak_gib": 40.0}
    theirs = {"ms": 2.0, "context_tok_s": 200.0, "peak_gib": 100.0}
    found = {"ours": mine, "a": theirs, "b": "out of memory", "c": {**theirs, "peak_gib": None}}
    assert program.ratios(found) == {
        "a": {"context_tok_s": 1.5, "peak_gib": 0.4},
        "c": {"context_tok_s": 1.5},
    }
    assert program.ratios({**found, "ours": "out of memory"}) == {}
