"""`python -m trainer bench` at toy size on a CPU: one table, one line of JSON, figures that belong together.

Run: python -m pytest tests/trainer/bench
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from trainer.bench.flops import Product
from trainer.bench.targets import documents_of
from trainer.bench.timing import in_turns, product_s
from trainer.cli import app


def bench(*words: str) -> Result:
    return CliRunner().invoke(app, ["bench", *words, "--shape", "toy", "--device", "cpu", "--repeats", "1"])


@pytest.mark.parametrize("what", ["step", "loss", "mask", "target"])
def test_a_bench_prints_a_table_and_one_line_of_json(what: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    result = bench(what, "--json", str(out))
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.strip().splitlines()[-1])
    assert json.loads(out.read_text()) == figures
    assert figures["bench"] == what and "figure" in result.stdout and "value" in result.stdout
    if what == "mask":
        assert figures["full_pairs"] > figures["sliding_pairs"] > 0
        assert figures["full_tiles_asked"] + figures["full_tiles_whole"] <= figures["full_tiles_of"]
        return
    assert figures["share"] == pytest.approx(figures["products_ms"] / figures["ms"])
    assert figures["tflop_s"] == pytest.approx(figures["tflop"] / figures["ms"] * 1e3)
    assert "operations: 2*M*K*N" in result.stdout and figures["peak_gib"] is None
    if what == "step":
        assert figures["context_tok_s"] == pytest.approx(128 / figures["ms"] * 1e3)
        assert figures["anchors_s"] == pytest.approx(24 / figures["ms"] * 1e3)
    if what == "target":
        assert all(
            f"WARNING: {name} kernels are not installed" in result.stdout
            for name in figures["absent_kernels"]
        )


def test_the_targets_rows_hold_documents_and_only_allowed_pairs_count() -> None:
    """4 rows of 32 tokens: 2,112 causal pairs as one document each; fewer as several."""
    found = []
    for words in (["--no-compile"], ["--documents", "5", "--attention", "flex"], ["--documents", "32"]):
        result = bench("target", *words)
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout.strip().splitlines()[-1]))
    one, several, alone = found
    assert (one["attention"], one["compile"], one["documents"], one["pairs"]) == ("sdpa", False, 1, 2112)
    assert (several["attention"], several["documents"]) == ("flex", 5)
    assert 128 < several["pairs"] < 2112 and alone["pairs"] == 128  # a token sees itself
    # 4 layers up to the last tap, 4 heads of 8, two products: 4 * 4 * 8 * 4 operations a pair.
    assert one["tflop"] - several["tflop"] == pytest.approx(512e-12 * (2112 - several["pairs"]))


def test_a_way_that_does_not_work_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("trainer.model.prefill.compiled_layer", lambda: fail)
    result = bench("target", "--compile")
    assert result.exit_code == 1, result.output
    assert "bench target: attention sdpa, compile True does not work here" in result.stderr
    assert "layers cannot be compiled, and run as they are: RuntimeError: no compiler here" in result.stderr


def test_documents_of_random_lengths_fill_their_rows() -> None:
    numbers = documents_of(3, 50, 7)
    assert numbers.shape == (3, 50) and numbers[:, -1].tolist() == [6, 6, 6]
    assert all(len(row.unique()) == 7 and bool((row.diff() >= 0).all()) for row in numbers)
    assert not torch.equal(numbers[0], numbers[1])
    assert torch.equal(numbers, documents_of(3, 50, 7)) and not torch.equal(
        numbers, documents_of(3, 50, 7, 1)
    )


def test_passes_and_micro_rows_count_the_same_operations() -> None:
    whole, cut = (
        json.loads(bench("step", *words).stdout.strip().splitlines()[-1])
        for words in ([], ["--anchors-per-pass", "3", "--micro-rows", "2"])
    )
    assert whole["tflop"] == pytest.approx(cut["tflop"]) and whole["tflop"] > whole["tflop_attention"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context-tokens", "100"], "100 context tokens are no whole rows of 32"),
        (["--micro-rows", "3"], "3 micro rows do not divide 4 rows"),
        (["--anchors", "400"], "a row of 32 tokens has no room for 100 anchors"),
        (["--execution", "captured"], "captured needs a CUDA GPU"),
        (["--documents", "33"], "a row of 32 tokens cannot hold 33 documents"),
    ],
)
def test_what_cannot_run_is_refused_in_one_message(words: list[str], message: str) -> None:
    result = bench("step", *words)
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_a_products_time_is_of_all_its_parts_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, ...]] = []

    def mm(a: Tensor, b: Tensor) -> None:
        done.append((len(a), b.shape[1]))

    def clocked(work: Callable[[], object], device: torch.device) -> int:
        done.clear()
        work()
        return len(done)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr("trainer.bench.timing.clocked", clocked)
    device = torch.device("cpu")
    made = [Product("a", 2, 3, 4, 5, ("input", "weight")), Product("b", 2, 3, 4, 1, ("input",))]
    assert product_s(made[0], torch.float32, device) == 15 and done == 5 * [(2, 4), (2, 3), (4, 3)]
    assert product_s(made[1], torch.float32, device) == 2 and done == [(2, 4), (2, 3)]


def test_work_and_its_products_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    def products(*_: object) -> float:
        turns.append("products")
        return 7.0

    monkeypatch.setattr("trainer.bench.timing.product_s", products)
    made = [Product("a", 2, 3, 4, 1, ())]
    seconds, alone = in_turns(lambda: turns.append("work"), made, torch.float32, torch.device("cpu"), 3)
    assert turns == 3 * ["work", "products"] and alone == 7.0 and 0 < seconds < 7
